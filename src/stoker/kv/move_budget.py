"""What moving states off a device may cost a turn (SPEC C16).

A state is copied while nothing is computed, so a copy delays all who run. A turn spends at most the target of
a step on copies; an idle one, where only an arrival would wait, as much as a step of background alone. What
takes longer, or saves little against computing its tokens again, is not copied. Pure: backends say what a
copy costs, and 0 where it costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable

IDLE_TARGETS = 4
"""Targets of a step that a turn may spend on copies where nobody runs or waits."""
LEAST_GAIN = 2.0
"""Times as long as its copy that computing a state's tokens has to take: it is to be put back too."""

ComputeTime = Callable[[int], float | None]
"""Seconds that computing so many tokens takes; None: nothing was measured."""


def unknown(num_tokens: int) -> float | None:
    """Of a machine on which nothing was measured."""
    del num_tokens
    return None


class MoveBudget:
    """Time for copies of states in one turn.

    Args:
        target_s: seconds that a turn may spend.
        compute_s: what computing tokens takes.
    """

    def __init__(self, target_s: float, compute_s: ComputeTime = unknown) -> None:
        self._target_s = target_s
        self._compute_s = compute_s
        self._left_s = target_s
        self.num_refused_total = 0

    def __repr__(self) -> str:
        return f"<MoveBudget {self._left_s * 1000:.1f} ms left, {self.num_refused_total} refused>"

    def begin(self, targets: float = 1.0) -> None:
        """A turn begins that may spend so many targets."""
        self._left_s = targets * self._target_s

    def take(self, cost_s: float, num_tokens: int) -> bool:
        """Whether a copy of a state of so many tokens may be made now; its time is spent then."""
        compute_s = self._compute_s(num_tokens)
        is_worth_it = compute_s is None or LEAST_GAIN * cost_s <= compute_s
        if cost_s > 0 and not (is_worth_it and cost_s <= self._left_s):
            self.num_refused_total += 1
            return False
        self._left_s -= cost_s
        return True
