"""How long the next slice of a long computation may be, beside steps that people wait for (SPEC Q8, V3).

A picture takes as long to encode as dozens of steps. Where nobody decodes it gets whole targets; beside
people who do it gets a part of their time, so that each of their tokens comes a little later and none much.
"""

from __future__ import annotations

SHARE = 0.25
"""Part of the time of steps with interactive decode rows that goes to slices between them."""
LEAST_S = 0.001
"""A shorter slice would be mostly waking and stopping."""


class SliceBudget:
    """Counts the time that slices may take.

    Args:
        target_s: what a slice takes where nobody decodes.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._credit_s = target_s

    def __repr__(self) -> str:
        return f"<SliceBudget {self._credit_s * 1000:.1f} of {self._target_s * 1000:g} ms>"

    def stepped(self, took_s: float) -> None:
        """A step in which people decode has taken so long."""
        self._credit_s = min(self._credit_s + SHARE * took_s, self._target_s)

    def idle(self) -> None:
        """Nobody decodes."""
        self._credit_s = self._target_s

    def next_s(self) -> float:
        """Seconds of the next slice; 0: there is no time for one yet."""
        return self._credit_s if self._credit_s >= LEAST_S else 0.0

    def spent(self, took_s: float) -> None:
        """A slice has taken so long; one that took too long is paid for by the next ones."""
        self._credit_s -= took_s
