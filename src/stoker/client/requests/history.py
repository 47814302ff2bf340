"""What requests and calls go through, as others than their callers are told of it: no text, no token.

Owns the meters' readings, the events about requests and calls, and what the last of them that ended were.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from stoker.client.requests.meter import Wait
from stoker.ipc.events import Delta, Failed, Finished, Paused, PrefillProgress, Queued, RequestEvent, Resumed

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.client.event_bus import EventBus
    from stoker.client.requests.group import RequestGroup
    from stoker.client.requests.record import RequestRecord
    from stoker.client.requests.table import RequestTable
    from stoker.errors import ErrorInfo
    from stoker.ipc.request import FinishReason
    from stoker.ipc.status import RequestStatus

MAX_RECENT = 64
"""Requests and calls that have ended and are still shown; past this the oldest goes."""


class RequestHistory:
    """Tells subscribers what happens to requests, and keeps the last that ended.

    Args:
        table: of requests.
        bus: gets the events.
        is_ready: whether a model is in memory, by its id.
        now: seconds on the clock of the requests' meters.

    Attributes:
        recent: requests and calls that have ended, the oldest first.
    """

    def __init__(
        self,
        table: RequestTable,
        bus: EventBus,
        is_ready: Callable[[str], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recent: deque[RequestStatus] = deque(maxlen=MAX_RECENT)
        self._table = table
        self._bus = bus
        self._is_ready = is_ready
        self._now = now

    def __repr__(self) -> str:
        return f"<RequestHistory of {len(self.recent)} that ended>"

    def arrived(self, record: RequestRecord) -> None:
        """A request was submitted, and no engine has it yet."""
        if not self._is_ready(record.request.model):
            record.meter.wait(Wait.MODEL, self._now())

    def took(self, event: RequestEvent) -> None:
        """An engine reports; whether the client is shown that is not known yet."""
        record = self._table.find(event.request_id)
        if record is None:
            return
        if isinstance(event, Queued):
            record.meter.queue(Wait.MODEL if event.awaits_model else Wait.QUEUE, event, self._now())
        else:
            now = self._now()
            record.meter.take(event, now)
            if isinstance(event, PrefillProgress) and record.meter.is_progress_due(now):
                self._moved(event, record)

    def waits(self, wait: Wait) -> None:
        """Every live request waits for this from now on."""
        now = self._now()
        for record in self._table.live():
            record.meter.wait(wait, now)

    def shown(self, event: RequestEvent) -> None:
        """The client of a request is shown that; called before the request is forgotten."""
        if isinstance(event, Delta):
            return
        record = self._table.record(event.request_id)
        if record is None or isinstance(event, PrefillProgress):  # of that `took` tells, to subscribers
            return
        if isinstance(event, Paused | Resumed):
            record.meter.steer(event, self._now())
        if not isinstance(event, Finished | Failed):
            self._moved(event, record)
        elif record.group is None:
            self._ended(record.status(self._now()), event)

    def _moved(self, event: RequestEvent, record: RequestRecord) -> None:
        self._bus.request_moved(event, record.group.id if record.group else None)

    def refused(self, record: RequestRecord, error: ErrorInfo) -> None:
        """A request ended before it was submitted; one of a call is told of with the call.

        One that asked for an id in use is not told of: that is another request's.
        """
        if record.group is None and self._table.find(record.request_id) is None:
            (failed,) = record.failed(error)
            self._ended(record.status(self._now()), failed)

    def call_ended(self, group: RequestGroup, end: FinishReason | ErrorInfo) -> None:
        """A call of several requests has ended, as its caller sees it."""
        self._ended(group.ended_as(end))

    def _ended(self, status: RequestStatus, event: RequestEvent | None = None) -> None:
        self.recent.append(status)
        self._bus.request_ended(status, event)
