"""The ladder against memory pressure: what is given up, in which order, when it is allowed again (SPEC M4).

Owns the order and the times. Pure: time is an argument, a move is a value. The engine's loop carries a move
out and decides the next one on a later sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from stoker.machine.pressure import Pressure

SETTLE_S = 0.9
"""Between two rungs: what one frees has to show in the next sample. An event that counts for five seconds
climbs five rungs with samples each second, six at most: alone it parks no interactive request."""
CALM_S = 12.0
"""How long the level has to ask for fewer rungs before the highest is undone, at first."""
MAX_CALM_S = 240.0
"""Requests may wait for the highest rung to be undone, so no longer; it is under one move a minute then."""
CALM_PARTS = 4
"""The next ones follow after a part of the calm: all seven are undone in 30 s at first, 10 min at most."""
FORGET_S = 600.0
"""A rung taken within this time after one was undone is a relapse: the calm was too short and is doubled."""


class Rung(StrEnum):
    """What is given up, the cheapest first."""

    TRIM_ALLOCATOR = "trim_allocator"
    DROP_SNAPSHOTS = "drop_snapshots"
    DROP_IDLE_CELLS = "drop_idle_cells"
    LOWER_LIMITS = "lower_limits"
    PAUSE_BACKGROUND = "pause_background"
    UNLOAD_IDLE = "unload_idle"
    PARK_INTERACTIVE = "park_interactive"


LADDER = tuple(Rung)
LONGEST_DESCENT_S = MAX_CALM_S * (1 + (len(LADDER) - 1) / CALM_PARTS)
"""So long after the last sample that asks for a rung, no rung is taken any more."""
_REACH = {
    Pressure.NORMAL: 0,
    Pressure.WARNING: LADDER.index(Rung.DROP_IDLE_CELLS) + 1,
    Pressure.CRITICAL: len(LADDER),
}
"""How many rungs a level asks for. A warning costs only what can be computed again."""


@dataclass(frozen=True, slots=True)
class Move:
    """Take a rung, or undo it: allow again what it had taken away."""

    rung: Rung
    is_undone: bool = False


class Ladder:
    """Climbs one rung a sample while the level asks for more; descends after a calm.

    Undoing a rung uses its memory again and can bring the pressure back. The calm doubles with each such
    relapse.
    """

    def __init__(self) -> None:
        self._num_taken = 0
        self._calm_s = CALM_S
        self._calm_since_s: float | None = None  # since when the level asks for fewer than are taken
        self._moved_s = -math.inf
        self._undone_s: float | None = None  # the last move, if it was down

    def __repr__(self) -> str:
        highest = self.taken[-1] if self.taken else "nothing"
        return f"<Ladder at {highest}, calm {self._calm_s:.0f} s>"

    @property
    def taken(self) -> tuple[Rung, ...]:
        """The rungs that are taken, in order."""
        return LADDER[: self._num_taken]

    def is_taken(self, rung: Rung) -> bool:
        """Whether this rung is taken now."""
        return LADDER.index(rung) < self._num_taken

    def decide(self, level: Pressure, now_s: float) -> Move | None:
        """What to do next: at most one move for a sample.

        Args:
            level: that of a sample taken after the last move was carried out.
            now_s: when that sample was taken, on a monotonic clock.
        """
        reach = _REACH[level]
        if self._num_taken <= reach:
            self._calm_since_s = None
            if self._num_taken == reach or now_s - self._moved_s < SETTLE_S:
                return None
            return self._take(now_s)
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s - self._calm_since_s < self._calm_s or now_s - self._moved_s < self._calm_s / CALM_PARTS:
            return None
        return self._undo(now_s)

    def _take(self, now_s: float) -> Move:
        if self._undone_s is not None:
            is_relapse = now_s - self._undone_s < FORGET_S
            self._calm_s = min(MAX_CALM_S, 2 * self._calm_s) if is_relapse else CALM_S
        self._undone_s = None
        self._moved_s = now_s
        self._num_taken += 1
        return Move(LADDER[self._num_taken - 1])

    def _undo(self, now_s: float) -> Move:
        self._moved_s = self._undone_s = now_s
        self._num_taken -= 1
        return Move(LADDER[self._num_taken], is_undone=True)
