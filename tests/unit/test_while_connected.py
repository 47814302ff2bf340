"""Work that ends when its client leaves, whether it ends before its first wait or later."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from stoker.server.inbound.bodies import ClientGoneError, while_connected


class Client:
    """Stays connected until it is told to leave.

    Attributes:
        seen: what had happened when its connection was first looked at.
    """

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened
        self._left = asyncio.Event()
        self.seen: list[str] | None = None

    def leave(self) -> None:
        """It closes its connection."""
        self._left.set()

    async def receive(self) -> dict[str, Any]:
        """The next message of its connection."""
        if self.seen is None:
            self.seen = list(self._happened)
        await self._left.wait()
        return {"type": "http.disconnect"}


async def test_work_that_ends_before_its_first_wait_gives_its_result() -> None:
    """S5."""

    async def work() -> str:
        return "done"

    assert await while_connected(work(), Client([]).receive) == "done"


@pytest.mark.parametrize("waits", [False, True])
async def test_what_work_raises_is_raised(waits: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """S5: at once or later, and nothing is left that nobody retrieves."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    async def work() -> None:
        if waits:
            await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await while_connected(work(), Client([]).receive)
    await asyncio.sleep(0)
    assert not told


async def test_work_of_a_client_that_leaves_is_ended_and_cleans_up() -> None:
    """S5."""
    happened: list[str] = []
    client = Client(happened)

    async def work() -> None:
        try:
            happened.append("begun")
            client.leave()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            happened.append("cleaned up")

    with pytest.raises(ClientGoneError):
        await while_connected(work(), client.receive)
    assert happened == ["begun", "cleaned up"]


async def test_work_whose_caller_is_cancelled_is_ended() -> None:
    """S5."""
    happened: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            happened.append("cleaned up")

    calling = asyncio.ensure_future(while_connected(work(), Client(happened).receive))
    await asyncio.sleep(0.01)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert happened == ["cleaned up"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks begin later there")
async def test_work_has_begun_before_anything_else_is_looked_at() -> None:
    """Q22: the first request of a crowd is submitted before the next one is read."""
    happened: list[str] = []
    client = Client(happened)

    async def work() -> None:
        assert asyncio.current_task() is not calling
        happened.append("begun")
        await asyncio.sleep(0)

    calling = asyncio.current_task()
    others = [asyncio.ensure_future(asyncio.sleep(0)) for _ in range(3)]
    await while_connected(work(), client.receive)
    assert client.seen == ["begun"]
    await asyncio.gather(*others)
