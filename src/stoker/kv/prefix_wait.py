"""Single flight: a prefix that several sequences need is computed, or read from disk, once (SPEC C4, C7).

The next sequence of the queue looks at those that run: if one of them is about to compute a prefix it
shares, it waits for that length, in its place and without cells. When its leader ends, fails, is parked or
paused, the wait is over and it goes on from what there is. So no wait can outlive its leader.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.cache.entry import MIN_TOKENS
from stoker.cache.radix import common_prefix
from stoker.kv.allocator import KVAllocator
from stoker.kv.sequence import ParkForm, PrefixFollow, Sequence, SequenceState


def leader_for(sequence: Sequence, running: Iterable[Sequence], num_available: int) -> PrefixFollow | None:
    """The running prefill that will have the most of its tokens, if clearly more than `num_available`."""
    best: PrefixFollow | None = None
    for other in running:
        if other.state is not SequenceState.PREFILL or not other.shares:
            continue
        if other.namespace != sequence.namespace:
            continue
        length = min(common_prefix(other.tokens, sequence.tokens), len(sequence.tokens) - 1)
        is_to_come = length > other.num_computed and length >= num_available + MIN_TOKENS
        if is_to_come and (best is None or length > best.length):
            best = PrefixFollow(other, length)
    return best


MAX_MEETING_TOKENS = 64
"""Tokens after a common part up to which those who share it go on together."""


class PrefixWait:
    """Which sequences of a queue wait for a prefix."""

    def __init__(self, allocator: KVAllocator) -> None:
        self._allocator = allocator

    def __repr__(self) -> str:
        return f"<PrefixWait of {self._allocator!r}>"

    def raise_leaders(self, queue: Iterable[Sequence]) -> None:
        """A leader that an interactive sequence follows does not count as background meanwhile."""
        for sequence in self._allocator.slots.running:
            sequence.is_raised = False
        for sequence in queue:
            follows = sequence.follows
            if follows is not None and not follows.is_over and not sequence.is_background:
                follows.leader.is_raised = True

    def is_awaiting(self, sequence: Sequence) -> bool:
        """Whether what it goes on from is on its way."""
        if sequence.is_held or self._allocator.prefix_source.is_fetching(sequence):
            return True
        if sequence.follows is not None:
            if not sequence.follows.is_over:
                return True
            sequence.follows = None
        has_its_own = sequence.form in {ParkForm.CELLS, ParkForm.SNAPSHOT}
        if has_its_own or sequence.wants_prompt_logits or not sequence.shares:
            return False
        return self._follow(sequence) or self._fetch(sequence)

    def _follow(self, sequence: Sequence) -> bool:
        """Wait for another sequence's prefill of a common prefix, if there is one."""
        limits, running = self._allocator.limits, self._allocator.slots.running
        source = self._allocator.prefix_source
        if not (limits.can_share_cells or source.may_store(sequence)):
            return False
        if not any(other.state is SequenceState.PREFILL for other in running):
            return False
        follow = leader_for(sequence, running, self._allocator.num_available(sequence))
        if follow is None:
            return False
        if not limits.can_share_cells and not source.mark(follow.leader, follow.length):
            return False
        sequence.follows = follow
        _let_meet(sequence, follow)
        if not sequence.is_background:
            follow.leader.is_raised = True
        return True

    def _fetch(self, sequence: Sequence) -> bool:
        """Have its prefix read, if most of it is on disk."""
        entry = self._allocator.to_fetch(sequence)
        if entry is not None:
            self._allocator.prefix_source.fetch(sequence, entry)
        return entry is not None


def _let_meet(sequence: Sequence, follow: PrefixFollow) -> None:
    """Where little is left after the common part, the leader waits for its followers.

    Their few tokens are then computed in one step, not beside its first decode steps, which would have to be
    short: all of them answer sooner, and the leader hardly later.
    """
    leader, length = follow.leader, follow.length
    if max(len(sequence.tokens), len(leader.tokens)) - length <= MAX_MEETING_TOKENS:
        leader.meets_at = max(leader.meets_at, length)
