"""Documents of `/v1/runtime/events` as a busy server sends them, for the tests of `stoker top`."""

from __future__ import annotations

AT = 1000.0


def row(request_id: str, state: str, **fields) -> dict:
    """A row of a request."""
    return {
        "request_id": request_id,
        "model": "chat",
        "priority": "interactive",
        "kind": "chat",
        "route": "/v1/chat/completions",
        "arrived_at": AT - 8.0,
        "state": state,
        "position": None,
        "eta_s": None,
        "waits_for": "",
        "prompt_tokens": 1200,
        "cached_tokens": 1024,
        "cache_source": "ram",
        "processed_tokens": 1200,
        "completion_tokens": 0,
        "max_tokens": 256,
        "queue_s": 0.4,
        "first_token_s": None,
        "end_to_end_s": 8.0,
        "tokens_per_second": None,
        "num_parks": 0,
        "parked_s": 0.0,
        "num_restarts": 0,
        "error": None,
        "finish_reason": None,
        "group": None,
        "moves": [{"at": AT - 3.0, "state": state, "index": 0, "slot": None, "reason": "", "by": None}],
        **fields,
    }


def lane(slot: int, request_id: str | None = None, state: str = "idle", model: str = "chat") -> dict:
    """A slot."""
    index = None if request_id is None else 0
    return {"slot": slot, "model": model, "request_id": request_id, "index": index, "state": state}


def snapshot(**fields) -> dict:
    """The state of everything."""
    return {
        "event": "snapshot",
        "at": AT,
        "id": "9f3a-17",
        "schema": 2,
        "version": "0.3.0",
        "dropped": 0,
        "engine": {
            "state": "serving",
            "for_s": 720.0,
            "reason": "",
            "pid": 1,
            "restarts": 1,
            "label": "llama.cpp · CPU AVX512",
            "threads": 2,
            "threads_reason": "",
        },
        "slots": [lane(0, "req-1", "decode"), lane(1, "req-2", "prefill"), lane(2)],
        "requests": [
            row("req-1", "decode", completion_tokens=96, first_token_s=0.9, tokens_per_second=18.4),
            row("req-2", "prefill", prompt_tokens=4000, processed_tokens=1024),
            row("req-3", "queued", position=0, eta_s=4.2, waits_for="no free slot"),
            row(
                "req-4",
                "prefix_wait",
                priority="background",
                position=1,
                eta_s=75.0,
                waits_for="waits for a prefix that req-2 computes",
            ),
            row(
                "req-5",
                "parked",
                priority="background",
                num_parks=2,
                parked_s=6.0,
                waits_for="gave its slot to req-1 (interactive)",
            ),
        ],
        "recent": [
            row(
                "req-a",
                "ended",
                finish_reason="stop",
                completion_tokens=40,
                first_token_s=0.5,
                end_to_end_s=3.0,
            ),
            row(
                "req-b",
                "ended",
                priority="background",
                error={"code": "request_timeout", "message": "took longer than its timeout_s 2"},
                first_token_s=None,
                end_to_end_s=2.0,
            ),
        ],
        "groups": [
            row(
                "embed-7",
                "queued",
                kind="embed",
                priority="background",
                position=2,
                num_members=20,
                num_done=4,
                waits_for="no free slot",
            )
        ],
        "models": [
            {
                "model": "chat",
                "state": "ready",
                "stage": "",
                "fraction": 1.0,
                "is_pinned": True,
                "leases": 4,
                "unload_in_s": None,
                "num_slots": 3,
                "bytes": {"weights": 96_000_000, "kv": 12_000_000},
                "label": "CPU",
            },
            {
                "model": "other",
                "state": "loading",
                "stage": "weights",
                "fraction": 0.43,
                "is_pinned": False,
                "leases": 0,
                "unload_in_s": None,
                "num_slots": 0,
                "bytes": {"weights": 4_000_000_000},
                "label": "",
            },
        ],
        "memory": {
            "limit": 8 * 2**30,
            "footprint": 3 * 2**30,
            "available": 4 * 2**30,
            "pressure": "warning",
            "pressure_fraction": 0.74,
            "pressure_source": "system",
            "rungs": ["trim_allocator"],
            "devices": [
                {
                    "id": "CUDA0",
                    "total": 2**34,
                    "free": 2**33,
                    "own": 2**32,
                    "celsius": 61.0,
                    "power_w": 180.0,
                }
            ],
        },
        "cache": {
            "entries": 3,
            "ram": {"bytes": 12 * 2**20, "limit": 2**30, "entries": 2},
            "disk": {"bytes": 0, "limit": 0, "entries": 1, "problem": ""},
            "hit_rate": 0.61,
        },
        "heat": {"level": "nominal", "sensor": "", "celsius": None},
        "steps": [
            {
                "event": "steps",
                "model": "chat",
                "num_steps": 12,
                "span_s": 0.25,
                "step_ms": 20.8,
                "target_ms": 50.0,
                "rows": 3.5,
                "prompt_tokens": 128,
                "tokens": 42,
            }
        ],
        "exits": [],
        "may": {"administrate": True},
        **fields,
    }


def moved(request_id: str, what: str, state: str, **fields) -> dict:
    """A move of a request; `slot`, `reason` and `by` are the move's."""
    move = {"at": AT + 1.0, "state": state, "index": 0, "slot": None, "reason": "", "by": None}
    move |= {name: fields.pop(name) for name in ("slot", "reason", "by", "index") if name in fields}
    return {
        "event": "request",
        "at": AT + 1.0,
        "request_id": request_id,
        "what": what,
        "move": move,
        **fields,
    }
