"""What happens in a runtime, for subscribers (SPEC O3).

Names events and gives each to every subscriber, bounded for each of them; no text of any request is in them.
An event is encoded once, however many subscribe. A subscriber that is too slow loses what waits for it and
gets the state of everything in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.ipc.events import Finished, HeatMoved, MachineEvent, ModelState, PressureMoved, RungTaken

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from stoker.errors import ErrorInfo
    from stoker.ipc.events import RequestEvent
    from stoker.ipc.status import RequestStatus

log = logging.getLogger(__name__)

MAX_WAITING = 512
"""Events that wait for one subscriber; past this, or past the bytes below, it gets a snapshot instead."""
MAX_WAITING_BYTES = 2**20
MAX_KEPT = 1024
"""Events that are kept for a subscriber who comes back, and the bytes of these."""
MAX_KEPT_BYTES = 4 * 2**20
SNAPSHOT_S = 0.25
"""How long a snapshot serves others who ask for one, if nothing has happened since."""
FIGURES_S = 1.0
"""How long the first subscriber waits for the engine's figures; a step may take longer."""
FIGURES = frozenset({"steps", "memory", "cache", "machines"})
"""Events that the engine makes only while somebody subscribes to them."""

_NUMBER = re.compile(r"[0-9]{1,18}")
_MACHINE = {PressureMoved: "pressure", RungTaken: "rung", HeatMoved: "heat"}


class Snapshot(msgspec.Struct, frozen=True):
    """The state of everything: the fields of the event, and the owners of the requests in it by their ids."""

    fields: dict[str, Any]
    owners: dict[str, str] = {}


class RuntimeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened.

    Attributes:
        event: its name: snapshot, engine, model, pressure, rung, heat, request, steps, memory, cache or
            machines.
        at: seconds since the epoch.
        fields: what it is about; values that JSON can hold, no text of any request.
        owner: of a request, digest of the API key that it came with; empty: none.
        owners: of a snapshot or a model, the same by the ids of the requests in it.
        id: names it among the events of this program: what came after it can be had.
        data: all but the owners as a JSON document, as operators are sent it; empty: it was not encoded.
    """

    event: str
    at: float
    fields: dict[str, Any] = {}
    owner: str = ""
    owners: dict[str, str] = {}
    id: str = ""
    data: bytes = b""

    def document(self) -> dict[str, Any]:
        """All but the owners."""
        named = {"id": self.id} if self.id else {}
        return {"event": self.event, "at": self.at, **named, **self.fields}


class _Subscriber:
    """What waits for one subscriber; `kinds` are the names of what it is told, empty: all."""

    def __init__(self, kinds: Collection[str]) -> None:
        self.kinds = frozenset(kinds)
        self.waiting: deque[RuntimeEvent] = deque()
        self.needs_snapshot = False
        self.num_dropped = 0
        self.has_news = asyncio.Event()
        self._num_bytes = 0

    @property
    def wants_figures(self) -> bool:
        """Whether the engine is to make figures for it."""
        return not self.kinds or bool(self.kinds & FIGURES)

    def push(self, event: RuntimeEvent) -> None:
        if self.kinds and event.event not in self.kinds:
            return
        if self.needs_snapshot:
            self.num_dropped += 1
            return
        self.waiting.append(event)
        self._num_bytes += len(event.data)
        if len(self.waiting) > MAX_WAITING or self._num_bytes > MAX_WAITING_BYTES:
            self.num_dropped += len(self.waiting)
            self.waiting.clear()
            self.needs_snapshot, self._num_bytes = True, 0
        self.has_news.set()

    def pop(self) -> RuntimeEvent | None:
        if not self.waiting:
            return None
        event = self.waiting.popleft()
        self._num_bytes -= len(event.data)
        return event


def _ignore(_told: object) -> None:
    """What a hook calls until somebody sets it."""


def _empty_row(_model: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Of a model, until somebody knows more than its move."""
    return {}, {}


class EventBus:
    """The subscribers of one runtime.

    Args:
        on_model: also called with each model's state, on the event loop, apart from the caller.
        now: seconds since the epoch.

    Attributes:
        on_ended: called with each request and call that has ended, however many are waiting.
        on_load: called with what each move of a model says, at once.
        model_row: the fields of a model beside its move, and the owners of the requests in them.
        on_watch: called with whether anybody subscribes to figures, when that has changed.
        keeps: whether events are published: somebody subscribes, or did.
        has_figures: the engine's are known since somebody subscribes to them.
        expects_figures: whether an engine serves that will give some.
    """

    def __init__(
        self,
        on_model: Callable[[ModelState], None] = _ignore,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._on_model = on_model
        self._now = now
        self._subscribers: set[_Subscriber] = set()
        self._program = secrets.token_hex(4)
        self.on_ended: Callable[[RequestStatus], None] = _ignore
        self.on_load: Callable[[dict[str, Any]], None] = _ignore
        self.model_row: Callable[[str], tuple[Mapping[str, Any], Mapping[str, str]]] = _empty_row
        self.on_watch: Callable[[bool], None] = _ignore
        self.expects_figures: Callable[[], bool] = lambda: False
        self.keeps = False  # nothing is kept before somebody has subscribed
        self.has_figures = asyncio.Event()
        self._num_published = 0
        self._kept: deque[RuntimeEvent] = deque()
        self._kept_bytes = 0
        self._last_snapshot = RuntimeEvent(event="snapshot", at=0.0, id="none")
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<EventBus with {len(self._subscribers)} subscribers>"

    def __len__(self) -> int:
        return len(self._subscribers)

    @property
    def is_watched(self) -> bool:
        """Whether anybody subscribes to figures of the engine."""
        return any(subscriber.wants_figures for subscriber in self._subscribers)

    async def subscribe(
        self, snapshot: Callable[[], Snapshot], after: str = "", kinds: Collection[str] = ()
    ) -> AsyncGenerator[RuntimeEvent, None]:
        """Everything from now on, after what `snapshot` says now; ends with the bus.

        A slow subscriber loses what waits for it and gets a snapshot, with their number as `dropped`.

        Args:
            snapshot: the state of everything.
            after: id of the last event that the subscriber knows: where all that came after it is still
                there, it gets these and no snapshot.
            kinds: names of the events that it is told beside snapshots; empty: all.
        """
        subscriber = _Subscriber(kinds)
        self._join(subscriber)
        try:
            if (missed := self._since(after)) is None:
                if subscriber.wants_figures:
                    await self._await_figures()
                subscriber.needs_snapshot, subscriber.num_dropped = True, 0
                subscriber.waiting.clear()
            for each in missed or ():
                subscriber.push(each)
            while True:
                if subscriber.needs_snapshot:
                    num_dropped, subscriber.num_dropped = subscriber.num_dropped, 0
                    subscriber.needs_snapshot = False
                    yield self._snapshot(snapshot, num_dropped)
                while (event := subscriber.pop()) is not None:
                    yield event
                if subscriber.needs_snapshot:
                    continue
                if self._is_closed:
                    return
                subscriber.has_news.clear()
                await subscriber.has_news.wait()
        finally:
            self._leave(subscriber)

    def _join(self, subscriber: _Subscriber) -> None:
        was_watched = self.is_watched
        self.keeps = True
        self._subscribers.add(subscriber)
        if self.is_watched and not was_watched:
            self.on_watch(True)

    def _leave(self, subscriber: _Subscriber) -> None:
        was_watched = self.is_watched
        self._subscribers.discard(subscriber)
        if was_watched and not self.is_watched:
            self.has_figures.clear()
            self.on_watch(False)

    async def _await_figures(self) -> None:
        """Until the engine's figures are there, or that takes too long."""
        if not self.expects_figures():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.has_figures.wait(), FIGURES_S)

    def _snapshot(self, snapshot: Callable[[], Snapshot], num_dropped: int) -> RuntimeEvent:
        """The state of everything; the same for all who ask before something happens."""
        number, now, last = self._id(self._num_published), self._now(), self._last_snapshot
        if last.id == number and 0 <= now - last.at < SNAPSHOT_S and not num_dropped:
            return last
        state = snapshot()
        found = self._encoded(
            RuntimeEvent(
                event="snapshot",
                at=now,
                fields={**state.fields, "dropped": num_dropped},
                owners=state.owners,
                id=number,
            )
        )
        if not num_dropped:
            self._last_snapshot = found
        return found

    def publish(
        self, event: str, fields: Mapping[str, Any], owner: str = "", owners: Mapping[str, str] | None = None
    ) -> None:
        """Give an event to every subscriber, and keep it for those who come back; see `RuntimeEvent`."""
        if not self.keeps:
            return
        self._num_published += 1
        number = self._id(self._num_published)
        published = self._encoded(
            RuntimeEvent(
                event=event,
                at=self._now(),
                fields=dict(fields),
                owner=owner,
                owners=dict(owners or {}),
                id=number,
            )
        )
        self._keep(published)
        for subscriber in self._subscribers:
            subscriber.push(published)

    def _keep(self, event: RuntimeEvent) -> None:
        self._kept.append(event)
        self._kept_bytes += len(event.data)
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft().data)

    @staticmethod
    def _encoded(event: RuntimeEvent) -> RuntimeEvent:
        return msgspec.structs.replace(event, data=msgspec.json.encode(event.document()))

    def _id(self, number: int) -> str:
        return f"{self._program}-{number}"

    def _since(self, last_id: str) -> list[RuntimeEvent] | None:
        """What was published after that event; None: it is not known any more."""
        program, _, number = last_id.partition("-")
        if program != self._program or not _NUMBER.fullmatch(number):
            return None
        num_missed = self._num_published - int(number)
        if not 0 <= num_missed <= len(self._kept):
            return None
        return list(self._kept)[len(self._kept) - num_missed :]

    def close(self) -> None:
        """Nothing will happen any more: subscribers read what waits, and come to the end."""
        self._is_closed = True
        self.has_figures.set()
        for subscriber in self._subscribers:
            subscriber.has_news.set()

    # ------------------------------------------------------------ what is published

    def engine_moved(self, state: str, why: str) -> None:
        """The engine's lifecycle came to `state`."""
        self.publish("engine", {"state": str(state), "reason": why})

    def model_moved(self, event: ModelState) -> None:
        """A model moved: its row, with what the move says of stage, fraction, reason and error."""
        fields: dict[str, Any] = {"model": event.model, "state": str(event.state)}
        if event.stage:
            fields |= {"stage": event.stage, "fraction": round(event.fraction, 4)}
        if event.reason:
            fields["reason"] = event.reason
        if event.error:
            fields["error"] = _error_fields(event.error)
        if self.keeps:
            row, owners = self.model_row(event.model)
            self.publish("model", {"what": "moved", **row, **fields}, owners=owners)
        self.on_load(fields)
        asyncio.get_running_loop().call_soon(self._on_model, event)  # its errors are its own

    def machine_moved(self, event: MachineEvent) -> None:
        """Pressure, a rung or heat."""
        self.publish(_MACHINE[type(event)], msgspec.structs.asdict(event))

    def request_told(self, request_id: str, what: str, fields: Mapping[str, Any], owner: str = "") -> None:
        """Something happened to a request or a call, and it has not ended; never its text."""
        self.publish("request", {"request_id": request_id, "what": what, **fields}, owner)

    def request_ended(self, status: RequestStatus, event: RequestEvent | None = None) -> None:
        """A request or a call has ended: what it was, what it took and how it ended.

        `event` is the last one of a request; a call has none.
        """
        try:
            self.on_ended(status)
        except Exception:  # it is no fault of the request
            log.exception("what follows ends of requests failed at %s", status.request_id)
        if self.keeps:
            fields = status.as_row()
            if status.moves:
                fields["move"] = fields["moves"][-1]
            if isinstance(event, Finished):
                figures = {"usage": event.usage, "timings": event.timings}
                fields |= msgspec.to_builtins(figures)
            what = "failed" if status.error else "finished"
            self.request_told(status.request_id, what, fields, status.owner)


def _error_fields(error: ErrorInfo) -> dict[str, str]:
    return {"code": error.code, "message": error.message}
