"""Who waits for whose prefill: a prefix that several need is computed once (SPEC C4).

Nothing is registered anywhere. Whoever is next in the line looks at those that run: if one of them is about
to compute a prefix it shares, it waits for that length. When the other ends, fails, is parked or paused, it
is no leader any more; whoever comes next in the line goes on from what there is, and the rest follow it. So
nobody can wait for one who is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.cache.index import MIN_TOKENS
from stoker.kv.sequence import SequenceState
from stoker.kv.slots import common_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.kv.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Following:
    """A sequence waits until `leader` has computed `length` tokens."""

    leader: Sequence
    length: int

    @property
    def is_over(self) -> bool:
        """Whether the tokens are there, or will not come from this leader."""
        leader = self.leader
        return leader.state is not SequenceState.PREFILL or leader.num_computed >= self.length


def leader_for(sequence: Sequence, running: Iterable[Sequence], num_available: int) -> Following | None:
    """The running prefill that will have the most of its tokens, if that is worth waiting for.

    `num_available` tokens can be had without waiting.
    """
    best: Following | None = None
    for other in running:
        if other.state is not SequenceState.PREFILL or not other.shares:
            continue
        if other.namespace != sequence.namespace:
            continue
        length = min(common_prefix(other.tokens, sequence.tokens), len(sequence.tokens) - 1)
        is_to_come = length > other.num_computed and length >= num_available + MIN_TOKENS
        if is_to_come and (best is None or length > best.length):
            best = Following(other, length)
    return best
