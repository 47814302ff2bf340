"""Documents of `/v1/runtime/events` as a busy machine would tell them: seeded, of any length.

A small machine: two models with slots, two classes, parking of background work, waits for a prefix, an
engine that dies. It follows the shapes of schema 2; figures are plausible and nothing else.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Document = dict[str, Any]
SLOTS = {"chat": 2, "code": 2}
TICK_S = 0.25
GIB = 2**30


class _Request:
    def __init__(self, number: int, at: float, rng: random.Random) -> None:
        self.id = f"req-{number}"
        self.model = rng.choice(["chat", "chat", "code"])
        self.priority = rng.choice(["interactive", "background", "background"])
        self.arrived_at = at
        self.prompt_tokens = rng.randrange(64, 6000)
        self.cached_tokens = self.prompt_tokens // 2 if rng.random() < 0.4 else 0
        self.processed = self.cached_tokens
        self.max_tokens = rng.randrange(40, 900)
        self.written = 0
        self.state = "queued"
        self.slot: int | None = None
        self.moves: list[Document] = []
        self.num_parks = 0
        self.num_restarts = 0
        self.first_token_at: float | None = None
        self.admitted_at: float | None = None

    @property
    def is_background(self) -> bool:
        return self.priority == "background"

    def row(self, at: float) -> Document:
        first_s = None if self.first_token_at is None else self.first_token_at - self.arrived_at
        decode_s = 0.0 if self.first_token_at is None else at - self.first_token_at
        return {
            "request_id": self.id,
            "model": self.model,
            "priority": self.priority,
            "kind": "chat",
            "route": "/v1/chat/completions",
            "arrived_at": self.arrived_at,
            "state": self.state,
            "position": None,
            "eta_s": None,
            "waits_for": "",
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cache_source": "cells" if self.cached_tokens else "",
            "processed_tokens": self.processed,
            "completion_tokens": self.written,
            "max_tokens": self.max_tokens,
            "queue_s": (self.admitted_at or at) - self.arrived_at,
            "first_token_s": first_s,
            "decode_s": decode_s,
            "end_to_end_s": at - self.arrived_at,
            "tokens_per_second": self.written / decode_s if decode_s > 0 else None,
            "itl_ms": {"mean": 21.4, "p50": 20.1, "p99": 48.7, "max": 90.2},
            "num_parks": self.num_parks,
            "parked_s": 0.0,
            "num_restarts": self.num_restarts,
            "draft_tokens": 0,
            "accepted_tokens": 0,
            "waited_for": "",
            "finish_reason": None,
            "error": None,
            "moves": self.moves[-64:],
            "num_moves": len(self.moves),
        }


class SimulatedMachine:
    """Tells documents tick by tick.

    Args:
        seed: of everything that looks like chance.
        start: seconds since the epoch.
        arrivals_per_s: requests that come.
        restart_at_s: seconds after the start when its engine dies, once.
    """

    def __init__(
        self,
        *,
        seed: int = 1,
        start: float = 1_763_888_000.0,
        arrivals_per_s: float = 0.5,
        restart_at_s: float = 70.0,
    ) -> None:
        self._rng = random.Random(seed)
        self._start = self._at = start
        self._arrivals_per_s = arrivals_per_s
        self._restart_at_s = restart_at_s
        self._dead_until = 0.0
        self._has_died = False
        self._restarts = 0
        self._num_requests = 0
        self._num_documents = 0
        self._live: dict[str, _Request] = {}
        self._recent: list[Document] = []
        self._queries = self._hits = 0
        self._footprint = 5.2 * GIB
        self._pressure = "normal"

    def documents(self, length_s: float) -> Iterator[Document]:
        """A snapshot, and what happens in so many seconds."""
        yield self._told("snapshot", **self.snapshot())
        while self._at < self._start + length_s:
            self._at = round(self._at + TICK_S, 3)
            yield from self._tick()

    def snapshot(self) -> Document:
        """The state of everything."""
        slots = [{"slot": slot, "model": model} for model, num in SLOTS.items() for slot in range(num)]
        return {
            "schema": 2,
            "version": "0.0.0",
            "dropped": 0,
            "engine": self._engine("serving") | {"for_s": 12.0},
            "slots": slots,
            "requests": [each.row(self._at) for each in self._live.values()],
            "recent": self._recent[-64:],
            "groups": [],
            "models": [
                {
                    "id": "chat",
                    "state": "ready",
                    "is_pinned": True,
                    "leases": 2,
                    "unload_in_s": None,
                    "label": "SmolLM2-135M Q4_K_M",
                    "bytes": {"weights": 105 << 20, "kv": 377 << 20, "compute": 90 << 20},
                },
                {
                    "id": "code",
                    "state": "ready",
                    "is_pinned": False,
                    "leases": 0,
                    "unload_in_s": 412.0,
                    "label": "Qwen3-0.6B Q8_0",
                    "bytes": {"weights": 639 << 20, "kv": 448 << 20, "compute": 299 << 20},
                },
                {
                    "id": "embed",
                    "state": "absent",
                    "is_pinned": False,
                    "leases": 0,
                    "bytes": {"weights": 37 << 20},
                },
            ],
            "memory": self._memory(),
            "cache": self._cache(),
            "steps": [],
            "exits": [],
            "heat": {"level": "nominal", "sensor": "coretemp", "celsius": 61.0},
            "may": {"administrate": True},
        }

    def _told(self, event: str, **fields: object) -> Document:
        self._num_documents += 1
        return {"event": event, "at": self._at, "id": f"sim-{self._num_documents}", **fields}

    def _engine(self, state: str, reason: str = "") -> Document:
        label = "llama.cpp · CPU AVX512"
        return {
            "state": state,
            "reason": reason,
            "pid": 4000 + self._restarts,
            "restarts": self._restarts,
            "label": label,
        }

    def _moved(
        self, request: _Request, what: str, state: str, reason: str, by: str | None = None, **fields: object
    ) -> Document:
        request.state = state
        slot = request.slot if state in {"prefill", "decode"} else None
        index = 0 if slot is not None or state == "parked" else None
        move = {"at": self._at, "state": state, "index": index, "slot": slot, "reason": reason, "by": by}
        request.moves.append(move)
        return self._told("request", request_id=request.id, what=what, move=move, group=None, **fields)

    # ------------------------------------------------------------ a tick

    def _tick(self) -> Iterator[Document]:
        elapsed_s = self._at - self._start
        if not self._has_died and elapsed_s >= self._restart_at_s:
            yield from self._die()
        yield from self._arrive()
        if self._dead_until:
            if self._at < self._dead_until:
                return
            yield from self._revive()
        for model in SLOTS:
            yield from self._admit(model)
        yield from self._compute()
        if elapsed_s % 1 == 0:
            yield from self._sense()
        if elapsed_s % 2 == 0:
            yield self._told("cache", **self._cache())

    def _arrive(self) -> Iterator[Document]:
        while self._rng.random() < self._arrivals_per_s * TICK_S and len(self._live) < 40:
            self._num_requests += 1
            request = _Request(self._num_requests, self._at, self._rng)
            self._live[request.id] = request
            self._queries += request.prompt_tokens
            self._hits += request.cached_tokens
            yield self._moved(
                request,
                "arrived",
                "preparing",
                "",
                **_without(
                    request.row(self._at), "request_id", "moves", "num_moves", "state", "position", "eta_s"
                ),
            )
            waiting = [
                each for each in self._live.values() if each.state == "queued" and each.model == request.model
            ]
            yield self._moved(
                request, "queued", "queued", "no free slot", position=len(waiting), eta_s=1.5 * len(waiting)
            )
            if request.cached_tokens and self._rng.random() < 0.5 and len(self._live) > 1:
                by = next(iter(self._live))
                yield self._moved(
                    request, "waiting", "prefix_wait", f"waits for a prefix that {by} computes", by
                )

    def _admit(self, model: str) -> Iterator[Document]:
        mine = [each for each in self._live.values() if each.model == model]
        waiting = [each for each in mine if each.slot is None]
        waiting.sort(key=lambda each: (each.is_background, each.state != "parked", each.arrived_at))
        taken = {each.slot: each for each in mine if each.slot is not None}
        for request in waiting:
            free = [slot for slot in range(SLOTS[model]) if slot not in taken]
            if not free:
                jobs = [each for each in taken.values() if each.is_background]
                if request.is_background or not jobs:
                    return
                job = max(jobs, key=lambda each: each.arrived_at)
                free = [slot for slot, each in taken.items() if each is job]
                job.num_parks += 1
                yield self._moved(
                    job, "parked", "parked", f"gave its slot to {request.id} ({request.priority})", request.id
                )
                job.slot = None
            request.slot = free[0]
            taken[free[0]] = request
            request.admitted_at = request.admitted_at or self._at
            yield self._moved(request, "admitted", "prefill", "")

    def _compute(self) -> Iterator[Document]:
        for model in SLOTS:
            rows = [each for each in self._live.values() if each.slot is not None and each.model == model]
            num_read = num_written = 0
            for request in rows:
                if request.state == "prefill":
                    num_read += 256
                    request.processed += 256
                    if request.processed >= request.prompt_tokens:
                        request.processed = request.prompt_tokens
                        request.first_token_at = request.first_token_at or self._at
                        yield self._moved(request, "decoding", "decode", "")
                    elif self._at % 1 == 0:
                        yield self._told(
                            "request",
                            request_id=request.id,
                            what="prefill_progress",
                            total=request.prompt_tokens,
                            cached=request.cached_tokens,
                            processed=request.processed,
                            time_ms=900,
                        )
                    continue
                num_written += 12
                request.written += 12
                if request.written >= request.max_tokens:
                    yield self._end(request)
            if rows:
                yield self._told(
                    "steps",
                    model=model,
                    num_steps=12,
                    span_s=TICK_S,
                    step_ms=20.8 + num_read / 64,
                    longest_ms=33.0 + num_read / 32,
                    target_ms=50.0,
                    rows=3.5,
                    prompt_tokens=num_read,
                    tokens=num_written,
                    num_prefill=1,
                    num_decode=len(rows),
                    threads=2,
                    threads_reason="",
                )

    def _end(self, request: _Request) -> Document:
        del self._live[request.id]
        reason = self._rng.choice(["stop", "length", "stop"])
        moved = self._moved(request, "finished", "ended", reason)
        self._recent.append(request.row(self._at) | {"finish_reason": reason})
        del self._recent[:-64]
        return moved | self._recent[-1]

    def _die(self) -> Iterator[Document]:
        self._has_died = True
        self._restarts += 1
        self._dead_until = self._at + 2.5
        yield self._told("engine", **self._engine("restarting", "its process was ended by signal 9"))
        for request in self._live.values():
            yield self._moved(request, "waiting", "held", "the engine restarts")
            request.slot = None

    def _revive(self) -> Iterator[Document]:
        self._dead_until = 0.0
        yield self._told("engine", **self._engine("serving"))
        for request in self._live.values():
            if request.admitted_at:
                request.num_restarts += 1
                request.processed = 0
            yield self._moved(
                request,
                "replayed",
                "queued",
                f"the engine was restarted: goes on from {request.written} tokens",
            )

    def _sense(self) -> Iterator[Document]:
        self._footprint += self._rng.uniform(-0.25, 0.27) * GIB
        self._footprint = min(7.6 * GIB, max(4.4 * GIB, self._footprint))
        memory = self._memory()
        yield self._told("memory", **memory)
        if memory["pressure"] != self._pressure:
            self._pressure = memory["pressure"]
            yield self._told(
                "pressure", level=self._pressure, fraction=memory["pressure_fraction"], source="footprint"
            )
            is_undone = self._pressure == "normal"
            yield self._told(
                "rung", rung="drop_snapshots", is_undone=is_undone, freed_bytes=0 if is_undone else 120 << 20
            )

    def _memory(self) -> Document:
        fraction = self._footprint / (8 * GIB)
        pressure = "critical" if fraction >= 0.85 else "warning" if fraction >= 0.7 else "normal"
        rungs = {
            "normal": [],
            "warning": ["trim_allocator", "drop_snapshots"],
            "critical": ["trim_allocator", "drop_snapshots", "drop_idle_cells"],
        }
        return {
            "limit": 8 * GIB,
            "footprint": int(self._footprint),
            "available": int(8 * GIB - self._footprint),
            "physical": 16 * GIB,
            "tier": "high",
            "pressure": pressure,
            "pressure_fraction": round(fraction, 4),
            "pressure_source": "footprint",
            "rungs": rungs[pressure],
            "ladder": [
                "trim_allocator",
                "drop_snapshots",
                "drop_idle_cells",
                "lower_limits",
                "pause_background",
                "unload_idle",
                "park_interactive",
            ],
            "thresholds": {"fraction_warning": 0.7, "fraction_critical": 0.85},
            "lines": {
                "weights": 744 << 20,
                "kv": 825 << 20,
                "compute": 389 << 20,
                "cache": 612 << 20,
                "parked": 48 << 20,
            },
            "devices": [
                {
                    "id": "CUDA0",
                    "name": "NVIDIA H200",
                    "kind": "cuda",
                    "total": 139 * GIB,
                    "free": 96 * GIB,
                    "own": 41 * GIB,
                    "others": 2 * GIB,
                    "celsius": 52.0,
                    "power_w": 310.0,
                    "held_by": "",
                    "lines": {"weights": 30 * GIB, "kv": 10 * GIB, "compute": GIB},
                }
            ],
        }

    def _cache(self) -> Document:
        users = list(self._live)[:2]
        prefixes = []
        for number, (parent, tokens) in enumerate(
            [(None, 2048), ("p0", 3500), ("p0", 2900), ("p1", 5200), (None, 812), (None, 300), ("p5", 1400)]
        ):
            prefixes.append(
                {
                    "id": f"p{number}",
                    "parent": parent,
                    "namespace": ["a41f09", "77c2d0"][number > 3],
                    "model": "chat",
                    "where": ["ram", "disk", "ram"][number % 3],
                    "num_tokens": tokens,
                    "own_tokens": tokens // 2,
                    "ram_bytes": tokens * 23000,
                    "disk_bytes": tokens * 23000 if number % 3 else 0,
                    "num_hits": 3 * number,
                    "idle_s": 4.0 * number * number,
                    "num_leases": 0,
                    "is_background": number == 4,
                    "used_by": users if number == 1 else [],
                }
            )
        rate = self._hits / self._queries if self._queries else None
        return {
            "entries": 7,
            "ram": {"bytes": 612 << 20, "limit": 2 * GIB, "entries": 5},
            "disk": {"bytes": 3 * GIB, "limit": 8 * GIB, "entries": 31, "problem": ""},
            "live": {"cells_used": 9216, "cells_total": 16384},
            "queries_total": self._queries,
            "hits_total": self._hits,
            "hit_rate": rate,
            "prefixes": prefixes,
        }


def _without(row: Document, *names: str) -> Document:
    return {name: value for name, value in row.items() if name not in names}
