"""The document of GET /v1/runtime (SPEC I4): what the engine holds, as plain values.

Owns what is shown while no engine can be asked: models as the front last heard of them, memory as it is
measured here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.ipc.status import EngineHealth, EngineStatus, ModelStatus, SlotStatus, WaitStatus
    from stoker.runtime import RuntimeStatus


def status_document(status: RuntimeStatus, roster: Sequence[ModelStatus]) -> dict[str, Any]:
    """Engine, slots, everybody who does not run, models, memory and heat."""
    engine = status.engine
    return {
        "engine": {
            "pid": status.pid,
            "restarts": status.restarts,
            "label": status.label,
            "threads": status.threads,
            "threads_reason": engine.threads_reason,
            **engine_document(status.health),
        },
        "slots": [_slot(slot) for slot in engine.slots],
        "queue": [_waiting(waiting) for waiting in engine.queue],
        "parked": [_waiting(waiting) for waiting in engine.parked],
        "paused": [_waiting(waiting) for waiting in engine.paused],
        "models": [_model(model) for model in models_now(status, roster)],
        "memory": _memory(status),
        "heat": engine.memory.heat,
        "cache": _cache(engine),
        "counters": engine.counters,
    }


def engine_document(health: EngineHealth) -> dict[str, Any]:
    """Where the engine is, for how long, and if it is away: why, and when the next start is."""
    document: dict[str, Any] = {"state": health.state, "for_s": round(health.for_s, 3)}
    if health.num_failed_starts:
        document["failed_starts"] = health.num_failed_starts
    if health.next_start_s is not None:
        document["next_start_s"] = round(health.next_start_s, 3)
    if health.reason:
        document["reason"] = health.reason
    return document


def models_now(status: RuntimeStatus, roster: Sequence[ModelStatus]) -> list[ModelStatus]:
    """Every served model, the default first: by the engine where it knows it, else by the front."""
    known = {model.id: model for model in status.engine.models}
    served = [known.pop(model.id, model) for model in roster]
    return served + list(known.values())


def _model(model: ModelStatus) -> dict[str, Any]:
    return {
        "id": model.id,
        "state": model.state,
        "stage": model.stage,
        "fraction": model.fraction,
        "bytes": model.bytes,
        "pinned": model.is_pinned,
        "leases": model.leases,
        "keep_alive_s": model.keep_alive_s,
        "unload_in_s": model.unload_in_s,
        "degraded": model.degraded,
        "reason": model.reason,
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


def _memory(status: RuntimeStatus) -> dict[str, Any]:
    """Bytes and pressure as the engine measured them last; what can be measured here while there is none."""
    memory = status.engine.memory
    if not memory.limit:
        return {**_measured(status.pid), "tier": None, "pressure": None, "rungs": [], "lines": {}}
    return {
        "limit": memory.limit,
        "footprint": memory.footprint,
        "available": memory.available,
        "tier": memory.tier,
        "pressure": memory.pressure or None,
        "pressure_fraction": memory.pressure_fraction,
        "pressure_source": memory.pressure_source,
        "rungs": memory.rungs,
        "lines": memory.lines,
    }


def _measured(engine_pid: int) -> dict[str, int]:
    """What both processes hold, and what the machine could still give."""
    footprint = 0
    for pid in {psutil.Process().pid, engine_pid} - {0}:
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
