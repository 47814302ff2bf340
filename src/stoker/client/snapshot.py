"""The state of everything in one document: the first event of a subscriber (SPEC O3)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stoker.client.status import lanes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stoker.client.figures import EngineFigures
    from stoker.client.models.registry import ModelRegistry
    from stoker.client.requests.history import RequestHistory
    from stoker.client.requests.table import RequestTable
    from stoker.ipc.status import EngineStatus, ExitStatus, ModelStatus

SCHEMA = 2
"""Changes when a field changes its meaning or goes."""
RECENT_S = 300.0
"""How long one that has ended is in a snapshot."""


class KnownEngine(NamedTuple):
    """What a snapshot is made from.

    Attributes:
        version: of this package.
        engine: state, process and threads of the engine.
        last: what the engine said last.
        figures: what it posted last.
        models: served ones as last heard of, and downloads.
        slots: how many each model has that is in memory.
        exits: ends of engines that nobody asked for.
    """

    version: str
    engine: dict[str, Any]
    last: EngineStatus
    figures: EngineFigures
    models: list[ModelStatus]
    slots: Mapping[str, int]
    exits: Iterable[ExitStatus]


def snapshot_of(
    known: KnownEngine, table: RequestTable, history: RequestHistory, registry: ModelRegistry
) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of a snapshot, and the owners of the requests in it by their ids."""
    now, at = time.monotonic(), time.time()
    live = list(table.live())
    rows = [record.status(now) for record in live]
    groups = [group.request_status() for group in table.groups.values()]
    ended = [one for one in history.recent if at - one.arrived_at - one.end_to_end_s <= RECENT_S]
    fields = {
        "schema": SCHEMA,
        "version": known.version,
        "engine": known.engine,
        "slots": [lane.document() for lane in lanes(live, known.slots)],
        "requests": [
            {**row.as_row(), "group": record.group.id if record.group else None}
            for record, row in zip(live, rows, strict=True)
        ]
        + [{**load.as_row(), "group": None} for load in history.loads.rows()],
        "recent": [one.as_row() for one in ended],
        "groups": [one.as_row() for one in groups],
        "models": [model_document(model, known.figures, registry) for model in known.models],
        "memory": known.figures.memory(known.last),
        "cache": known.figures.cache(known.last),
        "heat": {"level": known.last.memory.heat, "sensor": "", "celsius": None},
        "steps": known.figures.steps(),
        "exits": msgspec.to_builtins(list(known.exits)),
        "may": {"administrate": True},
    }
    return fields, {one.request_id: one.owner for one in (*rows, *groups, *ended) if one.owner}


def model_document(heard: ModelStatus, figures: EngineFigures, registry: ModelRegistry) -> dict[str, Any]:
    """A model as the registry heard of it last, with what the engine alone knows."""
    known, entry = figures.models.get(heard.id), registry.get(heard.id)
    is_same = known is not None and known.state == heard.state
    error = entry.error if entry else None
    return {
        "model": heard.id,
        "state": heard.state,
        "stage": heard.stage,
        "fraction": round(heard.fraction, 4),
        "num_bytes": heard.num_bytes,
        "reason": heard.reason,
        "error": {"code": error.code, "message": error.message} if error else None,
        "is_pinned": heard.is_pinned,
        "leases": heard.leases,
        "keep_alive_s": heard.keep_alive_s,
        "unload_in_s": known.unload_in_s if known is not None and is_same else None,
        "num_slots": entry.info.num_slots if entry else 0,
        "bytes": known.bytes if known is not None and is_same else heard.bytes,
        "label": entry.info.label if entry else "",
    }
