"""How much time images and calls of several texts may take beside rows that decode (SPEC Q8, V3)."""

from __future__ import annotations

PLAIN_STEPS = 40
"""Steps between two bursts: fewer than one token in twenty is late, so the 95th percentile stays."""
SHORT_STEP = 0.5
"""Steps up to this part of the target are short."""


class Bursts:
    """When work for images may delay decode rows, where steps are short (SPEC V3, Q8).

    An image's tokens need a native call of their own, which costs about as much as a short step whatever it
    carries. Beside every step it would make each half as long again; so it comes in bursts of a whole target
    with many plain steps between them, and one token in forty is late.

    Args:
        target_s: how long such a step may take.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._num_plain = PLAIN_STEPS

    def __repr__(self) -> str:
        return f"<Bursts {self._num_plain} steps since the last one>"

    def suits(self, step_s: float) -> bool:
        """Whether steps that take so long are short; otherwise work is spread evenly over them."""
        return step_s <= SHORT_STEP * self._target_s

    @property
    def is_due(self) -> bool:
        """Whether there were enough plain steps."""
        return self._num_plain >= PLAIN_STEPS

    def stepped(self) -> None:
        """Count a step with interactive decode rows."""
        self._num_plain += 1

    def taken(self) -> None:
        """Count from here: a burst was made."""
        self._num_plain = 0


SLICE_SHARE = 0.25
"""Part of the time of steps with interactive decode rows that goes to slices between them."""
MIN_SLICE_S = 0.001
"""A shorter slice would be mostly waking and stopping."""


class SliceBudget:
    """How long the next slice of a long computation may be, beside interactive steps (SPEC Q8, V3).

    An image takes as long to encode as dozens of steps. Where no sequence decodes a slice takes a whole
    target; beside decode rows it gets a part of their time: each token is a little later and none much.

    Args:
        target_s: seconds of a slice where no sequence decodes.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._credit_s = target_s

    def __repr__(self) -> str:
        return f"<SliceBudget {self._credit_s * 1000:.1f} of {self._target_s * 1000:g} ms>"

    def stepped(self, took_s: float) -> None:
        """A step with interactive decode rows took so long."""
        self._credit_s = min(self._credit_s + SLICE_SHARE * took_s, self._target_s)

    def idle(self) -> None:
        """No sequence decodes."""
        self._credit_s = self._target_s

    def next_s(self) -> float:
        """Seconds of the next slice; 0: none yet."""
        return self._credit_s if self._credit_s >= MIN_SLICE_S else 0.0

    def spent(self, took_s: float) -> None:
        """A slice took so long; one that took too long shortens the next ones."""
        self._credit_s -= took_s
