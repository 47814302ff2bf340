"""The slots: which sequence runs where, and what an idle one still holds (SPEC Q10).

A slot's id is the backend's sequence number. An idle slot keeps its tokens (its cells are evictable) so that
a request that continues them reuses the live state. A slot may keep the cells of a parked or paused sequence
until they are needed. There may be more slots than sequences that run at once: a newcomer starts in a spare
one without freeing cells first (docs/adr/0006). Choosing is pure; the allocator makes the operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from stoker.cache.entry import MIN_TOKENS, Entry, EntryState
from stoker.cache.radix import common_prefix
from stoker.kv.cells import CellPool, SchedulerLimits
from stoker.kv.sequence import ParkForm, Sequence

FEW_TOKENS = 4
"""Tokens in common from which cells are shared: a template's head has them, texts that only begin with the
same token have not."""
FIRST_CELLS = 256
"""Cells of a pool that every step walks over, whatever lies there. Further back fewer than `MIN_TOKENS` could
cost more than they save: while they are in use each step walks up to them."""


@dataclass(slots=True)
class Slot:
    """One place to run: `sequence` while busy, `parked` while it keeps cells for one, else `kept` tokens.

    Attributes:
        last: the sequence that ran here last, if its tokens are kept.
        is_store_decided: it was decided whether to store what is kept.
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
        """Whether it holds neither a running nor a parked sequence."""
        return self.sequence is None and self.parked is None

    @property
    def tokens(self) -> list[int]:
        """What the backend holds under this slot's number."""
        sequence = self.holder
        return self.kept if sequence is None else sequence.tokens[: sequence.num_computed]

    @property
    def holder(self) -> Sequence | None:
        """The running or parked sequence whose cells it holds."""
        return self.sequence or self.parked

    @property
    def num_tokens(self) -> int:
        """How many tokens the backend holds under this slot's number."""
        sequence = self.holder
        return len(self.kept) if sequence is None else sequence.num_computed

    def keep(self, tokens: list[int]) -> None:
        """Hold these for reuse; without any it is empty."""
        self.kept = tokens
        if not tokens:
            self.last, self.is_store_decided, self.copy = None, False, None

    @property
    def has_copy(self) -> bool:
        """Whether a stored state stands for what is kept."""
        return self.copy is not None and self.copy.state is not EntryState.GONE

    @property
    def is_unstored(self) -> bool:
        """Whether storing it is to be decided before it goes: never decided, or its copy is gone."""
        return bool(self.kept) and (
            not self.is_store_decided or (self.copy is not None and not self.has_copy)
        )


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """Where a sequence goes: `slot`, with `length` tokens from the cells of `source`, or from `entry`."""

    slot: int
    source: int
    length: int
    entry: Entry | None = None


class SlotTable:
    """All slots of one model, spare ones included.

    Args:
        limits: how many there are, and what the backend can do with their cells.
        cells: the pool in which they have theirs.

    Attributes:
        running: the sequences that hold a slot, in the order in which they got it; changed here alone.
        least_copied: tokens in common for which what a slot holds is copied to another; set by the allocator.
    """

    def __init__(self, limits: SchedulerLimits, cells: CellPool) -> None:
        self._limits, self._cells = limits, cells
        self.least_copied = MIN_TOKENS
        self.num_slots = limits.num_slots
        self.slots = [Slot(number) for number in range(max(limits.num_slots, limits.num_sequences))]
        self.running: list[Sequence] = []

    def __repr__(self) -> str:
        return f"<SlotTable {len(self.running)} busy of {self.num_slots}>"

    def __getitem__(self, number: int) -> Slot:
        return self.slots[number]

    @property
    def has_cells_in_use(self) -> bool:
        """Whether any sequence runs or is parked in cells: holes among them have to be closed up."""
        return any(slot.sequence or slot.parked for slot in self.slots)

    def parked(self) -> list[Sequence]:
        """Sequences parked in their cells."""
        return [slot.parked for slot in self.slots if slot.parked is not None]

    def occupy(self, slot: Slot, sequence: Sequence, now: float) -> None:
        """Put a sequence in an idle slot or the one it is parked in; it takes over what the slot kept."""
        assert slot.parked in (None, sequence), f"slot {slot.id} is kept for {slot.parked!r}"
        slot.sequence, slot.parked, slot.last_used_s = sequence, None, now
        slot.keep([])
        sequence.slot, sequence.parked_slot, sequence.form = slot.id, None, None
        places = {other.place for other in self.running}
        sequence.place = next(place for place in count() if place not in places)
        self.running.append(sequence)

    def vacate(self, sequence: Sequence, kept: list[int], now: float) -> Slot:
        """Take a sequence out of its slot, which keeps `kept` of its tokens."""
        assert sequence.slot is not None, f"{sequence!r} holds no slot"
        slot = self.slots[sequence.slot]
        slot.sequence, slot.last, slot.last_used_s = None, sequence, now
        slot.keep(kept)
        sequence.slot, sequence.is_raised = None, False
        self.running.remove(sequence)
        return slot

    def park(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of its slot, which keeps its cells for it."""
        slot = self.vacate(sequence, [], now)
        slot.parked, sequence.parked_slot, sequence.form = sequence, slot.id, ParkForm.CELLS

    def clear(self, parked: Sequence, kept: list[int]) -> Slot:
        """Make the slot of a parked sequence idle; it keeps `kept` of its tokens."""
        assert parked.parked_slot is not None, f"{parked!r} has no slot of its own"
        slot = self.slots[parked.parked_slot]
        slot.parked, slot.last = None, parked
        slot.keep(kept)
        parked.parked_slot, parked.form = None, None
        return slot

    def in_use(self) -> list[int]:
        """Numbers of the busy slots, and of the idle one used last, which the next turn may continue."""
        kept = [slot for slot in self.slots if slot.kept]
        newest = max(kept, key=lambda slot: slot.last_used_s, default=None)
        return [slot.id for slot in self.slots if slot.sequence is not None or slot is newest]

    def shown(self) -> list[Slot]:
        """As many slots as may run at once, by id: the busy ones, then those used last."""
        order = sorted(
            self.slots,
            key=lambda slot: (slot.sequence is None, not slot.kept, -slot.last_used_s, slot.id),
        )
        return sorted(order[: self.num_slots], key=lambda slot: slot.id)

    def oldest_kept(self) -> Slot | None:
        """The idle slot with kept tokens that was unused for longest."""
        kept = [slot for slot in self.slots if slot.is_idle and slot.kept]
        return min(kept, key=lambda slot: slot.last_used_s, default=None)

    def source(self, sequence: Sequence) -> tuple[Slot, int] | None:
        """The slot that holds the most of a sequence's tokens, and how many; None: none holds enough."""
        best: tuple[Slot, int] | None = None
        tokens, most = sequence.tokens, len(sequence.tokens) - 1
        num_best = 0
        for slot in self.slots:
            if (holder := slot.sequence or slot.parked) is None:
                held, num_held = slot.kept, len(slot.kept)
            else:
                held, num_held = holder.tokens, holder.num_computed
            least = max(num_best, self._least(slot, sequence))
            if num_held < least or most < least or held[least - 1] != tokens[least - 1]:
                continue  # many that arrive at once are compared with all there are
            length = self._num_reusable(slot, sequence)
            if length and (best is None or (length, slot.is_idle) > (best[1], best[0].is_idle)):
                best, num_best = (slot, length), length
        return best

    def _num_reusable(self, slot: Slot, asker: Sequence) -> int:
        """How many of a slot's tokens `asker` can go on from; at least its own last one is to be computed."""
        owner = slot.holder or slot.last
        if owner is None or not self._may_take(owner, asker):
            return 0
        if not self._limits.can_fork and slot.holder is not None:
            return 0
        held = slot.kept if slot.holder is None else slot.holder.tokens
        length = min(common_prefix(held, asker.tokens, slot.num_tokens), len(asker.tokens) - 1)
        if length < self._least(slot, asker) or (not self._limits.can_trim and length != slot.num_tokens):
            return 0
        is_few = length < MIN_TOKENS and asker.leader is None
        if is_few and self._cells.num_before(slot.id) + length > FIRST_CELLS:
            return 0
        return length

    def _least(self, slot: Slot, asker: Sequence) -> int:
        """Tokens in common from which on it takes what a slot keeps, or holds for another."""
        if asker.leader is not None:
            return 1
        if self._limits.shares_cells:
            return FEW_TOKENS
        return MIN_TOKENS if slot.holder is None else self.least_copied

    def _may_take(self, owner: Sequence, asker: Sequence) -> bool:
        if owner.is_importing or asker.wants_prompt_logits:
            return False  # its tokens are not in its cells yet, and might not get there
        if owner.key.request_id == asker.key.request_id:
            return True  # choices of one request share their prompt (SPEC Q16)
        may_share = self._limits.cache_mode.keeps_cells and owner.shares and asker.shares  # SPEC C10
        return may_share and owner.namespace == asker.namespace

    def vacant(self) -> Slot | None:
        """The idle slot to start in from nothing: an empty one, else the one unused for longest."""
        idle = [slot for slot in self.slots if slot.sequence is None and slot.parked is None]
        return min(idle, key=lambda slot: (bool(slot.kept), slot.last_used_s, slot.id), default=None)

    def place(self, source: tuple[Slot, int] | None) -> SlotPlacement | None:
        """Where it goes, given the best source; None: all are busy.

        It goes on in an idle source, but for a few tokens, for which that does not lose what it keeps else.
        """
        if source is not None and source[0].is_idle:
            slot, length = source
            if length >= MIN_TOKENS or not self._limits.shares_cells:
                return SlotPlacement(slot.id, slot.id, length)
        vacant = self.vacant()
        if vacant is None:
            return None
        if source is not None:
            return SlotPlacement(vacant.id, source[0].id, source[1])
        return SlotPlacement(vacant.id, vacant.id, 0)
