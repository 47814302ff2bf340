"""Where sequences and their cells are, and how room is made.

Owns the slots, the count of cells and what is kept of those that wait: cells in their home slot while that
costs nobody, else a snapshot in host memory while there is a budget for it, else their tokens (SPEC Q4).
Who has to give way to whom is the scheduler's to decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.scheduler.cells import CellPool
from stoker.scheduler.effects import Drop, Export, Fork, Import, Trim
from stoker.scheduler.sequence import ParkForm
from stoker.scheduler.slots import MIN_REUSE, Placement, Reuse, SlotTable

if TYPE_CHECKING:
    from stoker.scheduler.effects import Effect
    from stoker.scheduler.limits import SchedulerLimits
    from stoker.scheduler.sequence import Sequence
    from stoker.scheduler.slots import Slot

GROWTH_CELLS = 64
"""Cells beyond its own that each running sequence should find; fewer where the pool is small."""
MIN_SNAPSHOT = 32
"""Tokens below which computing again is as quick as a snapshot."""

MAX_MOVED_BYTES = 2**29
"""Cells to be moved together at a time; copying them takes host memory and some milliseconds per 10 MB."""


class Room:
    """Slots, cells and snapshots of one model."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.slots = SlotTable(limits.num_slots, limits.num_sequences)
        self.cells = CellPool(limits.num_cells)
        self.snapshot_bytes = 0

    def __repr__(self) -> str:
        return f"<Room {self.slots!r} {self.cells!r} {self.snapshot_bytes} bytes of snapshots>"

    # ------------------------------------------------------------ questions

    def fits(self, sequence: Sequence, placement: Placement) -> bool:
        """Whether it fits beside those who run, with room to grow for each, once nothing else is kept."""
        running = self.slots.running
        if not running:
            return True
        idle = [slot for slot in self.slots.slots if slot.sequence is None]
        kept = sum(self.cells.exclusive(slot.id) for slot in idle)
        promised = self.cells.used - kept + sum(s.num_pending for s in running)
        shared = placement.length if self.slots[placement.source].sequence is not None else 0
        growth = sum(map(self._growth, (*running, sequence)))
        return promised + len(sequence.tokens) - shared + growth <= self.cells.total

    def _growth(self, sequence: Sequence) -> int:
        """Cells it should find beyond the tokens it has, lest those who come back park each other in turn."""
        most = max(1, min(GROWTH_CELLS, self.cells.total // (4 * self.limits.num_slots)))
        wanted = sequence.num_wanted
        return most if wanted is None else min(most, max(1, wanted - sequence.num_generated))

    def placement(self, sequence: Sequence) -> Placement | None:
        """Where it would go: home, to its snapshot's cells, or where the most of its tokens are."""
        if sequence.home is not None:
            return Placement(sequence.home, sequence.home, sequence.num_computed)
        reuse = self._reuse(sequence)
        shares_nothing = sequence.wants_prompt_logits or sequence.form is ParkForm.SNAPSHOT
        return self.slots.place(sequence.tokens[:1] if shares_nothing else sequence.tokens, reuse)

    def _reuse(self, sequence: Sequence) -> Reuse:
        limits = self.limits
        return Reuse(limits.can_trim, limits.can_fork, MIN_REUSE if sequence.leader is None else 1)

    # ------------------------------------------------------------ coming and going

    def seat(self, sequence: Sequence, placement: Placement, effects: list[Effect], now: float) -> str:
        """Give it the slot, with what is kept of it or shared with it; returns what happened in words."""
        slot = self.slots[placement.slot]
        form = sequence.form
        if form is ParkForm.CELLS:
            told = f"{sequence.num_computed} tokens still in their cells"
        elif form is ParkForm.SNAPSHOT:
            self._drop_kept(slot, effects)
            self.cells.extend(slot.id, sequence.num_computed)
            effects.append(Import(slot.id, sequence))
            told = f"{sequence.num_computed} tokens from their snapshot"
        else:
            self._share(slot, placement, effects)
            sequence.num_computed = placement.length
            told = f"{placement.length} tokens reused"
        self.slots.occupy(slot, sequence, now)
        return f"slot {slot.id}, {told}"

    def _share(self, slot: Slot, placement: Placement, effects: list[Effect]) -> None:
        if placement.source == placement.slot:
            self._trim(slot, placement.length, effects)
            return
        self._drop_kept(slot, effects)
        self.cells.fork(placement.source, slot.id, placement.length)
        effects.append(Fork(placement.source, slot.id, placement.length))

    def release(self, sequence: Sequence, now: float) -> None:
        """It ends: what was computed of it stays for reuse until the cells are needed."""
        kept = sequence.tokens[: sequence.num_computed]
        if sequence.slot is not None:
            self.slots.vacate(sequence, kept, now)
        elif sequence.home is not None:
            self.slots.clear(sequence, kept)
        sequence.form = None
        self._forget_snapshot(sequence)

    # ------------------------------------------------------------ making room

    def evict_oldest(self, effects: list[Effect]) -> bool:
        """Drop what the idle slot unused for longest keeps; False: none keeps anything."""
        slot = self.slots.oldest_kept()
        if slot is None:
            return False
        self._drop_kept(slot, effects)
        return True

    def demote(self, guest: Sequence, effects: list[Effect], best: ParkForm = ParkForm.SNAPSHOT) -> None:
        """Free a guest's cells: into a snapshot if it is worth one and the budget has room, else for good."""
        size = self.limits.cell_bytes * guest.num_computed
        is_worth_it = best is ParkForm.SNAPSHOT and guest.num_computed >= MIN_SNAPSHOT and size > 0
        slot = self.slots.clear(guest, [])
        if Import(slot.id, guest) in effects:  # given this place in the same turn; others may share it by now
            guest.form = ParkForm.SNAPSHOT
            effects.append(Export(slot.id, guest))
        elif is_worth_it and self.snapshot_bytes + size <= self.limits.park_bytes:
            guest.form, guest.snapshot_bytes = ParkForm.SNAPSHOT, size
            self.snapshot_bytes += size
            effects.append(Export(slot.id, guest))
        else:
            guest.form, guest.num_computed = ParkForm.TOKENS, 0
        self.cells.drop(slot.id)
        effects.append(Drop(slot.id))

    def movable(self) -> list[int]:
        """Sequences whose cells may be moved together: those that share none, unless they are very many."""
        alone = [slot.id for slot in self.slots.slots if self._is_alone(slot.id)]
        size = self.limits.cell_bytes * sum(map(self.cells.length, alone))
        return alone if size <= MAX_MOVED_BYTES else []

    def _is_alone(self, seq: int) -> bool:
        length = self.cells.length(seq)
        return length > 0 and self.cells.exclusive(seq) == length

    # ------------------------------------------------------------ snapshots

    def exported(self, sequence: Sequence, data: bytes) -> None:
        """The answer to an Export."""
        if sequence.form is not ParkForm.SNAPSHOT and sequence.slot is None:
            return  # its state was lost before, in the same turn
        sequence.snapshot = data
        self.snapshot_bytes += len(data) - sequence.snapshot_bytes
        sequence.snapshot_bytes = len(data)

    def imported(self, sequence: Sequence) -> None:
        """The answer to an Import: the backend has it, the snapshot is not needed any more."""
        self._forget_snapshot(sequence)

    def lost(self, sequence: Sequence) -> None:
        """Its Export or Import failed: it goes on from its tokens."""
        self._forget_snapshot(sequence)
        sequence.num_computed = 0
        if sequence.slot is None:
            sequence.form = ParkForm.TOKENS
        else:
            self.cells.drop(sequence.slot)

    def _forget_snapshot(self, sequence: Sequence) -> None:
        self.snapshot_bytes -= sequence.snapshot_bytes
        sequence.snapshot, sequence.snapshot_bytes = None, 0

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        """Assert that slots, cells and snapshots tell one story."""
        self.cells.check()
        for slot in self.slots.slots:
            assert self.cells.length(slot.id) == len(slot.tokens), f"slot {slot.id} and its cells differ"
            assert slot.sequence is None or slot.sequence.slot == slot.id, f"{slot!r}"
            assert slot.guest is None or slot.guest.home == slot.id, f"{slot!r}"
            assert slot.sequence is None or slot.guest is None, f"{slot!r} is busy and a home"
        assert self.snapshot_bytes >= 0, repr(self)

    def _drop_kept(self, slot: Slot, effects: list[Effect]) -> None:
        if slot.kept:
            slot.kept = []
            self.cells.drop(slot.id)
            effects.append(Drop(slot.id))

    def _trim(self, slot: Slot, length: int, effects: list[Effect]) -> None:
        if length == 0:
            self._drop_kept(slot, effects)
        elif length < len(slot.kept):
            slot.kept = slot.kept[:length]
            self.cells.trim(slot.id, length)
            effects.append(Trim(slot.id, length))
