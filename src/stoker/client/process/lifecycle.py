"""The lifecycle of an engine as the client sees it, and the suspensions in it (SPEC L2).

Owns the table of moves, the last moves made, and the callers' wishes to suspend and to wake. What a move
entails is in `stoker.client.supervisor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum


class EngineState(StrEnum):
    """Whether requests are taken and an engine is there to run them."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    SUSPENDED = "suspended"
    CLOSED = "closed"


MOVES = {
    EngineState.STARTING: {EngineState.SERVING, EngineState.SUSPENDED, EngineState.CLOSED},
    EngineState.SERVING: {EngineState.RESTARTING, EngineState.SUSPENDED, EngineState.CLOSED},
    EngineState.RESTARTING: {EngineState.SERVING, EngineState.SUSPENDED, EngineState.CLOSED},
    # Back to starting where it was suspended before it had ever served.
    EngineState.SUSPENDED: {EngineState.STARTING, EngineState.RESTARTING, EngineState.CLOSED},
    EngineState.CLOSED: set[EngineState](),
}
STORY_LENGTH = 16

OnMove = Callable[[EngineState, str], None]


class Lifecycle:
    """Current state and how it came about.

    Args:
        on_move: called with every new state and why.

    Attributes:
        state: where the engine is; changed by `move` only.
        since_s: when it came there, on the monotonic clock.
    """

    def __init__(self, on_move: OnMove = lambda *_: None) -> None:
        self.state = EngineState.STARTING
        self.since_s = time.monotonic()
        self._on_move = on_move
        self._story: deque[str] = deque([str(EngineState.STARTING)], maxlen=STORY_LENGTH)

    def __repr__(self) -> str:
        return f"<Lifecycle {' '.join(self._story)}>"

    def move(self, to: EngineState, why: str) -> None:
        """Go to another state.

        Raises:
            AssertionError: the table has no such move: a bug of ours, told with the story so far.
        """
        if to not in MOVES[self.state]:
            raise AssertionError(f"illegal move {self.state} -> {to} ({why}); so far: {self!r}")
        self.state, self.since_s = to, time.monotonic()
        self._story.append(f"-> {to} ({why})")
        self._on_move(to, why)


GRACES_S = {"sleep": 0.0, "background": 30.0}
"""Seconds before a suspension for that reason (SPEC L2); for others the settings say."""


class Suspension:
    """Whether the engine is to be away, and whether it is.

    Attributes:
        is_wanted: it is to be away, until `wake`.
        is_on: it is away, and what it left is stored.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.is_on = False
        self._num_wakes = 0
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Suspension wanted={self.is_wanted} on={self.is_on} wakes={self._num_wakes}>"

    def ring(self) -> None:
        """Have every waiter check its condition again."""
        self._news.set()
        self._news.clear()

    async def until(self, condition: Callable[[], bool], limit_s: float | None = None) -> None:
        """Wait until `condition` holds, checked at each `ring`; at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not condition():
                    await self._news.wait()

    async def grace(self, grace_s: float, is_moot: Callable[[], bool]) -> bool:
        """Wait so long; False where `wake` came first. Ends early once `is_moot` holds."""
        wakes = self._num_wakes
        await self.until(lambda: self._num_wakes != wakes or self.is_wanted or is_moot(), grace_s)
        return self._num_wakes == wakes

    def want(self) -> None:
        """The engine is to leave."""
        self.is_wanted = True
        self.ring()

    def begin(self) -> None:
        """It has left."""
        self.is_on = True
        self.ring()

    def wake(self) -> None:
        """It is to come back; a grace under way ends without effect."""
        self._num_wakes += 1
        self.is_wanted = False
        self.ring()

    def end(self) -> None:
        """It comes back."""
        self.is_on = False
