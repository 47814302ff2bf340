"""The live requests of an engine: taken in, paused, cancelled, and each ended exactly once.

Owns the bound on how many may wait (SPEC Q11), and what callers and the clock want of them. The engine
decides last on the bound, but it reads its inbox only between two steps; here a full queue is refused at
once. The records are in `table`; which of them an engine is given, and whom a crash is charged to, is decided
in `replay`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stoker.client.requests.meter import Wait
from stoker.client.requests.record import Stage
from stoker.client.requests.replay import Replay
from stoker.client.requests.texts import RequestText
from stoker.errors import RequestNotFoundError, RequestTimeoutError, TextsOffError
from stoker.ipc.commands import Cancel, Pause, Resume
from stoker.ipc.events import Admitted, Failed, Finished, RequestEvent
from stoker.ipc.request import check_queue, queue_bound

if TYPE_CHECKING:
    from stoker.client.models.registry import ModelRegistry
    from stoker.client.process.exit import EngineExit
    from stoker.client.requests.history import RequestHistory
    from stoker.client.requests.record import RequestRecord
    from stoker.client.requests.table import RequestTable
    from stoker.errors import ErrorInfo, StokerError
    from stoker.ipc.commands import Submit
    from stoker.ipc.events import Delta
    from stoker.ipc.model import ModelInfo
    from stoker.ipc.request import GenerateRequest


MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0
"""Past this the past says little about when a place is free."""
SMOOTHING = 0.2
"""Weight of the newest interval in the mean."""


def num_waiting(live: Iterable[RequestRecord], model: str, num_slots: int) -> int:
    """How many requests of `model` wait or are paused, less those that a free slot will take at once.

    Args:
        live: every live request.
        model: id of the model.
        num_slots: choices that the model runs at once.
    """
    mine = [one for one in live if one.request.model == model]
    num_free = max(0, num_slots - sum(one.num_running for one in mine))
    return max(0, sum(one.is_waiting for one in mine) - num_free)


@dataclass(slots=True)
class _Ends:
    """How fast the requests of one model end, as long as there are any.

    `since_s` is the last end, or the arrival that ended an idle time; `interval_s` 0: not known yet.
    """

    since_s: float
    num_live: int = 0
    interval_s: float = 0.0

    def ended(self, now: float) -> None:
        took_s = now - self.since_s
        self.interval_s += (SMOOTHING if self.interval_s else 1.0) * (took_s - self.interval_s)
        self.since_s = now
        self.num_live -= 1

    def next_s(self, now: float) -> float:
        """Seconds between two ends; what has passed since the last one is a lower bound."""
        return max(self.interval_s, now - self.since_s)


class Admission:
    """The bound on waiting requests, per model and class.

    Args:
        max_queue: requests of a model that may wait; background is refused at half of it.
    """

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._ends: dict[str, _Ends] = {}

    def __repr__(self) -> str:
        return f"<Admission {self._max_queue} {self._ends}>"

    def check(self, request: GenerateRequest, num_waiting: int, now: float) -> None:
        """Refuse a newcomer that finds the queue at the bound of its class.

        Args:
            request: the newcomer.
            num_waiting: what `num_waiting` counts for its model.
            now: seconds on the clock of `arrived` and `ended`.

        Raises:
            QueueFullError: `retry_after_s` is when enough will have ended, 1 s at least.
        """
        num_over = num_waiting - queue_bound(self._max_queue, request.priority) + 1
        ends = self._ends.get(request.model)
        retry_s = num_over * ends.next_s(now) if ends else 0.0
        retry_s = min(max(retry_s, MIN_RETRY_S), MAX_RETRY_S)
        check_queue(self._max_queue, request.priority, num_waiting, retry_s)

    def arrived(self, model: str, now: float) -> None:
        """A request was taken in."""
        ends = self._ends.setdefault(model, _Ends(now))
        if ends.num_live == 0:
            ends.since_s = now  # nothing ran meanwhile: that time says nothing
        ends.num_live += 1

    def ended(self, model: str, now: float) -> None:
        """One of them ended, however it did."""
        self._ends[model].ended(now)


class ToEngine(Protocol):
    """The way to the engine that serves, if one does."""

    @property
    def absence(self) -> str:
        """Why none serves, for people; empty: one does."""
        ...

    def send(self, command: Cancel | Pause | Resume) -> None:
        """Hand it a command."""
        ...

    def hand_out(self) -> None:
        """Give it what it may have by now."""
        ...


class Requests:
    """Every live request.

    Args:
        table: where they stand.
        max_queue: requests of one model that may wait.
        registry: knows how many slots a model has.
        engine: the way to it.
        history: is shown every event.
    """

    def __init__(
        self,
        table: RequestTable,
        max_queue: int,
        registry: ModelRegistry,
        engine: ToEngine,
        history: RequestHistory,
    ) -> None:
        self.table = table
        self._registry = registry
        self._engine = engine
        self.history = history
        self._replay = Replay(table)
        self._admission = Admission(max_queue)

    def __repr__(self) -> str:
        return f"<Requests {self.stats()}>"

    # ------------------------------------------------------------ questions

    @property
    def is_on_trial(self) -> bool:
        """Whether a suspect has the engine to itself."""
        return self._replay.is_on_trial

    def stats(self) -> dict[str, int]:
        """How many there are, and how many of them no engine knows of."""
        return {
            "num_live_requests": len(self._replay),
            "num_held_requests": len(self._replay.held()),
            "num_sinks": sum(len(live.sinks) for live in self.table.live()),
        }

    def num_by_model(self) -> dict[str, int]:
        """How many there are of each model that has any."""
        return Counter(live.request.model for live in self.table.live())

    def text(self, request_id: str) -> RequestText:
        """What a request reads and has written: a live one, or one of the last that ended.

        Raises:
            TextsOffError: texts may not be read.
            RequestNotFoundError: no such request is known.
        """
        if (texts := self.history.texts) is None:
            raise TextsOffError("texts of requests are not shown; --request-texts allows it")
        if (record := self.table.record(request_id)) is not None:
            return RequestText.of(record)
        if (found := texts.find(request_id)) is not None:
            return found
        calls = [group.request_status() for group in self.table.groups.values()]
        for one in (*calls, *reversed(self.history.recent)):
            if one.request_id == request_id:
                is_ended = one.request_id not in self.table.groups
                return RequestText(request_id=request_id, owner=one.owner, is_ended=is_ended, is_kept=False)
        raise RequestNotFoundError(f"no request is known under the id {request_id!r}", param="id")

    # ------------------------------------------------------------ what callers want

    def submit(self, record: RequestRecord) -> None:
        """Take a request in, held until `release`; its sinks get each of its events, last the terminal one.

        One of a group that is paused enters paused. The bound is none for one without a client: another
        program had taken it in.

        Raises:
            RequestCancelledError: its group was cancelled.
            QueueFullError: as many requests of its model wait as may for one of its class.
            InvalidRequestError: its id is in use.
        """
        now, model = time.monotonic(), record.request.model
        self.table.check_free(record.request_id)
        if record.group is not None:
            if record.group.is_cancelled:
                raise record.group.cancelled_error()
            record.is_paused |= record.group.is_paused
        if record.has_client:
            waiting = num_waiting(self.table.live(), model, self._registry.num_slots(model))
            self._admission.check(record.request, waiting, now)
        if record.has_client and (info := self._way(model)):
            record.made_for, record.vocabulary = info.served_by, info.vocabulary
        events = self._replay.add(record)
        self._admission.arrived(model, now)
        self.history.arrived(record, self._engine.absence)
        self._deliver(events)
        self._engine.hand_out()

    def ready(self, record: RequestRecord, request: GenerateRequest) -> None:
        """A request that was taken in may be given to an engine, as `request`."""
        self._replay.ready(record, request)
        self._engine.hand_out()

    def cancel(self, request_id: str) -> None:
        """End a request or all of a group; open choices end as `cancelled`. Raises RequestNotFoundError."""
        if group := self.table.groups.get(request_id):
            group.is_cancelled = True
        for live in self._find(request_id):
            if live.is_held:
                self._deliver(live.cancelled())
            else:
                live.is_cancelling = True
                self._engine.send(Cancel(live.request_id))
        self._engine.hand_out()

    def pause(self, request_id: str) -> None:
        """Hold a request or a group until `resume`, over restarts too. Raises RequestNotFoundError."""
        if group := self.table.groups.get(request_id):
            group.is_paused = True
            self.history.call_paused(group)
        for live in self._find(request_id):
            if not live.is_paused:
                self._deliver(self._replay.pause(live))
                if not live.is_held:
                    self._engine.send(Pause(live.request_id))
        self._engine.hand_out()

    def resume(self, request_id: str) -> None:
        """Let a paused request or group go on. Idempotent. Raises RequestNotFoundError."""
        if group := self.table.groups.get(request_id):
            group.is_paused = False
        for live in self._find(request_id):
            if live.is_paused:
                self._deliver(self._replay.resume(live))
                if not live.is_held:
                    self._engine.send(Resume(live.request_id))
        self._engine.hand_out()

    def _find(self, request_id: str) -> list[RequestRecord]:
        """The live request of that id, or the live ones of the group of that id."""
        if group := self.table.groups.get(request_id):
            return list(group.members.values())
        live = self.table.find(request_id)
        if live is None:
            raise RequestNotFoundError(f"no live request has the id {request_id!r}", param="request_id")
        return [live]

    # ------------------------------------------------------------ what the engine does

    def release(self) -> list[Submit]:
        """Those that a serving engine may have now; they count as given from here on."""
        given = self._replay.release(time.monotonic())
        for submit in given:
            if (record := self.table.find(submit.request_id)) is not None:
                self.history.given(record)
        return given

    def take(self, event: RequestEvent) -> None:
        """The engine reports: note it, and show the client what it has not seen."""
        self.history.took(event)
        if isinstance(event, Finished):
            event = self.history.timed(event)
        if isinstance(event, Admitted):
            self._note_way(event.request_id)
        if self._replay.record(event):
            self._deliver([event])

    def _way(self, model: str) -> ModelInfo | None:
        """What serves a model that can be served in several ways."""
        entry = self._registry.get(model)
        return None if entry is None else entry.way

    def _note_way(self, request_id: str) -> None:
        """Its tokens, those before and those to come, are of the way that serves its model now."""
        record = self.table.find(request_id)
        if record is not None and record.made_for and (info := self._way(record.request.model)):
            record.made_for, record.vocabulary = info.served_by, info.vocabulary

    def take_delta(self, delta: Delta, now: float) -> bool:
        """As `take`, of what comes with every token.

        Returns:
            Whether the engine may be given something now.
        """
        record = self.table.find(delta.request_id)
        if record is None or record.stage is Stage.HELD:
            return False
        if record.charges or record.preparation_crashes:  # this clears it
            self.take(delta)
            return True
        if record.take_delta(delta):
            self.history.wrote(record, delta, now)
            for sink in tuple(record.sinks):
                sink(delta)
        return False

    def running_models(self) -> set[str]:
        """The models of requests that hold, or may hold, slots."""
        return {live.request.model for live in self.table.live() if live.num_running > 0}

    def engine_exited(self, end: EngineExit) -> None:
        """The engine has ended unasked: end whom that convicts, hold the others for the next one."""
        self.history.held(Wait.RESTART, "the engine is restarting")
        self._deliver(self._replay.engine_exited(end))

    def sleep(self) -> None:
        """The engine has left as it was asked to: hold all of them, and their time."""
        for group in self.table.groups.values():
            group.stop()
        self.history.held(Wait.SUSPENDED, "the engine is suspended")
        self._deliver(self._replay.sleep(time.monotonic()))

    def wake(self) -> None:
        """Their time goes on, and the next engine gets them."""
        now = time.monotonic()
        for group in self.table.groups.values():
            group.postpone(self._replay.slept_s(now))
        self._deliver(self._replay.wake(now))

    # ------------------------------------------------------------ ends

    def expire(self) -> None:
        """End whose deadline passed while no engine had it; while it is suspended none passes."""
        if self._replay.is_asleep:
            return
        now = time.monotonic()
        for live in self._replay.held():
            if live.is_ready and live.has_expired(now):  # else its translation ends with its time
                text = f"request {live.request_id} did not finish within {live.request.timeout_s:g} s"
                self._deliver(live.failed(RequestTimeoutError(text).info()))

    def tell_progress(self) -> None:
        """Tell how far prompts are whose step takes long: their clients, if they asked, and subscribers."""
        self._deliver(self.history.overdue_progress())

    def fail_unservable(self) -> None:
        """End those whose model has failed for good."""
        for live in self._replay:
            failure = self._registry.failure(live.request.model)
            if failure is not None:
                self._deliver(live.failed(failure))

    def fail(self, request_id: str, error: ErrorInfo) -> None:
        """End one with `error`."""
        if live := self.table.find(request_id):
            self._deliver(live.failed(error))

    def fail_all(self, error: StokerError) -> None:
        """End every one with `error`."""
        for live in self._replay:
            self._deliver(live.failed(error.info()))

    def close(self, error: StokerError) -> None:
        """End every one, as `close_held` does."""
        self._close(self._replay, error)

    def close_held(self, error: StokerError) -> None:
        """End those that no engine has: an answer that has begun is cut short, the others are refused."""
        self._close(self._replay.held(), error)

    def _close(self, records: Iterable[RequestRecord], error: StokerError) -> None:
        for live in records:
            self._deliver(live.cancelled() if live.num_generated else live.failed(error.info()))

    def _deliver(self, events: list[RequestEvent]) -> None:
        """Give events to their requests' sinks."""
        for event in events:
            self.history.shown(event)  # first: with its terminal event a request is forgotten
            record = self.table.deliver(event)
            if record is not None and isinstance(event, Finished | Failed):
                if record.group is not None:
                    self.history.call_went_on(record.group)
                self._replay.ended()
                self._admission.ended(record.request.model, time.monotonic())
