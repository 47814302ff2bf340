"""The queue of a model: which sequence is next, which may not run, and which has waited too long.

Pure order over sequences without a slot (SPEC Q2, Q5, Q6, Q11). Parked sequences stand before newcomers of
their class, so that cells freed for them are not taken by a later arrival. Paused ones are not queued.

`Throttle` says what may not run for now, for want of memory or because the machine is hot (SPEC M4, M6): the
scheduler parks what it holds back at the next step and admits none of it.

`Aging` keeps background work from starving (SPEC Q7). A background sequence that has had no step for
`patience_s` is owed a token. While any is owed one, one step in ten is for the one that has waited longest,
until its token is drawn: a long prompt takes several such steps before the next one has its turn.

`PrefixWait` is the single flight of prefixes (SPEC C4, C7): one that several sequences need is computed, or
read from disk, once. The next sequence of the queue looks at those that run: if one of them is about to
compute a prefix it shares, it waits for that length, in its place and without cells. When its leader ends,
fails, is parked or paused, the wait is over and it goes on from what there is. So no wait can outlive its
leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.cache.entry import MIN_TOKENS
from stoker.cache.radix import common_prefix
from stoker.ipc.request import Priority, check_queue
from stoker.kv.sequence import Hindrance, ParkForm, PrefixFollow, Sequence, SequenceState

if TYPE_CHECKING:
    from stoker.kv.allocator import KVAllocator


def insert_position(queue: SequenceOf[Priority], newcomer: Priority) -> int:
    """Where `newcomer` goes: background to the end, interactive before the first waiting background."""
    if newcomer is Priority.BACKGROUND:
        return len(queue)
    return next((at for at, waiting in enumerate(queue) if waiting is Priority.BACKGROUND), len(queue))


class RequestQueue:
    """Sequences without a slot, in the order they will get one."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self._sequences: list[Sequence] = []

    def __repr__(self) -> str:
        return f"<RequestQueue {len(self._sequences)} of {self.max_queue}>"

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def check_queue(self, priority: Priority, num_waiting: int, retry_after_s: float) -> None:
        """Raises QueueFullError when `num_waiting` requests are at the bound of the class."""
        check_queue(self.max_queue, priority, num_waiting, retry_after_s)

    def push(self, sequence: Sequence) -> int:
        """Enter at the place of its class; returns the position."""
        at = insert_position([waiting.priority for waiting in self._sequences], sequence.priority)
        self._sequences.insert(at, sequence)
        return at

    def rejoin(self, sequence: Sequence) -> int:
        """Come back before later arrivals, parked ones before all newcomers; returns the position."""
        place = self._place(sequence)
        at = next(
            (at for at, waiting in enumerate(self._sequences) if self._place(waiting) > place),
            len(self._sequences),
        )
        self._sequences.insert(at, sequence)
        return at

    @staticmethod
    def _place(sequence: Sequence) -> tuple[bool, bool, float, int]:
        is_newcomer = sequence.state is not SequenceState.PARKED
        return sequence.is_background, is_newcomer, sequence.arrival_s, sequence.key.index

    def remove(self, sequence: Sequence) -> None:
        """Leave the queue."""
        self._sequences.remove(sequence)


ONE_STEP_IN = 10


class Aging:
    """Counts steps since the last one that was owed.

    Attributes:
        num_steps_total: steps that were given because they were owed.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.num_steps_total = 0
        self._steps_since = ONE_STEP_IN

    def __repr__(self) -> str:
        return f"<Aging {self.patience_s:g} s, {self._steps_since} steps since the last turn>"

    def is_owed(self, sequence: Sequence, now: float) -> bool:
        """Whether it has waited for `patience_s`, or did so and has not had its token yet."""
        has_waited = now - sequence.last_step_s >= self.patience_s
        return sequence.is_background and not sequence.is_held and (sequence.is_owed or has_waited)

    def next_owed(self, sequences: Iterable[Sequence], now: float) -> Sequence | None:
        """The sequence that the next step is owed to, if one is due; notes which are owed one from now on."""
        waiting = [sequence for sequence in sequences if self.is_owed(sequence, now)]
        for sequence in waiting:
            if sequence.owed_since_s is None:
                sequence.owed_since_s = sequence.last_step_s
        return min(waiting, key=_order, default=None) if self._steps_since >= ONE_STEP_IN else None

    def stepped(self, favoured: Sequence | None) -> None:
        """Count a step; `favoured` is the sequence that it was owed to."""
        self._steps_since = 1 if favoured is not None else self._steps_since + 1
        self.num_steps_total += favoured is not None


def _order(sequence: Sequence) -> tuple[float, float, int]:
    assert sequence.owed_since_s is not None, f"{sequence!r} is owed nothing"
    return sequence.owed_since_s, sequence.arrival_s, sequence.key.index


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """How schedulers are held back; as made: not at all.

    Attributes:
        holds_background: background does not run.
        holds_all: nothing runs.
        is_lowered: newcomers find half the slots and half the cells; those that run are not touched.
        keeps_nothing: cells of what has ended are not kept.
        halves_time: after a step nothing is computed for as long as it took.
        reason: why, for the history of parked sequences.
    """

    holds_background: bool = False
    holds_all: bool = False
    is_lowered: bool = False
    keeps_nothing: bool = False
    halves_time: bool = False
    reason: str = ""

    @property
    def holds_any(self) -> bool:
        """Whether some may not run now."""
        return self.holds_all or self.holds_background

    def holds(self, sequence: Sequence) -> bool:
        """Whether this one may not run now."""
        return self.holds_all or (self.holds_background and sequence.is_background)

    def lowered(self, number: int) -> int:
        """How many of so many slots or cells a newcomer may find in use, itself included."""
        return max(1, number // 2) if self.is_lowered else number


def leader_for(sequence: Sequence, running: Iterable[Sequence], least: int) -> PrefixFollow | None:
    """The running prefill that will have the most of its tokens, `least` or more."""
    best: PrefixFollow | None = None
    tokens, least = sequence.tokens, max(1, least)
    for other in running:
        if other.state is not SequenceState.PREFILL or not other.shares:
            continue
        if least >= len(tokens) or len(other.tokens) < least or other.tokens[least - 1] != tokens[least - 1]:
            continue  # most of a crowd, of which each is compared with all before it
        if other.namespace != sequence.namespace:
            continue
        length = min(common_prefix(other.tokens, tokens), len(tokens) - 1)
        if length >= least and length > other.num_computed:
            best, least = PrefixFollow(other, length), length + 1
    return best


_OWN_PROMPT = Hindrance("waits for the prompt that its first choice computes", is_prefix=True)
_FROM_DISK = Hindrance("its beginning is read from disk")

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

    def awaited(self, sequence: Sequence) -> Hindrance | None:
        """What it goes on from that is on its way; None: nothing is."""
        if not self.is_awaiting(sequence):
            return None
        if sequence.follows is None:
            return _OWN_PROMPT if sequence.is_held else _FROM_DISK
        leader, known = sequence.follows.leader.key.request_id, sequence.hindrance
        if known is not None and known.by == leader:
            return known
        return Hindrance(f"waits for a prefix that {leader} computes", leader, is_prefix=True)

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
        num_at_hand, on_disk = self._allocator.at_hand(sequence)
        if self._follow(sequence, num_at_hand):
            return True
        if on_disk is not None:
            self._allocator.prefix_source.fetch(sequence, on_disk)
        return on_disk is not None

    def _follow(self, sequence: Sequence, num_at_hand: int) -> bool:
        """Wait for another sequence's prefill of a common prefix, if there is one."""
        limits, running = self._allocator.limits, self._allocator.slots.running
        source = self._allocator.prefix_source
        if not (limits.can_share_cells or source.may_store(sequence)):
            return False
        if not any(other.state is SequenceState.PREFILL for other in running):
            return False
        known = num_at_hand if num_at_hand >= MIN_TOKENS else 0  # few are no reason to compute the rest twice
        least = known + self._allocator.slots.least_copied
        follow = leader_for(sequence, running, least)
        if follow is None:
            return False
        if not limits.can_share_cells and not source.mark(follow.leader, follow.length):
            return False
        sequence.follows = follow
        _let_meet(sequence, follow)
        if not sequence.is_background:
            follow.leader.is_raised = True
        return True


def _let_meet(sequence: Sequence, follow: PrefixFollow) -> None:
    """Where little is left after the common part, the leader waits for its followers.

    Their few tokens are then computed in one step, not beside its first decode steps, which would have to be
    short: all of them answer sooner, and the leader hardly later.
    """
    leader, length = follow.leader, follow.length
    if max(len(sequence.tokens), len(leader.tokens)) - length <= MAX_MEETING_TOKENS:
        leader.meets_at = max(leader.meets_at, length)
