"""How a streamed answer begins and ends while the timers that may speak meanwhile fall due."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from stoker.errors import QueueFullError
from stoker.server.sse import DONE, EventStream, frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

TIMER_S = 0.005


async def stays() -> dict[str, Any]:
    """A client that does not leave."""
    await asyncio.sleep(60)
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("begins_by", ["keepalive_s", "grace_s"])
async def test_a_refusal_comes_before_a_beginning_that_is_due(begins_by: str) -> None:
    """S2: an error raised before the beginning is raised, so nothing may have been sent by then or later."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def frames() -> AsyncGenerator[bytes, None]:
        if begins_by == "grace_s":
            yield b""
        await asyncio.sleep(0)  # the timer sleeps from here on
        time.sleep(2 * TIMER_S)  # noqa: ASYNC251 - a loop that is late, so that the timer is due
        raise QueueFullError("full")

    times = {"keepalive_s": 60.0, "grace_s": 60.0, begins_by: TIMER_S}
    with pytest.raises(QueueFullError):
        await EventStream(frames(), {}, **times)({"type": "http"}, stays, send)
    assert not sent


async def one_frame() -> AsyncGenerator[bytes, None]:
    """A stream of one event."""
    yield frame(b"{}")


async def test_nothing_comes_behind_the_end() -> None:
    """S2: the end is taken slowly, and beats fall due meanwhile."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("more_body") is False:
            await asyncio.sleep(5 * TIMER_S)

    await EventStream(one_frame(), {}, TIMER_S)({"type": "http"}, stays, send)
    assert sent[-1]["body"] == DONE


async def test_a_client_that_leaves_during_the_beginning_gets_no_second_one() -> None:
    """S5: a beat waits until the beginning is sent, and that is cancelled."""
    sent: list[str] = []

    async def leaves() -> dict[str, Any]:
        await asyncio.sleep(3 * TIMER_S)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        await asyncio.sleep(60)

    await EventStream(one_frame(), {}, TIMER_S)({"type": "http"}, leaves, send)
    assert sent == ["http.response.start"]
