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

from stoker.scheduler.sequence import ParkForm, Sequence

MIN_REUSE = 32
"""Tokens below which a stored prefix is not worth taking over (SPEC C2)."""


def common_prefix(left: Tokens[int], right: Tokens[int]) -> int:
    """How many leading tokens are the same: bisection over slice comparisons, which run in C."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
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
    """One place to run: `sequence` while busy, `guest` while home to one that waits, else `kept` tokens."""

    id: int
    sequence: Sequence | None = None
    guest: Sequence | None = None
    kept: list[int] = field(default_factory=list)
    last_used_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs here and nobody's cells are kept for them."""
        return self.sequence is None and self.guest is None

    @property
    def tokens(self) -> list[int]:
        """What the backend holds under this slot's number."""
        sequence = self.sequence or self.guest
        return self.kept if sequence is None else sequence.tokens[: sequence.num_computed]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence goes: `slot`, sharing `length` tokens that `source` holds (0: none)."""

    slot: int
    source: int
    length: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """What may be shared: whether the backend can cut sequences and share cells; from which length on."""

    can_trim: bool
    can_fork: bool
    min_length: int = MIN_REUSE


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
        return any(slot.sequence or slot.guest for slot in self.slots)

    def guests(self) -> list[Sequence]:
        """Sequences whose cells are kept while they wait."""
        return [slot.guest for slot in self.slots if slot.guest is not None]

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a slot, in the order they got it; not to be changed."""
        return self._running

    def occupy(self, slot: Slot, sequence: Sequence, now: float) -> None:
        """Put a sequence in an idle slot, or its home; what the slot kept is the sequence's from here on."""
        assert slot.guest in (None, sequence), f"slot {slot.id} is home to {slot.guest!r}"
        slot.sequence, slot.guest, slot.kept, slot.last_used_s = sequence, None, [], now
        sequence.slot, sequence.home, sequence.form = slot.id, None, None
        self._running.append(sequence)

    def vacate(self, sequence: Sequence, kept: list[int], now: float) -> Slot:
        """Take a sequence out of its slot, which keeps `kept` of its tokens."""
        assert sequence.slot is not None, f"{sequence!r} holds no slot"
        slot = self.slots[sequence.slot]
        slot.sequence, slot.kept, slot.last_used_s = None, kept, now
        sequence.slot = None
        self._running.remove(sequence)
        return slot

    def lodge(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of its slot, which becomes its home and keeps its cells."""
        slot = self.vacate(sequence, [], now)
        slot.guest, sequence.home, sequence.form = sequence, slot.id, ParkForm.CELLS

    def clear(self, guest: Sequence, kept: list[int]) -> Slot:
        """End a guest's stay; its home is idle from here on and keeps `kept` of its tokens."""
        assert guest.home is not None, f"{guest!r} has no home"
        slot = self.slots[guest.home]
        slot.guest, slot.kept = None, kept
        guest.home, guest.form = None, None
        return slot

    def surplus_cells(self) -> int:
        """Tokens held for nobody who runs: by idle slots, but for the one used last, and by guests' homes."""
        kept = [slot for slot in self.slots if slot.kept]
        newest = max(kept, key=lambda slot: slot.last_used_s, default=None)
        idle = sum(len(slot.kept) for slot in kept if slot is not newest)
        return idle + sum(guest.num_computed for guest in self.guests())

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

    def place(self, tokens: Tokens[int], reuse: Reuse) -> Placement | None:
        """Choose for a sequence of `tokens`: longest idle prefix > empty slot > idle slot unused for longest.

        At least the last token stays to be computed, for its logits. A busy slot with a longer prefix is
        the source of a fork.
        """
        idle = [slot for slot in self.slots if slot.is_idle]
        if not idle:
            return None
        lengths = {slot.id: self._usable(slot, tokens, reuse) for slot in self.slots}
        best_idle = max(idle, key=lambda slot: lengths[slot.id])
        best = max(self.slots, key=lambda slot: lengths[slot.id])
        if reuse.can_fork and lengths[best.id] > lengths[best_idle.id]:
            others = [slot for slot in idle if slot is not best]
            return Placement(self._vacant(others).id, best.id, lengths[best.id])
        if lengths[best_idle.id]:
            return Placement(best_idle.id, best_idle.id, lengths[best_idle.id])
        vacant = self._vacant(idle)
        return Placement(vacant.id, vacant.id, 0)

    @staticmethod
    def _vacant(idle: list[Slot]) -> Slot:
        return min(idle, key=lambda slot: (bool(slot.kept), slot.last_used_s, slot.id))

    @staticmethod
    def _usable(slot: Slot, tokens: Tokens[int], reuse: Reuse) -> int:
        if slot.sequence is not None and slot.sequence.snapshot_bytes:
            return 0  # its snapshot is not back in its cells yet, and might not get there
        held = slot.tokens
        length = min(common_prefix(held, tokens), len(tokens) - 1)
        if length < reuse.min_length or (not reuse.can_trim and length != len(held)):
            return 0
        return length
