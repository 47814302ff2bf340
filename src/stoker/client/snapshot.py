"""The state of everything in one document: the first event of a subscriber (SPEC O3)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stoker.client.status import lanes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stoker.client.figures import EngineFigures
    from stoker.client.model_rows import ModelRow
    from stoker.client.requests.history import RequestHistory
    from stoker.client.requests.table import RequestTable
    from stoker.ipc.status import EngineStatus, ExitStatus

SCHEMA = 2
"""Changes when a field changes its meaning or goes."""


class KnownEngine(NamedTuple):
    """What a snapshot is made from.

    Attributes:
        version: of this package.
        engine: state, process and threads of the engine.
        last: what the engine said last.
        figures: what it posted last.
        models: served ones, and downloads.
        slots: how many each model has that is in memory.
        exits: ends of engines that nobody asked for.
    """

    version: str
    engine: dict[str, Any]
    last: EngineStatus
    figures: EngineFigures
    models: list[ModelRow]
    slots: Mapping[str, int]
    exits: Iterable[ExitStatus]


def snapshot_of(
    known: KnownEngine, table: RequestTable, history: RequestHistory
) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of a snapshot, and the owners of the requests in it by their ids."""
    now = time.monotonic()
    live = list(table.live())
    rows = [record.status(now) for record in live]
    groups = [group.request_status() for group in table.groups.values()]
    ended = list(history.recent)
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
        "models": [model.fields for model in known.models],
        "memory": known.figures.memory(known.last),
        "cache": known.figures.cache(known.last),
        "heat": {"level": known.last.memory.heat, "sensor": "", "celsius": None},
        "steps": known.figures.steps(),
        "exits": msgspec.to_builtins(list(known.exits)),
        "may": {"administrate": True, "texts": history.texts is not None},
    }
    if known.figures.machines:
        fields["machines"] = known.figures.machines
    return fields, {one.request_id: one.owner for one in (*rows, *groups, *ended) if one.owner}
