"""The slots: which sequence runs where, and what an idle one still holds (SPEC Q10).

A slot's id is the backend's sequence number. An idle slot keeps its tokens (its cells are evictable) so
that a request that continues them reuses the live state. A slot may be the home of a sequence that is
parked or paused: its cells stay there until they are needed. There may be more slots than sequences that run
at once: the spare ones let a newcomer start without freeing cells under those who run (see docs/adr/0006).
Choosing is pure; effects are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.cache.entry import EntryState
from stoker.cache.index import MIN_TOKENS
from stoker.kv.sequence import ParkForm, Sequence

if TYPE_CHECKING:
    from stoker.cache.entry import Entry

_FIRST_LOOK = 32


def common_prefix(left: Tokens[int], right: Tokens[int], limit: int | None = None) -> int:
    """How many leading tokens (of the first `limit`) are the same.

    Bisection over slice comparisons, which run in C; most pairs differ at a first look.
    """
    most = min(len(left), len(right), len(left) if limit is None else limit)
    low, high = 0, min(most, _FIRST_LOOK)
    if left[:high] == right[:high]:
        low, high = high, most
        if left[low:high] == right[low:high]:
            return high
    while low < high - 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class Slot:
    """One place to run: `sequence` while busy, `parked` while home to one that waits, else `kept` tokens.

    Attributes:
        last: who ran here last, if its tokens are kept.
        is_weighed: whether what is kept is worth storing was decided.
        copy: the stored state that stands for it.
    """

    id: int
    sequence: Sequence | None = None
    parked: Sequence | None = None
    kept: list[int] = field(default_factory=list)
    last: Sequence | None = None
    is_store_decided: bool = False
    copy: Entry | None = None
    last_used_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs here and nobody's cells are kept for them."""
        return self.sequence is None and self.parked is None

    @property
    def tokens(self) -> list[int]:
        """What the backend holds under this slot's number."""
        sequence = self.holder
        return self.kept if sequence is None else sequence.tokens[: sequence.num_computed]

    @property
    def holder(self) -> Sequence | None:
        """Whose cells they are while it runs or waits."""
        return self.sequence or self.parked

    @property
    def num_tokens(self) -> int:
        """How many tokens the backend holds under this slot's number."""
        sequence = self.holder
        return len(self.kept) if sequence is None else sequence.num_computed

    def keep(self, tokens: list[int]) -> None:
        """Hold these for reuse; none: it is empty."""
        self.kept = tokens
        if not tokens:
            self.last, self.is_store_decided, self.copy = None, False, None

    @property
    def has_copy(self) -> bool:
        """Whether a stored state stands for what is kept."""
        return self.copy is not None and self.copy.state is not EntryState.GONE

    @property
    def is_unstored(self) -> bool:
        """Whether storing it is to be decided before it goes: nobody has, or its copy has gone since."""
        return bool(self.kept) and (
            not self.is_store_decided or (self.copy is not None and not self.has_copy)
        )


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """Where a sequence goes: `slot`, with `length` tokens that `source` holds (0: none), or that are stored.

    Attributes:
        entry: the stored state they come from; None: from cells.
    """

    slot: int
    source: int
    length: int
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class Reuse:
    """What of the slots' cells a sequence may take over.

    Attributes:
        sequence: who asks.
        can_trim: the backend can cut sequences.
        can_fork: it can share cells.
        keeps_cells: cells of other requests may be used at all (SPEC C10).
    """

    sequence: Sequence
    can_trim: bool
    can_fork: bool
    keeps_cells: bool

    def length(self, slot: Slot) -> int:
        """How many of a slot's tokens it can go on from; at least its own last one stays to be computed."""
        owner = slot.holder or slot.last
        if owner is None or not self._may_take(owner):
            return 0
        if not self.can_fork and slot.holder is not None:
            return 0
        held = slot.kept if slot.holder is None else slot.holder.tokens
        tokens = self.sequence.tokens
        length = min(common_prefix(held, tokens, slot.num_tokens), len(tokens) - 1)
        least = MIN_TOKENS if self.sequence.leader is None else 1
        if length < least or (not self.can_trim and length != slot.num_tokens):
            return 0
        return length

    def _may_take(self, owner: Sequence) -> bool:
        asker = self.sequence
        if owner.is_importing or asker.wants_prompt_logits:
            return False  # its tokens are not in its cells yet, and might not get there
        if owner.key.request_id == asker.key.request_id:
            return True  # choices of one request share their prompt (SPEC Q16)
        may_share = self.keeps_cells and owner.shares and asker.shares
        return may_share and owner.namespace == asker.namespace


class SlotTable:
    """All slots of one model, spare ones included.

    Args:
        num_slots: sequences that may run at once.
        num_sequences: sequences the backend knows, at least as many.
    """

    def __init__(self, num_slots: int, num_sequences: int) -> None:
        self.num_slots = num_slots
        self.slots = [Slot(number) for number in range(max(num_slots, num_sequences))]
        self._running: list[Sequence] = []

    def __repr__(self) -> str:
        return f"<SlotTable {len(self._running)} busy of {self.num_slots}>"

    def __getitem__(self, number: int) -> Slot:
        return self.slots[number]

    @property
    def has_cells_in_use(self) -> bool:
        """Whether any sequence runs or waits in its cells: what is freed among them has to be closed up."""
        return any(slot.sequence or slot.parked for slot in self.slots)

    def parked(self) -> list[Sequence]:
        """Sequences whose cells are kept while they wait."""
        return [slot.parked for slot in self.slots if slot.parked is not None]

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a slot, in the order they got it; not to be changed."""
        return self._running

    def occupy(self, slot: Slot, sequence: Sequence, now: float) -> None:
        """Put a sequence in an idle slot, or its home; what the slot kept is the sequence's from here on."""
        assert slot.parked in (None, sequence), f"slot {slot.id} is kept for {slot.parked!r}"
        slot.sequence, slot.parked, slot.last_used_s = sequence, None, now
        slot.keep([])
        sequence.slot, sequence.parked_slot, sequence.form = slot.id, None, None
        self._running.append(sequence)

    def vacate(self, sequence: Sequence, kept: list[int], now: float) -> Slot:
        """Take a sequence out of its slot, which keeps `kept` of its tokens."""
        assert sequence.slot is not None, f"{sequence!r} holds no slot"
        slot = self.slots[sequence.slot]
        slot.sequence, slot.last, slot.last_used_s = None, sequence, now
        slot.keep(kept)
        sequence.slot, sequence.is_raised = None, False
        self._running.remove(sequence)
        return slot

    def park(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of its slot, which becomes its home and keeps its cells."""
        slot = self.vacate(sequence, [], now)
        slot.parked, sequence.parked_slot, sequence.form = sequence, slot.id, ParkForm.CELLS

    def clear(self, parked: Sequence, kept: list[int]) -> Slot:
        """End a guest's stay; its home is idle from here on and keeps `kept` of its tokens."""
        assert parked.parked_slot is not None, f"{parked!r} has no slot of its own"
        slot = self.slots[parked.parked_slot]
        slot.parked, slot.last = None, parked
        slot.keep(kept)
        parked.parked_slot, parked.form = None, None
        return slot

    def in_use(self) -> list[int]:
        """Those that run, and the idle slot used last, which its next turn will look for: by number."""
        kept = [slot for slot in self.slots if slot.kept]
        newest = max(kept, key=lambda slot: slot.last_used_s, default=None)
        return [slot.id for slot in self.slots if slot.sequence is not None or slot is newest]

    def shown(self) -> list[Slot]:
        """As many slots as may run at once: the busy ones, then those used last; by id."""
        order = sorted(
            self.slots,
            key=lambda slot: (slot.sequence is None, not slot.kept, -slot.last_used_s, slot.id),
        )
        return sorted(order[: self.num_slots], key=lambda slot: slot.id)

    def oldest_kept(self) -> Slot | None:
        """The idle slot with kept tokens that was unused for longest."""
        kept = [slot for slot in self.slots if slot.is_idle and slot.kept]
        return min(kept, key=lambda slot: slot.last_used_s, default=None)

    def source(self, reuse: Reuse) -> tuple[Slot, int] | None:
        """The slot that holds the most of a sequence's tokens, and how many; None: none holds enough."""
        best: tuple[Slot, int] | None = None
        for slot in self.slots:
            length = reuse.length(slot)
            if length and (best is None or (length, slot.is_idle) > (best[1], best[0].is_idle)):
                best = slot, length
        return best

    def vacant(self) -> Slot | None:
        """The idle slot to start in from nothing: an empty one, else the one unused for longest."""
        idle = [slot for slot in self.slots if slot.is_idle]
        return min(idle, key=lambda slot: (bool(slot.kept), slot.last_used_s, slot.id), default=None)

    def place(self, source: tuple[Slot, int] | None) -> SlotPlacement | None:
        """Where it goes, given the best source: there if it is idle, else beside it; None: all are busy."""
        if source is not None and source[0].is_idle:
            slot, length = source
            return SlotPlacement(slot.id, slot.id, length)
        vacant = self.vacant()
        if vacant is None:
            return None
        if source is not None:
            return SlotPlacement(vacant.id, source[0].id, source[1])
        return SlotPlacement(vacant.id, vacant.id, 0)
