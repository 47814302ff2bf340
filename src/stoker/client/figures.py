"""What the engine said last of its steps, its memory and what it stores, as events show it (SPEC O3).

Owns the shape of these events, which `/v1/runtime` has too. The engine posts them while somebody watches.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.ipc.figures import CacheFigures, Figures, MachineFigures, MemoryFigures, StepFigures

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.client.event_bus import EventBus
    from stoker.ipc.status import CacheStatus, DeviceStatus, EngineStatus, MemoryStatus, ModelStatus

MAX_MODELS = 64
"""Models whose last steps are kept; past this the one that stepped longest ago goes."""


class EngineFigures:
    """The last figures of an engine.

    Args:
        bus: gets them as they come.

    Attributes:
        models: as the engine knows them, by id; empty: it was not watched yet.
        models_s: when it said so, in seconds on a monotonic clock.
    """

    def __init__(self, bus: EventBus) -> None:
        self.models: dict[str, ModelStatus] = {}
        self.models_s = 0.0
        self._bus = bus
        self._steps: dict[str, dict[str, Any]] = {}
        self._memory: dict[str, Any] | None = None
        self._cache: dict[str, Any] | None = None
        self.machines: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"<EngineFigures of {sorted(self._steps)}>"

    def take(self, figures: Figures) -> None:
        """The engine has posted these."""
        match figures:
            case StepFigures():
                document = msgspec.structs.asdict(figures)
                self._steps.pop(figures.model, None)
                self._steps[figures.model] = document
                if len(self._steps) > MAX_MODELS:
                    del self._steps[next(iter(self._steps))]
                self._bus.publish("steps", document)
            case MemoryFigures():
                self.models = {model.id: model for model in figures.models}
                self.models_s = time.monotonic()
                self._memory = memory_document(figures.memory, figures.devices, figures.physical)
                self._bus.publish("memory", self._memory)
            case MachineFigures():
                self.machines = msgspec.to_builtins(figures.machines)
                self._bus.publish("machines", {"machines": self.machines})
            case CacheFigures():
                self._cache = _cache_of(figures)
                self._bus.publish("cache", self._cache)
                self._bus.has_figures.set()  # it is the last of the first ones

    def engine_gone(self) -> None:
        """No engine steps or has models any more; what else it said is shown as it was."""
        self._steps.clear()
        self.models = {}

    def steps(self) -> list[dict[str, Any]]:
        """The last of each model that is stepping or was."""
        return [{"event": "steps", **document} for document in self._steps.values()]

    def memory(self, last: EngineStatus) -> dict[str, Any] | None:
        """The last figures, or those of a status; None: no engine has said anything yet."""
        if self._memory is None and last.memory.limit:
            return {"event": "memory", **memory_document(last.memory, last.devices, 0)}
        return None if self._memory is None else {"event": "memory", **self._memory}

    def cache(self, last: EngineStatus) -> dict[str, Any]:
        """The same of what is stored."""
        if self._cache is None:
            return {"event": "cache", **cache_document(last.cache, last.kv_cells_used, last.kv_cells_total)}
        return {"event": "cache", **self._cache}


def memory_document(memory: MemoryStatus, devices: Iterable[DeviceStatus], physical: int) -> dict[str, Any]:
    """Bytes and pressure, of the machine and of each device."""
    return {
        "limit": memory.limit,
        "footprint": memory.footprint,
        "available": memory.available,
        "physical": physical or None,
        "tier": memory.tier,
        "pressure": memory.pressure or None,
        "pressure_fraction": memory.pressure_fraction,
        "pressure_source": memory.pressure_source,
        "heat": memory.heat,
        "rungs": memory.rungs,
        "ladder": memory.ladder,
        "thresholds": memory.thresholds,
        "lines": memory.lines,
        "devices": msgspec.to_builtins(list(devices)),
    }


def cache_document(cache: CacheStatus, cells_used: int, cells_total: int) -> dict[str, Any]:
    """Tier by tier: bytes and how many stored prefixes (SPEC C14); `store` where machines share one (C19)."""
    shared = {} if cache.shared is None else {"store": msgspec.to_builtins(cache.shared)}
    return {
        "entries": cache.num_entries,
        "unsaved": cache.num_unsaved,
        "live": {"cells_used": cells_used, "cells_total": cells_total},
        "ram": {"bytes": cache.ram_bytes, "limit": cache.ram_limit_bytes, "entries": cache.num_ram},
        "disk": {
            "bytes": cache.disk_bytes,
            "limit": cache.disk_limit_bytes,
            "entries": cache.num_disk,
            "problem": cache.disk_problem,
        },
        **shared,
    }


def _cache_of(figures: CacheFigures) -> dict[str, Any]:
    return {
        **cache_document(figures.cache, figures.cells_used, figures.cells_total),
        "queries_total": figures.queries_total,
        "hits_total": figures.hits_total,
        "hit_rate": figures.hit_rate,
        "prefixes": msgspec.to_builtins(figures.prefixes),
    }
