"""When work for pictures may hold up people who read, where their steps are short (SPEC V3, Q8).

A picture's tokens need a native call of their own, which costs about as much as a short step whatever it
carries. A little beside every step would make each of them half as long again. So such work comes in bursts
of a whole target, with many plain steps between them: a reader sees one token in forty come later.
"""

from __future__ import annotations

PLAIN_STEPS = 40
"""Steps between two bursts: fewer than one token in twenty is late, so the 95th percentile stays."""
SHORT = 0.5
"""Steps up to this part of the target are short."""


class Bursts:
    """Counts the steps of one model in which people decode.

    Args:
        target_s: how long such a step may take.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._num_plain = PLAIN_STEPS

    def __repr__(self) -> str:
        return f"<Bursts {self._num_plain} steps since the last one>"

    def suit(self, step_s: float) -> bool:
        """Whether steps that take so long are short; else work is spread evenly over them."""
        return step_s <= SHORT * self._target_s

    @property
    def is_due(self) -> bool:
        """Whether there were enough plain steps."""
        return self._num_plain >= PLAIN_STEPS

    def stepped(self) -> None:
        """A step in which people decode is planned."""
        self._num_plain += 1

    def taken(self) -> None:
        """A burst is made."""
        self._num_plain = 0
