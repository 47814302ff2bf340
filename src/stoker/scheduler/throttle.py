"""What may not run for now, for want of memory or because the machine is hot (SPEC M4, M6).

Decided outside; the scheduler parks what it holds back at the next step and admits none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.kv.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """How schedulers are held back; as made: not at all.

    Attributes:
        holds_background: background does not run.
        holds_all: nothing runs.
        is_lowered: newcomers find half the slots and half the cells; those that run are not touched.
        keeps_nothing: cells of what has ended are not kept.
        reason: why, for the history of parked sequences.
    """

    holds_background: bool = False
    holds_all: bool = False
    is_lowered: bool = False
    keeps_nothing: bool = False
    reason: str = ""

    def holds(self, sequence: Sequence) -> bool:
        """Whether this one may not run now."""
        return self.holds_all or (self.holds_background and sequence.is_background)

    def lowered(self, number: int) -> int:
        """How many of so many slots or cells a newcomer may find in use, itself included."""
        return max(1, number // 2) if self.is_lowered else number
