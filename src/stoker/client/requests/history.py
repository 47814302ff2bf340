"""What requests and calls go through, as others than their callers are told of it: no text, no token.

`RequestMeter` is the clock of one request: when it was admitted and wrote, and what it waited for.
`RequestHistory` reads the meters, publishes the events about requests and calls, and keeps what the last of
them that ended were.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from stoker.ipc.events import (
    Admitted,
    Delta,
    Failed,
    Finished,
    Parked,
    Paused,
    PrefillProgress,
    Preparing,
    Queued,
    RequestEvent,
    Resumed,
)
from stoker.ipc.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.client.event_bus import EventBus
    from stoker.client.requests.group import RequestGroup
    from stoker.client.requests.record import RequestRecord
    from stoker.client.requests.table import RequestTable
    from stoker.errors import ErrorInfo
    from stoker.ipc.status import RequestStatus

LEAST_TOLD_S = 0.5
"""A shorter wait is not worth a word."""
PROGRESS_EVERY_S = 0.5
"""How often others than its own client are told of a prompt's progress."""


class Wait(StrEnum):
    """Why a request does not compute."""

    PREPARING = "its preparation and the step under way"
    QUEUE = "a free slot"
    MODEL = "its model was being loaded"
    RESTART = "the engine was restarting"
    SUSPENDED = "the engine was suspended"
    PAUSED = "it was paused"
    PARKED = "its slot was given to others"


@dataclass(slots=True)
class RequestMeter:
    """Times of one request, in seconds on a monotonic clock unless said otherwise.

    Attributes:
        arrived_at: seconds since the epoch.
        arrived_s: when it arrived.
        admitted_s, first_token_s: when its first choice got a slot, when its first token came; None: not yet.
        prompt_tokens, cached_tokens: of the prompt, once known.
        processed_tokens: prompt tokens that are computed or cached, while the prompt is read.
        num_parks: how often a choice was parked.
        position: its place in the queue; None: it is in none.
    """

    arrived_at: float
    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    processed_tokens: int = 0
    num_parks: int = 0
    position: int | None = None
    _runs_at_s: float | None = None
    _told_s: float = -PROGRESS_EVERY_S
    _waits_s: dict[Wait, float] = field(default_factory=dict)
    _waits_for: Wait | None = None
    _since_s: float = 0.0
    _num_before: int = 0

    def take(self, event: RequestEvent, now: float) -> None:
        """Take note of an engine's event."""
        match event:
            case Queued():
                self._queue(event, now)
            case Delta():
                if event.token_ids and (self._waits_for is not None or self.first_token_s is None):
                    self._go_on(now)
                    self.first_token_s = self.first_token_s or now
                if event.finish_reason is not FinishReason.CANCELLED:  # else it comes after the whole prompt
                    self.processed_tokens = self.prompt_tokens
            case Preparing():
                self.wait(Wait.PREPARING, now)
            case Admitted():
                self._go_on(now)
                self.position = self._runs_at_s = None
                self.admitted_s = self.admitted_s or now
                self.prompt_tokens = event.prompt_tokens or self.prompt_tokens
                self.cached_tokens = self.processed_tokens = event.cached_tokens
            case PrefillProgress():
                self.prompt_tokens, self.processed_tokens = event.total, event.processed
            case Parked():
                self.num_parks += 1
                self.wait(Wait.PARKED, now)

    def _queue(self, event: Queued, now: float) -> None:
        """It waits for a slot, or its model."""
        self.position = event.position
        self._runs_at_s = None if event.eta_s is None else now + event.eta_s
        wait = Wait.MODEL if event.awaits_model else Wait.QUEUE
        if self._waits_for not in {wait, Wait.PARKED}:
            self._num_before = max(self._num_before, event.position)
            self.wait(wait, now)

    def steer(self, event: Paused | Resumed, now: float) -> None:
        """Its caller, or a suspension, stops it or lets it go on."""
        if isinstance(event, Paused) and self._waits_for is not Wait.SUSPENDED:
            self.wait(Wait.PAUSED, now)
        elif isinstance(event, Resumed) and self._waits_for is Wait.PAUSED:
            self.wait(Wait.QUEUE, now)

    def wait(self, wait: Wait, now: float) -> None:
        """From now on it waits for this."""
        if self._waits_for is not wait:
            self._go_on(now)
            self._waits_for, self._since_s = wait, now

    def eta_s(self, now: float) -> float | None:
        """Seconds until it runs, as it was last told less what has passed; None: not known."""
        return None if self._runs_at_s is None else max(0.0, self._runs_at_s - now)

    def tell_progress(self, now: float) -> bool:
        """Note that others than its own client are told of its prompt's progress; False: they just were."""
        is_due = now - self._told_s >= PROGRESS_EVERY_S
        if is_due:
            self._told_s = now
        return is_due

    def _go_on(self, now: float) -> None:
        if self._waits_for is not None:
            self._waits_s[self._waits_for] = self.waited_s(self._waits_for, now)
            self._waits_for = None

    def waited_s(self, wait: Wait, now: float) -> float:
        """Seconds it has waited for that."""
        open_s = now - self._since_s if self._waits_for is wait else 0.0
        return self._waits_s.get(wait, 0.0) + open_s

    def longest_wait(self, now: float) -> tuple[float, str]:
        """How long it waited for what it waited for longest, and what that was; empty: nothing much."""
        waited_s, wait = max(((self.waited_s(wait, now), wait) for wait in Wait), key=lambda found: found[0])
        if waited_s < LEAST_TOLD_S:
            return waited_s, ""
        if wait is Wait.QUEUE and self._num_before:
            return waited_s, f"{self._num_before} before it in the queue"
        return waited_s, str(wait)

    def queue_s(self, now: float) -> float:
        """Seconds from arrival to the first slot, or to now."""
        return (now if self.admitted_s is None else self.admitted_s) - self.arrived_s

    def to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token; None: there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def decode_s(self, now: float) -> float:
        """Seconds from the first token to now."""
        return 0.0 if self.first_token_s is None else now - self.first_token_s


def tokens_per_second(num_tokens: int, num_first: int, decode_s: float) -> float | None:
    """Tokens a second after the first ones; None where that says nothing.

    Args:
        num_tokens: all that were written.
        num_first: those of them that came with no step before: one a choice.
        decode_s: seconds of writing.
    """
    num_later = num_tokens - num_first
    return num_later / decode_s if num_later > 0 and decode_s > 0 else None


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
        now = self._now()
        record.meter.take(event, now)
        if isinstance(event, PrefillProgress) and record.meter.tell_progress(now):
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
