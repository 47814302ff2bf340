"""The lifecycle of an engine as its front sees it: one Enum, one table.

Owns which moves are legal and remembers the last ones; what a move entails is the host's business.
"""

from __future__ import annotations

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


def _ignore(state: EngineState, why: str) -> None:
    """Nobody watches."""


class Lifecycle:
    """Current state and how it came about.

    Args:
        on_move: called with every new state and why.
    """

    def __init__(self, on_move: OnMove = _ignore) -> None:
        self._on_move = on_move
        self._state = EngineState.STARTING
        self._since_s = time.monotonic()
        self._story: deque[str] = deque([str(EngineState.STARTING)], maxlen=STORY_LENGTH)

    def __repr__(self) -> str:
        return f"<Lifecycle {' '.join(self._story)}>"

    @property
    def state(self) -> EngineState:
        """Where the engine is."""
        return self._state

    @property
    def since_s(self) -> float:
        """When it came there, on the monotonic clock."""
        return self._since_s

    def move(self, to: EngineState, why: str) -> None:
        """Go to another state.

        Raises:
            AssertionError: the table has no such move: a bug of ours, told with the story so far.
        """
        if to not in MOVES[self._state]:
            raise AssertionError(f"illegal move {self._state} -> {to} ({why}); so far: {self!r}")
        self._state, self._since_s = to, time.monotonic()
        self._story.append(f"-> {to} ({why})")
        self._on_move(to, why)
