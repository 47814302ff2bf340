"""How a streamed answer begins, when the timers that may begin it are due as its first event fails."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from stoker.errors import QueueFullError
from stoker.server.sse import EventStream

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
            await asyncio.sleep(0)
        time.sleep(2 * TIMER_S)  # noqa: ASYNC251 - a loop that is late, so that the timer is due
        raise QueueFullError("full")

    times = {"keepalive_s": 60.0, "grace_s": 60.0, begins_by: TIMER_S}
    with pytest.raises(QueueFullError):
        await EventStream(frames(), {}, **times)({"type": "http"}, stays, send)
    await asyncio.sleep(2 * TIMER_S)
    assert not sent
