"""What happens in a runtime, for subscribers (SPEC O3).

Names events and gives each to every subscriber, bounded for each of them; no text of any request is in them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.ipc.events import (
    Finished,
    HeatMoved,
    MachineEvent,
    ModelState,
    PressureMoved,
    PromptEcho,
    RequestEvent,
    RungTaken,
    StateReady,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.errors import ErrorInfo
    from stoker.ipc.status import RequestStatus

log = logging.getLogger(__name__)

MAX_WAITING = 512
"""Events that wait for one subscriber; past this the oldest go, and `lagged` says how many."""
MAX_KEPT = 1024
"""Events that are kept for a subscriber who comes back."""

_WORDS = re.compile(r"(?<!^)(?=[A-Z])")
_NUMBER = re.compile(r"[0-9]{1,18}")
_MACHINE = {PressureMoved: "pressure", RungTaken: "rung", HeatMoved: "heat"}
_SILENT = (PromptEcho, StateReady)


class RuntimeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened.

    Attributes:
        event: its name: snapshot, engine, model, pressure, rung, heat, request or lagged.
        at: seconds since the epoch.
        fields: what it is about; values that JSON can hold, no text of any request.
        owner: of a request, digest of the API key that it came with; empty: none.
        id: names it among the events of this program, by `EventBus.subscribe` what came after it can be had;
            empty: `lagged`.
    """

    event: str
    at: float
    fields: dict[str, Any] = {}
    owner: str = ""
    id: str = ""


class _Subscriber:
    """What waits for one subscriber."""

    def __init__(self) -> None:
        self.waiting: deque[RuntimeEvent] = deque()
        self.num_dropped = 0
        self.has_news = asyncio.Event()

    def push(self, event: RuntimeEvent) -> None:
        if len(self.waiting) >= MAX_WAITING:
            self.waiting.popleft()
            self.num_dropped += 1
        self.waiting.append(event)
        self.has_news.set()

    def pop(self, at: float) -> RuntimeEvent | None:
        if self.num_dropped:
            lagged = RuntimeEvent(event="lagged", at=at, fields={"dropped": self.num_dropped})
            self.num_dropped = 0
            return lagged
        return self.waiting.popleft() if self.waiting else None


class EventBus:
    """The subscribers of one runtime.

    Args:
        on_model: also called with each model's state, on the event loop, apart from the caller.
        now: seconds since the epoch.
        owner_of: digest of the API key that a live request came with, by its id.

    Attributes:
        on_ended: called with each request and call that has ended, however many are waiting.
    """

    def __init__(
        self,
        on_model: Callable[[ModelState], None] = lambda _: None,
        now: Callable[[], float] = time.time,
        owner_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._on_model = on_model
        self._owner_of = owner_of
        self._now = now
        self._subscribers: set[_Subscriber] = set()
        self._program = secrets.token_hex(4)
        self.on_ended: Callable[[RequestStatus], None] = lambda status: None  # noqa: ARG005 - the hook's
        self._keeps = False  # nothing is kept before somebody has subscribed
        self._num_published = 0
        self._kept: deque[RuntimeEvent] = deque(maxlen=MAX_KEPT)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<EventBus with {len(self._subscribers)} subscribers>"

    def __len__(self) -> int:
        return len(self._subscribers)

    async def subscribe(
        self, snapshot: Callable[[], Mapping[str, Any]], after: str = ""
    ) -> AsyncGenerator[RuntimeEvent, None]:
        """Everything from now on, after what `snapshot` says now; ends with the bus.

        A slow subscriber loses the oldest; `lagged` gives their number as `dropped`.

        Args:
            snapshot: the state of everything.
            after: id of the last event that the subscriber knows: where all that came after it is still
                there, it gets these and no snapshot.
        """
        subscriber = _Subscriber()
        missed = self._since(after)
        self._keeps = True
        self._subscribers.add(subscriber)
        try:
            if missed is None:
                now_id = self._id(self._num_published)
                yield RuntimeEvent(event="snapshot", at=self._now(), fields=dict(snapshot()), id=now_id)
            for each in missed or ():
                yield each
            while True:
                while (event := subscriber.pop(self._now())) is not None:
                    yield event
                if self._is_closed:
                    return
                subscriber.has_news.clear()
                await subscriber.has_news.wait()
        finally:
            self._subscribers.discard(subscriber)

    def publish(self, event: str, fields: Mapping[str, Any], owner: str = "") -> None:
        """Give an event to every subscriber, and keep it for those who come back."""
        if self._keeps:
            self._num_published += 1
            number = self._id(self._num_published)
            published = RuntimeEvent(event=event, at=self._now(), fields=dict(fields), owner=owner, id=number)
            self._kept.append(published)
            for subscriber in self._subscribers:
                subscriber.push(published)

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
        for subscriber in self._subscribers:
            subscriber.has_news.set()

    # ------------------------------------------------------------ what is published

    def engine_moved(self, state: str, why: str) -> None:
        """The engine's lifecycle came to `state`."""
        self.publish("engine", {"state": str(state), "reason": why})

    def model_moved(self, event: ModelState) -> None:
        """A model moved: its id, state, and what there is of stage, fraction, reason and error."""
        fields: dict[str, Any] = {"model": event.model, "state": str(event.state)}
        if event.stage:
            fields |= {"stage": event.stage, "fraction": round(event.fraction, 4)}
        if event.reason:
            fields["reason"] = event.reason
        if event.error:
            fields["error"] = _error_fields(event.error)
        self.publish("model", fields)
        asyncio.get_running_loop().call_soon(self._on_model, event)  # its errors are its own

    def machine_moved(self, event: MachineEvent) -> None:
        """Pressure, a rung or heat."""
        self.publish(_MACHINE[type(event)], msgspec.structs.asdict(event))

    def request_moved(self, event: RequestEvent, group_id: str | None = None) -> None:
        """A request moved, and has not ended: its id, what happened, and the figures of that; never its text.

        `group_id` is of the call that it is one of.
        """
        if self._keeps and not isinstance(event, _SILENT):
            what = _WORDS.sub("_", type(event).__name__).lower()
            fields = {"request_id": event.request_id, "what": what, **msgspec.to_builtins(event)}
            del fields["type"]
            if group_id is not None:
                fields["group"] = group_id
            self.publish("request", fields, self._owner_of(event.request_id))

    def request_ended(self, status: RequestStatus, event: RequestEvent | None = None) -> None:
        """A request or a call has ended: what it was, what it took and how it ended.

        `event` is the last one of a request; a call has none.
        """
        try:
            self.on_ended(status)
        except Exception:  # it is no fault of the request
            log.exception("what follows ends of requests failed at %s", status.request_id)
        if self._keeps:
            fields = msgspec.to_builtins(status)
            for name in ("owner", "state", "processed_tokens", "position", "eta_s"):
                del fields[name]
            del fields["error" if status.error is None else "finish_reason"]
            fields["what"] = "failed" if status.error else "finished"
            if status.error:
                fields["error"] = _error_fields(status.error)
            if isinstance(event, Finished):
                figures = {"usage": event.usage, "timings": event.timings}
                fields |= msgspec.to_builtins(figures)
            self.publish("request", fields, status.owner)


def _error_fields(error: ErrorInfo) -> dict[str, str]:
    return {"code": error.code, "message": error.message}
