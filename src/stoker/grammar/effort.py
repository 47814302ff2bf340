"""How much work translating one grammar may be: counted, not timed, so it comes out alike on any machine."""

from __future__ import annotations


class Exhausted(Exception):  # noqa: N818 - it says what the effort is
    """The steps that were allowed are spent."""


class Effort:
    """Steps that may still be taken, each about a microsecond of work.

    Args:
        max_steps: at the start.
    """

    def __init__(self, max_steps: int) -> None:
        self._num_left = max_steps

    def __repr__(self) -> str:
        return f"Effort(num_left={self._num_left})"

    def spend(self, num_steps: int) -> None:
        """Take so many steps. Raises Exhausted where fewer are left."""
        self._num_left -= num_steps
        if self._num_left < 0:
            raise Exhausted
