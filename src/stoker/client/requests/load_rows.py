"""Loads and downloads of models as rows among the requests (SPEC O20): who waits for one sees how far it is.

They are told of by what models report, under an id of their own, and are no requests: nothing counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.ipc.model import ModelLife
from stoker.ipc.request import Priority
from stoker.ipc.status import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

LOAD_ID = "load:"
"""What ids of loads begin with; the model's follows."""
PROGRESS_EVERY_S = 0.5
_UNDER_WAY = frozenset({ModelLife.LOADING, ModelLife.DOWNLOADING})

Tell = Callable[[str, str, dict[str, Any]], None]
"""Called with the id, what has happened, and the fields of that."""


class LoadRows:
    """The loads that are under way.

    Args:
        tell: tells subscribers.
        now: seconds since the epoch.
    """

    def __init__(self, tell: Tell, now: Callable[[], float]) -> None:
        self._tell = tell
        self._now = now
        self._rows: dict[str, RequestStatus] = {}
        self._told_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<LoadRows {sorted(self._rows)}>"

    def rows(self) -> list[RequestStatus]:
        """Each load as it is now, the oldest first."""
        now = self._now()
        return [
            msgspec.structs.replace(row, end_to_end_s=now - row.arrived_at) for row in self._rows.values()
        ]

    def take(self, moved: Mapping[str, Any]) -> None:
        """A model has reported where it is; `moved` are the fields of that event."""
        row, state = self._rows.get(moved["model"]), moved["state"]
        if state in _UNDER_WAY or (state == ModelLife.READY and "stage" in moved):
            self._goes_on(row or self._begun(moved["model"], state), moved)
        elif row is not None:
            self._ended(row, state, moved.get("error"))

    def _begun(self, model: str, state: str) -> RequestStatus:
        row = RequestStatus(
            request_id=f"{LOAD_ID}{model}",
            model=model,
            priority=Priority.INTERACTIVE,
            kind="load",
            route="engine",
            arrived_at=self._now(),
            state=state,
        )
        self._rows[model] = row
        self._told_at[model] = self._now()
        self._tell(row.request_id, "arrived", row.as_row())
        return row

    def _goes_on(self, row: RequestStatus, moved: Mapping[str, Any]) -> None:
        stage, now = moved.get("stage", ""), self._now()
        fields = {"state": moved["state"], "stage": stage, "fraction": moved.get("fraction", 0.0)}
        self._rows[row.model] = msgspec.structs.replace(row, **fields)
        if row.stage != stage or now - self._told_at[row.model] >= PROGRESS_EVERY_S:
            self._told_at[row.model] = now
            self._tell(row.request_id, "load_progress", fields)

    def _ended(self, row: RequestStatus, state: str, error: dict[str, str] | None) -> None:
        del self._rows[row.model], self._told_at[row.model]
        is_there = state == ModelLife.READY or row.state == ModelLife.DOWNLOADING
        end = {
            **row.as_row(),
            "state": "ended",
            "error": error,
            "finish_reason": None if error else "stop" if is_there else "cancelled",
            "end_to_end_s": self._now() - row.arrived_at,
        }
        self._tell(row.request_id, "failed" if error else "finished", end)
