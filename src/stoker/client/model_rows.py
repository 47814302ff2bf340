"""The served models as events show them: state, size, who uses each, how long it stays.

Owns the shape of a model in snapshots and in events, and tells of changes that no engine reports as a move:
pins, who uses a model, when it is unloaded.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.ipc.model import ModelClass, ModelLife

if TYPE_CHECKING:
    from stoker.client.event_bus import EventBus
    from stoker.client.figures import EngineFigures
    from stoker.client.models.loading import ModelLoading
    from stoker.client.models.registry import ModelRegistry
    from stoker.client.requests.table import RequestTable
    from stoker.ipc.status import ModelStatus

MAX_USERS = 16
"""Requests and calls that a row names of those that use the model; `leases` counts all."""
SAME_S = 1.0
"""A time to be unloaded that differs by less is the same."""


class ModelRow(NamedTuple):
    """A model: fields that JSON can hold, and the owners of the requests that they name."""

    fields: dict[str, Any]
    owners: dict[str, str]


class _Told(NamedTuple):
    """What subscribers know of a model that may change without a move."""

    facts: tuple[object, ...]
    unload_at_s: float

    def is_still(self, now: _Told) -> bool:
        is_same_time = self.unload_at_s == now.unload_at_s or abs(self.unload_at_s - now.unload_at_s) < SAME_S
        return self.facts == now.facts and is_same_time


class ModelRows:
    """The rows of all served models and downloads.

    Args:
        loads: knows their states.
        registry: knows what they are.
        table: of the live requests, which use them.
        figures: what the engine alone knows of them.
        bus: is told of changes.
    """

    def __init__(
        self,
        loads: ModelLoading,
        registry: ModelRegistry,
        table: RequestTable,
        figures: EngineFigures,
        bus: EventBus,
    ) -> None:
        self._loads = loads
        self._registry = registry
        self._table = table
        self._figures = figures
        self._bus = bus
        self._told: dict[str, _Told] | None = None  # nobody was told of any model yet
        bus.model_row = self._row_to_tell

    def __repr__(self) -> str:
        return f"<ModelRows, {len(self._told or ())} told>"

    def rows(self) -> list[ModelRow]:
        """Every model as it is now."""
        users = self._users()
        found = [self._row(status, users.get(status.id, {})) for status in self._loads.statuses()]
        if self._told is None:
            self._told = {row.fields["model"]: self._as_told(row) for row in found}
        return found

    def tell_changes(self) -> None:
        """Tell subscribers of models that changed without a move since they were told."""
        if self._told is None:
            return
        rows = {row.fields["model"]: row for row in self.rows()}
        self._told = {model: told for model, told in self._told.items() if model in rows}
        for model, row in rows.items():
            told, now = self._told.get(model), self._as_told(row)
            if told is None or not told.is_still(now):
                self._told[model] = now
                self._bus.publish("model", {"what": "changed", **row.fields}, owners=row.owners)

    @property
    def label(self) -> str:
        """What computes the models that are in memory, each backend and device once; else the default."""
        infos = self._registry.infos()
        ready = [info for info in infos if self._registry.state(info.id) is ModelLife.READY]
        return ", ".join(dict.fromkeys(info.label for info in ready or infos[:1] if info.label))

    def _row_to_tell(self, model: str) -> ModelRow:
        """The row of one model, which subscribers are told now; empty: it is none any more."""
        for row in self.rows():
            if row.fields["model"] == model:
                assert self._told is not None, "`rows` has begun it"
                self._told[model] = self._as_told(row)
                return row
        return ModelRow({}, {})

    def _users(self) -> dict[str, dict[str, str]]:
        """Owners of live requests, or of the calls that they belong to, by the ids of these, by model."""
        found: dict[str, dict[str, str]] = {}
        for record in self._table.live():
            request_id = record.group.id if record.group else record.request_id
            found.setdefault(record.request.model, {})[request_id] = record.owner
        return found

    def _row(self, heard: ModelStatus, users: dict[str, str]) -> ModelRow:
        known, entry = self._known(heard), self._registry.get(heard.id)
        error = entry.error if entry else None
        named = dict(list(users.items())[:MAX_USERS])
        unload_at_s = self._unload_at_s(heard, known)
        fields = {
            "model": heard.id,
            "state": heard.state,
            "stage": heard.stage,
            "fraction": round(heard.fraction, 4),
            "num_bytes": heard.num_bytes,
            "reason": heard.reason,
            "error": {"code": error.code, "message": error.message} if error else None,
            "is_pinned": heard.is_pinned,
            "leases": heard.leases,
            "used_by": list(named),
            "keep_alive_s": (known or heard).keep_alive_s,
            "unload_in_s": None if unload_at_s == math.inf else max(0.0, unload_at_s - time.monotonic()),
            "num_slots": 0
            if entry is None or entry.info.model_class == ModelClass.ENCODER
            else entry.info.num_slots,
            "bytes": (known or heard).bytes,
            "label": entry.info.label if entry else "",
        }
        return ModelRow(fields, {request_id: owner for request_id, owner in named.items() if owner})

    def _known(self, heard: ModelStatus) -> ModelStatus | None:
        """The model as the engine has told of it, if that is not of another state."""
        known = self._figures.models.get(heard.id)
        return known if known is not None and known.state == heard.state else None

    def _unload_at_s(self, heard: ModelStatus, known: ModelStatus | None) -> float:
        """When it is unloaded, on the monotonic clock; infinity: it stays, or the engine does not say."""
        if known is None or known.unload_in_s is None or heard.leases or heard.is_pinned:
            return math.inf
        return self._figures.models_s + known.unload_in_s if self._bus.is_watched else math.inf

    def _as_told(self, row: ModelRow) -> _Told:
        fields = row.fields
        names = ("is_pinned", "leases", "keep_alive_s", "num_slots", "label")
        facts = (*(fields[name] for name in names), *fields["used_by"], *sorted(fields["bytes"].items()))
        unload_in_s = fields["unload_in_s"]
        return _Told(facts, math.inf if unload_in_s is None else time.monotonic() + unload_in_s)
