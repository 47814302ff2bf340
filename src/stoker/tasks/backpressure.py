"""How many requests of a call are under way at once: fewer where a queue, or a server, is at its bound.

Owns that number. It falls to what is taken with the first refusal, and grows by one after as many
answers as it is large, as the queue may have become shorter meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from stoker.errors import QueueFullError, ServerBusyError

T = TypeVar("T")

NO_ROOM = (QueueFullError, ServerBusyError)
"""What is refused for want of room, and taken later."""
MAX_IN_FLIGHT = 64
"""Requests of one call that are under way at once."""


class Backpressure:
    """See the module.

    Args:
        most: requests under way at once.
    """

    def __init__(self, most: int = MAX_IN_FLIGHT) -> None:
        self._most = most
        self._limit = most
        self._num_running = 0
        self._num_answered = 0  # since the limit was changed
        self._has_moved = asyncio.Condition()

    def __repr__(self) -> str:
        return f"<Backpressure {self._num_running} of {self._limit}, at most {self._most}>"

    async def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` returns; it is called again where there was no room.

        Raises:
            QueueFullError, ServerBusyError: others take all the room: none of this call is under way.
        """
        while True:
            async with self._place():
                try:
                    answer = await ask()
                except NO_ROOM:
                    if self._num_running == 1:
                        raise
                    self._limit = min(self._limit, self._num_running - 1)
                    self._num_answered = 0
                else:
                    self._widen()
                    return answer

    def _widen(self) -> None:
        self._num_answered += 1
        if self._num_answered >= self._limit < self._most:
            self._limit += 1
            self._num_answered = 0

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        async with self._has_moved:
            await self._has_moved.wait_for(lambda: self._num_running < self._limit)
            self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            async with self._has_moved:
                self._has_moved.notify_all()
