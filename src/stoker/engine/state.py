"""The lifecycle of an engine as its front sees it: one Enum, one table.

Owns which moves are legal and remembers the last ones; what a move entails is the host's business.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum


class EngineState(StrEnum):
    """Whether requests are taken and an engine is there to run them."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    CLOSED = "closed"


MOVES = {
    EngineState.STARTING: {EngineState.SERVING, EngineState.CLOSED},
    EngineState.SERVING: {EngineState.RESTARTING, EngineState.CLOSED},
    EngineState.RESTARTING: {EngineState.SERVING, EngineState.CLOSED},
    EngineState.CLOSED: set[EngineState](),
}
STORY_LENGTH = 16


class Lifecycle:
    """Current state and how it came about."""

    def __init__(self) -> None:
        self._state = EngineState.STARTING
        self._story: deque[str] = deque([str(EngineState.STARTING)], maxlen=STORY_LENGTH)

    def __repr__(self) -> str:
        return f"<Lifecycle {' '.join(self._story)}>"

    @property
    def state(self) -> EngineState:
        """Where the engine is."""
        return self._state

    def move(self, to: EngineState, why: str) -> None:
        """Go to another state.

        Raises:
            AssertionError: the table has no such move: a bug of ours, told with the story so far.
        """
        if to not in MOVES[self._state]:
            raise AssertionError(f"illegal move {self._state} -> {to} ({why}); so far: {self!r}")
        self._state = to
        self._story.append(f"-> {to} ({why})")
