"""A replica as a machine of a gate, without Ray: one stream for all its requests, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from stoker.errors import NotReadyError, ServerLostError, StokerError
from stoker.ipc.codec import encode_events
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Failed, Finished, RequestEvent
from stoker.ipc.request import GenerateRequest
from stoker.ipc.usage import Timings, Usage
from stoker.ray.link import RayPeer, RayRun
from stoker.ray.roster import Roster

if TYPE_CHECKING:
    from stoker.ray.calls import ReplicaCalls


class Calls:
    """What a replica is asked, and what its stream says."""

    name = "ray:site/replica"

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.streams: list[asyncio.Queue[bytes | StokerError]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.news = asyncio.Condition()

    async def call(self, replica: str, method: str, limit_s: float | None, *given: Any) -> bytes:
        """Note it."""
        await self.may_answer.wait()
        body = msgspec.msgpack.decode(given[1], type=Submit).request_id if method == "submit" else given[1]
        async with self.news:
            self.asked.append((method, body))
            self.news.notify_all()
        return b""

    async def open(self, replica: str, door: str) -> AsyncGenerator[bytes, None]:
        """What the test puts there."""
        self.streams.append(queue := asyncio.Queue())
        while True:
            found = await queue.get()
            if isinstance(found, StokerError):
                raise found
            yield found

    async def until(self, *wanted: tuple[Any, ...]) -> None:
        """Until these were asked."""
        async with asyncio.timeout(5), self.news:
            await self.news.wait_for(lambda: set(wanted) <= set(self.asked))


class Client:
    """What becomes of one request."""

    def __init__(self, peer: RayPeer, name: str) -> None:
        self.events: list[RequestEvent] = []
        self.ended: asyncio.Future[StokerError | None] = asyncio.get_running_loop().create_future()
        submit = Submit(request_id=name, request=GenerateRequest(prompt="x"))
        self.run = cast("RayRun", peer.run(submit, self.events.extend, self.ended.set_result))


def finished(name: str) -> Finished:
    """The end of a request."""
    return Finished(request_id=name, usage=Usage(), timings=Timings())


async def asked(*names: str) -> tuple[Calls, RayPeer, list[Client]]:
    """A replica that has these requests."""
    calls = Calls()
    peer = RayPeer(cast("ReplicaCalls", calls), "r1", "d1", Roster())
    clients = [Client(peer, name) for name in names]
    await calls.until(*(("submit", name) for name in names))
    return calls, peer, clients


async def test_one_stream_tells_all_requests_of_a_door() -> None:
    """P41: a message has events of several; each gets its own, and ends once."""
    calls, peer, (a, b) = await asked("a", "b")
    (stream,) = calls.streams
    one = Delta(request_id="a", index=0, text="x", token_ids=[1])
    two = Delta(request_id="b", index=0, text="y", token_ids=[2])
    stream.put_nowait(encode_events([one, two, finished("a")]))
    stream.put_nowait(encode_events([finished("b")]))
    assert [await a.ended, await b.ended] == [None, None]
    assert (a.events, b.events) == ([one, finished("a")], [two, finished("b")])
    await peer.close()


async def test_a_lost_stream_ends_all_its_requests_and_the_next_opens_another() -> None:
    """P41."""
    calls, peer, clients = await asked("a", "b")
    calls.streams[0].put_nowait(ServerLostError("it was killed"))
    errors = [await one.ended for one in clients]
    assert [error.code for error in errors if error] == ["server_lost"] * 2
    third = Client(peer, "c")
    await calls.until(("submit", "c"))
    calls.streams[1].put_nowait(encode_events([finished("c")]))
    assert await third.ended is None
    await peer.close()


async def test_a_refusal_is_an_end_and_not_an_event() -> None:
    """P41: the gate asks another machine."""
    calls, peer, (a,) = await asked("a")
    calls.streams[0].put_nowait(encode_events([Failed("a", NotReadyError("it loads").info())]))
    error = await a.ended
    assert error is not None
    assert error.code == "not_ready"
    assert not a.events
    await peer.close()


async def test_one_that_is_left_while_it_is_submitted_is_cancelled_after_it() -> None:
    """P41: the replica would not know it before."""
    calls = Calls()
    calls.may_answer.clear()
    peer = RayPeer(cast("ReplicaCalls", calls), "r1", "d1", Roster())
    Client(peer, "a").run.abandon()
    calls.may_answer.set()
    await calls.until(("cancel", "a"))
    assert calls.asked == [("submit", "a"), ("cancel", "a")]
    await peer.close()


async def test_a_roster_keeps_who_is_held_until_it_is_released() -> None:
    """P41: calls by name reach a replica that takes nothing new, for what it still has."""
    roster, told = Roster(), asyncio.Event()
    roster.replace(("r1", "r2"))
    peer = RayPeer(cast("ReplicaCalls", Calls()), "r1", "d1", roster)
    roster.follow(told.set)
    await told.wait()
    told.clear()
    await asyncio.to_thread(roster.replace, ("r2",))
    await told.wait()
    assert (roster.has("r1"), roster.holds("r1")) == (False, True)
    await peer.close()
    assert not roster.holds("r1")
