"""The live requests of a host: taken in, paused, cancelled, and each ended exactly once.

Owns the sinks of their events and the bound on how many may wait. What a restart replays and whom a crash
is charged to is `replay`'s, when an engine may have them the host's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.client.requests.admission import Admission, num_waiting
from stoker.client.requests.replay import Replay, RequestRecord
from stoker.errors import InvalidRequestError, RequestNotFoundError, RequestTimeoutError
from stoker.ipc.commands import Cancel, Pause, Resume
from stoker.ipc.events import Delta, Failed, Finished, RequestEvent

if TYPE_CHECKING:
    from stoker.client.models.registry import ModelRegistry
    from stoker.client.process.exit import EngineExit
    from stoker.client.requests.group import RequestGroup
    from stoker.errors import ErrorInfo, StokerError
    from stoker.ipc.commands import Submit
    from stoker.ipc.request import GenerateRequest
    from stoker.ipc.status import GroupStatus

EventSink = Callable[[RequestEvent], None]
SendToEngine = Callable[[Cancel | Pause | Resume], None]


@dataclass(frozen=True, slots=True)
class _Client:
    """Who is told of a request, and the model it asked for."""

    model: str
    sink: EventSink
    group: RequestGroup | None


class Requests:
    """Every live request and who is told of it.

    Args:
        max_queue: requests of one model that may wait.
        roster: knows how many slots a model has.
        send: hands a command to the engine.
        watch: is told of every event but deltas.
    """

    def __init__(self, max_queue: int, registry: ModelRegistry, send: SendToEngine, watch: EventSink) -> None:
        self._registry = registry
        self._send = send
        self._watch = watch
        self._replay = Replay()
        self._admission = Admission(max_queue)
        self._clients: dict[str, _Client] = {}
        self._groups: dict[str, RequestGroup] = {}

    def __repr__(self) -> str:
        return f"<Requests {self.stats()}>"

    def __len__(self) -> int:
        return len(self._replay)

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
            "num_sinks": len(self._clients),
        }

    def num_by_model(self) -> dict[str, int]:
        """How many there are of each model that has any."""
        return Counter(live.request.model for live in self._replay)

    def portable(self) -> list[Submit]:
        """All that another program needs to go on with them."""
        now = time.monotonic()
        return [live.portable(now) for live in self._replay]

    # ------------------------------------------------------------ what callers want

    def submit(
        self, request_id: str, request: GenerateRequest, sink: EventSink, group: RequestGroup | None = None
    ) -> None:
        """Take a request in, held until `release`; `sink` gets each of its events, last the terminal one.

        One of a group that is paused enters paused.

        Raises:
            QueueFullError: as many requests of its model wait as may for one of its class.
            InvalidRequestError: a live request has that id.
        """
        now = time.monotonic()
        waiting = num_waiting(self._replay, request.model, self._registry.num_slots(request.model))
        self._admission.check(request, waiting, now)
        live = RequestRecord(request_id, request, now)
        live.is_paused = group is not None and group.is_paused
        self._add(live, sink, group)

    def take_up(self, kept: Submit, sink: EventSink) -> None:
        """Take a request in that another program left, as `portable` told of it; no bound keeps it out.

        Raises:
            InvalidRequestError: a live request has that id.
        """
        self._add(RequestRecord.taken_up(kept, time.monotonic()), sink)

    def _add(self, live: RequestRecord, sink: EventSink, group: RequestGroup | None = None) -> None:
        if live.request_id in self._groups:
            raise _in_use(live.request_id)
        model = live.request.model
        events = self._replay.add(live)
        self._admission.arrived(model, time.monotonic())
        self._clients[live.request_id] = _Client(model, sink, group)
        if group is not None:
            group.members[live.request_id] = live
        self._deliver_all(events)

    def open_group(self, group: RequestGroup) -> None:
        """Know a group until `close_group`; its id stands for all of its requests.

        Raises:
            InvalidRequestError: a live request or another group has that id.
        """
        if group.id in self._groups or self._replay.get(group.id) is not None:
            raise _in_use(group.id)
        self._groups[group.id] = group

    def close_group(self, group: RequestGroup) -> None:
        """The call has ended."""
        del self._groups[group.id]

    def owner_of_group(self, group_id: str) -> str:
        """Digest of the API key that a group came with; empty: none, or there is no such group."""
        return self._groups[group_id].owner if group_id in self._groups else ""

    def groups(self) -> list[GroupStatus]:
        """How far every group is, the oldest first."""
        return [group.status() for group in self._groups.values()]

    def cancel(self, request_id: str) -> None:
        """End a request or all of a group; open choices finish as `cancelled`.

        Raises:
            RequestNotFoundError: no live request or group has that id.
        """
        if group := self._groups.get(request_id):
            group.is_cancelled = True
        for live in self._find(request_id):
            self._cancel(live)

    def _cancel(self, live: RequestRecord) -> None:
        if live.is_held:
            self._deliver_all(live.cancelled())
        else:
            live.is_cancelling = True
            self._send(Cancel(live.request_id))

    def pause(self, request_id: str) -> None:
        """Let a request or a group stand still until `resume`, over restarts of the engine too. Idempotent.

        Raises:
            RequestNotFoundError: no live request or group has that id.
        """
        if group := self._groups.get(request_id):
            group.is_paused = True
        for live in self._find(request_id):
            if not live.is_paused:
                self._deliver_all(self._replay.pause(live))
                if not live.is_held:
                    self._send(Pause(live.request_id))

    def resume(self, request_id: str) -> None:
        """Let a paused request or group go on; one that is not paused goes on anyway.

        Raises:
            RequestNotFoundError: no live request or group has that id.
        """
        if group := self._groups.get(request_id):
            group.is_paused = False
        for live in self._find(request_id):
            if live.is_paused:
                self._deliver_all(self._replay.resume(live))
                if not live.is_held:
                    self._send(Resume(live.request_id))

    def _find(self, request_id: str) -> list[RequestRecord]:
        """The live request of that id, or the live ones of the group of that id."""
        if group := self._groups.get(request_id):
            return list(group.members.values())
        live = self._replay.get(request_id)
        if live is None:
            raise RequestNotFoundError(f"no live request has the id {request_id!r}", param="request_id")
        return [live]

    # ------------------------------------------------------------ what the engine does

    def release(self) -> list[Submit]:
        """Those that a serving engine may have now; they count as given from here on."""
        return self._replay.release(time.monotonic())

    def take(self, event: RequestEvent) -> None:
        """The engine reports: note it, and show the client what it has not seen."""
        if self._replay.record(event):
            self._deliver(event)

    def bury(self, death: EngineExit) -> None:
        """The engine died: end whom that convicts, hold the others for the next one."""
        self._deliver_all(self._replay.bury(death))

    def sleep(self) -> None:
        """The engine has left as it was asked to: hold all of them, and their time."""
        self._deliver_all(self._replay.sleep(time.monotonic()))

    def wake(self) -> None:
        """Their time goes on, and the next engine gets them."""
        now = time.monotonic()
        for group in self._groups.values():
            group.postpone(self._replay.slept_s(now))
        self._deliver_all(self._replay.wake(now))

    # ------------------------------------------------------------ ends

    def expire(self) -> None:
        """End whose deadline passed while no engine had it; while it is suspended none passes."""
        if self._replay.is_asleep:
            return
        now = time.monotonic()
        for live in self._replay.held():
            if live.has_expired(now):
                text = f"request {live.request_id} did not finish within {live.request.timeout_s:g} s"
                self.fail(live.request_id, RequestTimeoutError(text).info())

    def fail_unservable(self) -> None:
        """End those whose model has failed for good."""
        for live in self._replay:
            failure = self._registry.failure(live.request.model)
            if failure is not None:
                self.fail(live.request_id, failure)

    def fail_all(self, error: StokerError) -> None:
        """End every one with `error`."""
        for live in self._replay:
            self.fail(live.request_id, error.info())

    def close(self, error: StokerError) -> None:
        """End every one, as `close_held` does."""
        self._close(list(self._replay), error)

    def close_held(self, error: StokerError) -> None:
        """End those that no engine has: an answer that has begun is cut short, the others are refused."""
        self._close(self._replay.held(), error)

    def _close(self, lives: list[RequestRecord], error: StokerError) -> None:
        for live in lives:
            if live.num_generated:
                self._deliver_all(live.cancelled())
            else:
                self.fail(live.request_id, error.info())

    def fail(self, request_id: str, error: ErrorInfo) -> None:
        """End one with `error`."""
        self._deliver(Failed(request_id, error))

    def _deliver_all(self, events: list[RequestEvent]) -> None:
        for event in events:
            self._deliver(event)

    def _deliver(self, event: RequestEvent) -> None:
        """Give an event to its request's sink; the terminal one ends the request here too."""
        client = self._clients.get(event.request_id)
        if client is None:
            return
        if not isinstance(event, Delta):
            self._watch(event)  # before the sink, which forgets a request with its terminal event
        if client.group is not None and isinstance(event, Finished | Failed):
            client.group.ended(event.request_id, event if isinstance(event, Finished) else None)
        client.sink(event)
        if isinstance(event, Finished | Failed):
            del self._clients[event.request_id]
            self._replay.drop(event.request_id)
            self._admission.ended(client.model, time.monotonic())


def _in_use(request_id: str) -> InvalidRequestError:
    return InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
