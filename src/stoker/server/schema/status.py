"""The document of GET /v1/runtime (SPEC I4): what the engine holds, as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from stoker.runtime import RuntimeStatus
    from stoker.status import EngineStatus, SlotStatus, WaitStatus
    from stoker.values import ModelInfo


def status_document(status: RuntimeStatus, models: list[ModelInfo]) -> dict[str, Any]:
    """Engine, slots, everybody who does not run, models and memory."""
    engine = status.engine
    return {
        "engine": {
            "pid": status.pid,
            "state": status.state,
            "restarts": status.restarts,
            "label": status.label,
            "threads": status.threads,
            "threads_reason": engine.threads_reason,
        },
        "slots": [_slot(slot) for slot in engine.slots],
        "queue": [_waiting(waiting) for waiting in engine.queue],
        "parked": [_waiting(waiting) for waiting in engine.parked],
        "paused": [_waiting(waiting) for waiting in engine.paused],
        "models": [{"id": info.id, "state": "ready", "bytes": info.memory_bytes} for info in models],
        "memory": _memory(status),
        "cache": _cache(engine),
        "counters": engine.counters,
    }


def _slot(slot: SlotStatus) -> dict[str, Any]:
    return {
        "id": slot.id,
        "state": slot.state,
        "request_id": slot.request_id,
        "class": slot.priority,
        "model": slot.model,
        "num_tokens": slot.num_tokens,
        "story": slot.story,
    }


def _waiting(waiting: WaitStatus) -> dict[str, Any]:
    return {
        "request_id": waiting.request_id,
        "class": waiting.priority,
        "index": waiting.index,
        "model": waiting.model,
        "position": waiting.position,
        "eta_s": waiting.eta_s,
        "num_tokens": waiting.num_tokens,
        "form": waiting.form,
        "story": waiting.story,
    }


def _memory(status: RuntimeStatus) -> dict[str, int | None]:
    """Bytes: what both processes hold, and what the machine could still give."""
    footprint = 0
    for pid in {psutil.Process().pid, status.pid} - {None, 0}:
        try:
            footprint += psutil.Process(pid).memory_info().rss
        except psutil.Error:  # the engine died between the two questions
            continue
    machine = psutil.virtual_memory()
    return {"limit": machine.total, "footprint": footprint, "available": machine.available}


def _cache(engine: EngineStatus) -> dict[str, Any]:
    """Tier by tier; bytes and how many stored prefixes (SPEC C14)."""
    cache = engine.cache
    return {
        "entries": cache.num_entries,
        "unsaved": cache.num_unsaved,
        "live": {"cells_used": engine.kv_cells_used, "cells_total": engine.kv_cells_total},
        "ram": {"bytes": cache.ram_bytes, "limit": cache.ram_limit_bytes, "entries": cache.num_ram},
        "disk": {
            "bytes": cache.disk_bytes,
            "limit": cache.disk_limit_bytes,
            "entries": cache.num_disk,
            "problem": cache.disk_problem,
        },
    }
