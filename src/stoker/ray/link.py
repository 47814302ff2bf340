"""A machine that is a replica of Ray Serve: the gate's `PeerLink` over calls of it.

A door has one stream open to each replica that has a request of its; a message carries what a step of the
engine gave all of them, as a message of Ray takes half a millisecond. What goes the other way are calls.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.errors import ErrorInfo, ServerLostError, StokerError, error_from_info
from stoker.gate.link import PeerLook
from stoker.ipc.codec import WireError, event_decoder
from stoker.ipc.commands import TextQuestion
from stoker.ipc.events import Failed, Finished

if TYPE_CHECKING:
    from stoker.gate.link import OnEnd, OnEvents, PeerLink, PeerRun
    from stoker.ipc.commands import Submit
    from stoker.ipc.events import Event, RequestEvent
    from stoker.ray.calls import ReplicaCalls
    from stoker.ray.roster import Roster

LOOK_S = 3.0
CALL_S = 10.0
"""A call that begins or steers something answers at once."""
ASK_S = 60.0
"""Of a question about text, which a worker may have to answer first."""

_encode = msgspec.msgpack.Encoder().encode
_look = msgspec.msgpack.Decoder(PeerLook).decode


class ReplicaAnswer(msgspec.Struct, frozen=True):
    """What a replica answers to a call: `value`, or why there is none."""

    value: dict[str, Any] = {}
    error: ErrorInfo | None = None


_answer = msgspec.msgpack.Decoder(ReplicaAnswer).decode


def lost(replica: str, error: BaseException) -> ServerLostError:
    """That a replica does not answer, and why."""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return ServerLostError(f"the replica {replica} was lost: {reason}", param="url", url=replica)


class RayRun:
    """One request on a replica: a `PeerRun`.

    Args:
        peer: of the replica.
        submit: as in `PeerLink.run`.
        on_events, on_end: likewise.

    Attributes:
        stream: that its events come over; empty: it is not submitted yet.
        task: submits it.
    """

    def __init__(self, peer: RayPeer, submit: Submit, on_events: OnEvents, on_end: OnEnd) -> None:
        self.request_id = submit.request_id
        self.stream = ""
        self._peer = peer
        self._on_events, self._on_end = on_events, on_end
        self._is_over = False
        self._has_begun = False
        self._heard_s = peer.now()
        self.task = peer.task(self._submit(_encode(submit)))

    def __repr__(self) -> str:
        return f"<RayRun {self.request_id} on {self._peer.name}>"

    @property
    def silent_s(self) -> float:
        """See `PeerRun`."""
        return self._peer.now() - max(self._heard_s, self._peer.heard_s)

    def abandon(self) -> None:
        """See `PeerRun`."""
        if not self._is_over:
            self._is_over = True
            self._peer.abandoned(self)

    def heard(self, events: list[RequestEvent]) -> None:
        """Events of it have come."""
        if self._is_over:
            return
        self._heard_s = self._peer.now()
        last = events[-1]
        if isinstance(last, Failed) and len(events) == 1 and not self._has_begun:
            self.end(error_from_info(last.error))
            return
        self._has_begun = True
        self._on_events(events)
        if isinstance(last, Finished | Failed):
            self.end(None)

    def end(self, error: StokerError | None) -> None:
        """Nothing more of it comes."""
        if not self._is_over:
            self._is_over = True
            self._peer.over(self)
            self._on_end(error)

    async def _submit(self, body: bytes) -> None:
        try:
            self.stream = self._peer.stream()
            await self._peer.calls.call(self._peer.name, "submit", CALL_S, self.stream, body)
        except StokerError as error:
            self.end(error)


class RayPeer:
    """One replica; a `PeerLink`.

    Args:
        calls: to the replicas of the deployment.
        replica: its name.
        door: of this door, no other has it.
        roster: told while it is in use.

    Attributes:
        heard_s: when anything came over the stream, on the clock of the event loop.
        is_closed: `close` was called.
    """

    def __init__(self, calls: ReplicaCalls, replica: str, door: str, roster: Roster) -> None:
        self.calls, self.name = calls, replica
        self.heard_s = 0.0
        self.is_closed = False
        self._door, self._roster = door, roster
        self._numbers = itertools.count(1)
        self._stream = ""
        self._reader: asyncio.Task[None] | None = None
        self._runs: dict[str, RayRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        roster.hold(replica)

    def __repr__(self) -> str:
        return f"<RayPeer {self.name}, {len(self._runs)} requests>"

    @property
    def url(self) -> str:
        """See `PeerLink`."""
        return f"{self.calls.name}/{self.name}"

    def take_key(self, other: PeerLink) -> None:
        """See `PeerLink`: there are no keys."""

    async def look(self) -> PeerLook:
        """See `PeerLink`."""
        found = await self._call("look", LOOK_S, self._stream)
        return _look(found)

    def run(self, submit: Submit, on_events: OnEvents, on_end: OnEnd) -> PeerRun:
        """See `PeerLink`."""
        run = RayRun(self, submit, on_events, on_end)
        self._runs[run.request_id] = run
        return run

    async def ask(self, question: TextQuestion) -> dict[str, Any]:
        """See `PeerLink`."""
        return await self._answer("ask", ASK_S, _encode(question))

    async def steer(self, request_id: str, action: str) -> None:
        """See `PeerLink`."""
        await self._answer("steer", CALL_S, request_id, action)

    async def operate(self, action: str, body: dict[str, Any]) -> None:
        """See `PeerLink`. A load takes as long as it does."""
        await self._answer("operate", None, action, body)

    async def close(self) -> None:
        """See `PeerLink`."""
        self.is_closed = True
        for run in list(self._runs.values()):
            run.abandon()
        reader, self._reader = self._reader, None
        tasks = [*self._tasks, *filter(None, [reader])]
        if reader is not None:
            reader.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._roster.release(self.name)

    # ------------------------------------------------------------ a run's

    @staticmethod
    def now() -> float:
        """On the clock of the event loop."""
        return asyncio.get_running_loop().time()

    def stream(self) -> str:
        """The open stream, by the name that the replica knows it by; it is opened where there is none."""
        if self._reader is None:
            self._stream = f"{self._door}.{next(self._numbers)}"
            self.heard_s = self.now()
            self._reader = self.task(self._read(self._stream))
        return self._stream

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something of this replica's, outside of the request that it is for."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def over(self, run: RayRun) -> None:
        """A run has ended."""
        if self._runs.get(run.request_id) is run:
            del self._runs[run.request_id]

    def abandoned(self, run: RayRun) -> None:
        """Nobody wants a run any more: the replica cancels it, once it has it."""
        self.over(run)
        self.task(self._cancel(run))

    # ------------------------------------------------------------ inside

    async def _cancel(self, run: RayRun) -> None:
        await asyncio.wait([run.task])
        try:
            await self.calls.call(self.name, "cancel", CALL_S, run.stream, run.request_id)
        except StokerError:
            return  # it is gone, and the request with it

    async def _call(self, method: str, limit_s: float | None, *given: Any) -> bytes:
        return await asyncio.get_running_loop().create_task(
            self.calls.call(self.name, method, limit_s, *given), context=contextvars.Context()
        )

    async def _answer(self, method: str, limit_s: float | None, *given: Any) -> dict[str, Any]:
        answer = _answer(await self._call(method, limit_s, *given))
        if answer.error is not None:
            raise error_from_info(answer.error)
        return answer.value

    async def _read(self, stream: str) -> None:
        """Give each run its events, until the stream ends."""
        decoder = event_decoder()
        why: StokerError = lost(self.name, EOFError("its stream has ended"))
        try:
            async with aclosing(self.calls.open(self.name, stream)) as messages:
                async for data in messages:
                    self.heard_s = self.now()
                    for frame in decoder.feed(data):
                        self._heard(frame)
        except (ServerLostError, WireError) as error:
            why = error if isinstance(error, ServerLostError) else lost(self.name, error)
        finally:
            if self._stream == stream:
                self._reader = None
        for run in list(self._runs.values()):
            run.end(why)

    def _heard(self, events: list[Event]) -> None:
        found: dict[str, list[RequestEvent]] = {}
        for event in events:
            found.setdefault(event.request_id, []).append(event)  # type: ignore[union-attr, arg-type] # a replica sends what is about requests
        for request_id, its in found.items():
            if (run := self._runs.get(request_id)) is not None:
                run.heard(its)
