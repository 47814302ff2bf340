"""Where sequences and their tokens' states are, and how cells are freed.

Owns the slots and the count of cells, and says what is kept: of a parked sequence its cells while no other
needs them, else a snapshot while there is a budget for it, else its tokens (SPEC Q4); of one that has ended
its cells, then a snapshot (SPEC C6, C7). The scheduler decides which sequence gives way.

Also owns what moving states off a device may cost a turn (SPEC C16). A state is copied while nothing is
computed, so a copy delays all who run. A turn spends at most the target of a step on copies; an idle one,
where only an arrival would wait, as much as a step of background alone. What takes longer, or saves little
against computing its tokens again, is not copied. Backends say what a copy costs, and 0 where it costs next
to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stoker.cache.entry import MIN_TOKENS, Entry, EntryState, Hit, Snapshot
from stoker.cache.prefix_cache import PrefixCache
from stoker.ipc.usage import CacheSource
from stoker.kv.cells import CellPool, SchedulerLimits
from stoker.kv.ops import Begin, Drop, Export, Fork, Import, KVOp, Schedule, Trim
from stoker.kv.prefix_source import MIN_GAIN, ComputeTime, PrefixSource, unknown
from stoker.kv.sequence import ParkForm, Sequence
from stoker.kv.slots import Slot, SlotPlacement, SlotTable

GROWTH_CELLS = 64
"""Cells beyond its own that each running sequence should find; fewer where the pool is small."""
IDLE_CELLS = 512
"""Cells that may be held for no running sequence: attention walks over them, 7 % of a step each 1,000."""
BUSY_CELLS = 1024
"""The same while others run or wait in their cells: those left are moved together then (docs/adr/0019)."""
STORABLE_CELLS = 256
"""The same of what has ended and can be stored: it comes back quicker than attention walks over it."""

IDLE_TARGETS = 4
"""Targets of a step that a turn may spend on copies where nobody runs or waits."""
BUSY_SHARE = 0.03
"""Part of the time that copies may take where somebody does."""
LEAST_SHARE = 0.02
"""Part of a target that has to be saved up before anything is looked at, and that it costs where nothing will
come of it: such turns take longer too."""
MOST_DECIDED = 8
"""Idle slots of which one turn decides whether they are worth storing, 0.2 ms each for a thousand tokens."""
LEAST_GAIN = 2.0
"""Times as long as its copy that computing a state's tokens has to take: it is to be put back too."""


class MoveBudget:
    """Time for copies of states in one turn.

    Args:
        target_s: seconds that a turn may spend at most, of what was saved up.
        compute_s: what computing tokens takes among others.
    """

    def __init__(self, target_s: float, compute_s: ComputeTime = unknown) -> None:
        self._target_s = target_s
        self._compute_s = compute_s
        self._saved_s = self._left_s = self._wanted_s = 0.0
        self._at_s, self._forbidden_s, self._copied_s = math.inf, -math.inf, -math.inf
        self.num_refused_total = 0

    def __repr__(self) -> str:
        return f"<MoveBudget {self._left_s * 1000:.1f} ms left, {self.num_refused_total} refused>"

    def begin(self, now: float) -> None:
        """A turn begins that may spend what was saved up while there were turns.

        Right after copies it is what was saved up since: savings do not become a copy in each of many turns.
        """
        passed_s = min(max(0.0, now - self._at_s), self._target_s)  # a crowd that comes at last does not wait
        self._saved_s = min(self._target_s, self._saved_s + BUSY_SHARE * passed_s)
        has_begun = now - self._forbidden_s < self._target_s and self._saved_s < self._target_s
        self._copied_s = min(self._copied_s, now)
        since_s = BUSY_SHARE * (now - self._copied_s)
        self._left_s, self._at_s = 0.0 if has_begun else min(self._saved_s, since_s), now

    def begin_idle(self) -> None:
        """A turn begins that only an arrival would wait for."""
        self._left_s = IDLE_TARGETS * self._target_s

    def forbid(self) -> None:
        """The turn makes no copy that takes time; nor do those of a target after it, but of full savings."""
        self._left_s, self._forbidden_s = 0.0, self._at_s

    @property
    def has_time(self) -> bool:
        """Whether a copy may be made now, as long as the last one for which there was no time."""
        return self._left_s >= max(self._wanted_s, LEAST_SHARE * self._target_s)

    def is_worth(self, cost_s: float, num_tokens: int) -> bool:
        """Whether a copy of a state of so many tokens saves time, and there may ever be so much."""
        compute_s = self._compute_s(num_tokens)
        saves = compute_s is None or LEAST_GAIN * cost_s <= compute_s
        if not (saves and cost_s <= IDLE_TARGETS * self._target_s):
            self._refused(LEAST_SHARE)
            return False
        return True

    def _refused(self, share: float) -> None:
        price_s = share * self._target_s
        self._saved_s, self._left_s = max(0.0, self._saved_s - price_s), max(0.0, self._left_s - price_s)
        self.num_refused_total += 1

    def take(self, cost_s: float) -> bool:
        """Whether there is time for a copy now, which is spent then."""
        if cost_s > self._left_s:
            self._wanted_s = min(cost_s, self._target_s)
            self._refused(LEAST_SHARE if cost_s > self._target_s else 0.0)  # made when nobody runs
            return False
        self._left_s -= cost_s
        self._saved_s = max(0.0, self._saved_s - cost_s)
        if cost_s > 0.0:
            self._copied_s = self._at_s
        self._wanted_s = 0.0
        return True


@dataclass(slots=True)
class _Demand:
    """What admissions of one turn are measured against, kept up from one to the next.

    Attributes:
        num_kept: cells that only idle slots hold, those of parked sequences among them.
        num_wanted: cells that running sequences still take, with what each should find to grow.
    """

    num_kept: int
    num_wanted: int


class KVAllocator:
    """Slots, cells and stored states of one model.

    Args:
        compute_s: seconds that computing so many tokens takes.

    Attributes:
        moves: what copies of states may cost the turn; whoever carries out its operations asks.
        is_trim_due: cells were left behind since `trim` last looked at them.
        late_ops: what became due since the last turn; `take_late_ops` takes it.
    """

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache, compute_s: ComputeTime = unknown) -> None:
        self.limits = limits
        self.moves = MoveBudget(limits.target_step_s, compute_s)
        self.cache = cache
        self.prefix_source = PrefixSource(limits, cache)
        self.prefix_source.compute_s = compute_s
        self.cells = CellPool(limits.num_cells)
        self.slots = SlotTable(limits, self.cells)
        self.late_ops: list[KVOp] = []
        self._demand: _Demand | None = None
        self.is_trim_due = False

    def __repr__(self) -> str:
        return f"<KVAllocator {self.slots!r} {self.cells!r} {self.prefix_source!r}>"

    def expect_copies(self, num_tokens: int) -> None:
        """Tokens that are computed in the time of a copy: who has fewer in common with others shares none."""
        self.slots.least_copied = max(MIN_TOKENS, num_tokens)
        self.prefix_source.least_gain = max(MIN_GAIN, num_tokens)

    # ------------------------------------------------------------ questions

    def fits(self, sequence: Sequence, placement: SlotPlacement, num_cells: int) -> bool:
        """Whether it fits within so many cells beside the running ones, each with cells to grow.

        What is only kept is not counted; one alone always fits.
        """
        if not self.slots.running:
            return True
        if self._demand is None:
            self._demand = self._demand_now()
        promised = self.cells.used - self._demand.num_kept + self._demand.num_wanted
        is_shared = placement.entry is None and self.slots[placement.source].sequence is not None
        wanted = len(sequence.tokens) - (placement.length if is_shared else 0)
        return promised + wanted + self._growth(sequence) <= num_cells

    def _demand_now(self) -> _Demand:
        idle = [slot for slot in self.slots.slots if slot.sequence is None and (slot.kept or slot.parked)]
        return _Demand(
            num_kept=sum(self.cells.exclusive(slot.id) for slot in idle),
            num_wanted=sum(s.num_pending + self._growth(s) for s in self.slots.running),
        )

    def _growth(self, sequence: Sequence) -> int:
        """Cells beyond its tokens; with fewer, sequences that come back would park each other in turn."""
        most = max(1, min(GROWTH_CELLS, self.cells.total // (4 * self.limits.num_slots)))
        wanted = sequence.num_wanted
        return most if wanted is None else min(most, max(1, wanted - sequence.num_generated))

    def placement(self, sequence: Sequence) -> SlotPlacement | None:
        """Where it would go: to its cells, its snapshot, or the most of its tokens; None: all are busy."""
        if sequence.parked_slot is not None:
            return SlotPlacement(sequence.parked_slot, sequence.parked_slot, sequence.num_computed)
        if sequence.form is ParkForm.SNAPSHOT:
            vacant = self.slots.vacant()
            return None if vacant is None else SlotPlacement(vacant.id, vacant.id, sequence.num_computed)
        live = self.slots.source(sequence)
        hit = self.stored(sequence, 0 if live is None else live[1])
        if hit is None or not hit.entry.is_in_ram:
            return self.slots.place(live)
        vacant = self.slots.vacant()
        return None if vacant is None else SlotPlacement(vacant.id, vacant.id, hit.num_tokens, hit.entry)

    def at_hand(self, sequence: Sequence) -> tuple[int, Entry | None]:
        """Tokens it would find if it got a slot now, or as soon as they are read, and what is to be read."""
        live = self.slots.source(sequence)
        length = 0 if live is None else live[1]
        hit = self.stored(sequence, length)
        if hit is not None:
            length = hit.num_tokens
        shared = self.prefix_source.find_shared(sequence, length, self._cells_at_hand)
        if shared is not None:
            return shared.num_tokens, shared.entry
        if hit is None:
            return length, None
        return hit.num_tokens, None if hit.entry.is_in_ram else hit.entry

    def stored(self, sequence: Sequence, num_live: int) -> Hit | None:
        """A stored state that saves it more than cells do, and for which there is room."""
        return self.prefix_source.find(sequence, num_live, self._cells_at_hand)

    def _cells_at_hand(self) -> int:
        """Free cells, and those that idle slots only keep."""
        idle = [slot for slot in self.slots.slots if slot.kept]
        return self.cells.free + sum(self.cells.exclusive(slot.id) for slot in idle)

    # ------------------------------------------------------------ coming and going

    def admit(self, sequence: Sequence, placement: SlotPlacement, ops: list[KVOp]) -> str:
        """Give it the slot, with what is kept of it or shared with it; returns a line for its history."""
        self.moves.forbid()  # it waits for no copy that it can do without
        slot = self.slots[placement.slot]
        if sequence.form is ParkForm.CELLS:
            told = f"{sequence.num_computed} tokens still in their cells"
        elif sequence.form is ParkForm.SNAPSHOT:
            self._bring_back(sequence, slot, placement, ops)
            told = f"{sequence.num_computed} tokens from their snapshot"
        elif placement.entry is not None:
            self._bring_back(sequence, slot, placement, ops)
            told = f"{placement.length} tokens from {sequence.cache_source}"
        else:
            told = self._take_live(sequence, slot, placement, ops)
        if self._demand is not None:
            if slot.kept or slot.parked:
                self._demand.num_kept -= self.cells.exclusive(slot.id)
            self._demand.num_wanted += sequence.num_pending + self._growth(sequence)
        self.slots.occupy(slot, sequence, self.prefix_source.now)
        return f"slot {sequence.place}, {told}"

    def _bring_back(self, sequence: Sequence, slot: Slot, placement: SlotPlacement, ops: list[KVOp]) -> None:
        assert sequence.entry is not None, f"{sequence!r} has no state to bring back"
        self._clear(slot, ops)
        self.cells.extend(slot.id, placement.length)
        sequence.num_computed = placement.length
        sequence.is_importing = True
        ops.append(Import(slot.id, sequence.entry, sequence, placement.length))

    def _take_live(self, sequence: Sequence, slot: Slot, placement: SlotPlacement, ops: list[KVOp]) -> str:
        source = self.slots[placement.source]
        if placement.length:
            is_shared = source.sequence is not None
            self.prefix_source.note_source(sequence, CacheSource.SHARED if is_shared else CacheSource.LIVE)
        if source is slot:
            self._cut(slot, placement.length, ops)
        else:
            self._clear(slot, ops)
            if source.sequence is None:
                self._demand = None  # what its slot keeps is not its own any more
            self.cells.fork(source.id, slot.id, placement.length)
            ops.append(Fork(source.id, slot.id, placement.length))
        sequence.num_computed = placement.length
        if placement.length == 0 and sequence.initial_state is not None:
            ops.append(Begin(slot.id, sequence))
        return f"{placement.length} tokens reused"

    def park(self, sequence: Sequence, now: float) -> None:
        """Take a running sequence out of its slot, which keeps its cells for it."""
        self._demand = None
        self.slots.park(sequence, now)
        self.is_trim_due = True

    def release(self, sequence: Sequence, now: float) -> None:
        """It ends: what was computed of it stays for reuse until the cells are needed."""
        self.prefix_source.now, self.is_trim_due, self._demand = now, True, None
        kept = [] if sequence.is_importing else sequence.tokens[: sequence.num_computed]
        if sequence.slot is not None:
            slot = self.slots.vacate(sequence, kept, now)
            if sequence.is_importing:  # it ends in the turn that admitted it: its state does not come
                self.cells.drop(slot.id)
                sequence.is_importing = False
        elif sequence.parked_slot is not None:
            self.slots.clear(sequence, kept)
        sequence.form = None
        self.prefix_source.release(sequence)

    def shift(self, sequence: Sequence, tokens: list[int], num_kept: int) -> None:
        """A running sequence goes on with other tokens, the first `num_kept` as before (SPEC C12)."""
        assert sequence.slot is not None, f"{sequence!r} does not run"
        seq = sequence.slot
        num_kept = num_kept if self.limits.can_trim else 0
        self.cells.trim(seq, num_kept)
        self.late_ops.append(Trim(seq, num_kept) if num_kept else Drop(seq))
        sequence.tokens, sequence.num_computed = tokens, num_kept
        self.prefix_source.begin_checkpoints(sequence)
        if num_kept == 0 and sequence.initial_state is not None:
            self.late_ops.append(Begin(seq, sequence))

    def take_back(self, sequence: Sequence) -> None:
        """Free the cells of a draft that was not drawn."""
        assert sequence.slot is not None, f"{sequence!r} does not run"
        self.cells.trim(sequence.slot, sequence.num_computed)
        self.late_ops.append(Trim(sequence.slot, sequence.num_computed))
        sequence.num_ahead = 0

    def begin_turn(self, now: float) -> list[KVOp]:
        """Set the time; returns what `take_late_ops` does."""
        self.prefix_source.now, self._demand = now, None
        self.moves.begin(now)
        return self.take_late_ops()

    def take_late_ops(self) -> list[KVOp]:
        """Operations that became due since the last turn, to be applied before anything else."""
        late, self.late_ops = self.late_ops, []
        return late

    # ------------------------------------------------------------ making room

    def evict_oldest(self, ops: list[KVOp]) -> bool:
        """Drop what the idle slot unused for longest keeps, stored if worth it; False: none keeps any."""
        slot = self.slots.oldest_kept()
        if slot is None:
            return False
        self._empty(slot, ops)
        return True

    def trim(self, turn: Schedule, free_kept: Callable[[Schedule], bool], *, keeps_nothing: bool) -> None:
        """Free cells of no running sequence beyond what may stay, and what idle slots may not keep.

        Attention walks over every cell up to the last one in use, so what is only kept costs each step
        something. In a turn that admits a sequence only what costs no time goes, the rest a turn later.
        Streams of others cost a step nothing: they keep what they have until they are needed.

        Args:
            turn: takes the operations.
            free_kept: frees cells that no running sequence needs; False: there are none.
            keeps_nothing: all such cells go now.
        """
        if keeps_nothing:
            while self.evict_oldest(turn.ops):
                pass
        elif turn.admitted:
            if not self.limits.has_streams:
                self._drop_copied(turn)
        elif self.limits.has_streams:
            self._store_ahead(turn.ops)
        elif self.is_trim_due:
            self._trim_surplus(turn, free_kept)
        for slot in self.slots.slots:
            owner = slot.last
            if slot.kept and owner and not (owner.shares and self.limits.cache_mode.keeps_cells):
                self._empty(slot, turn.ops)

    def _trim_surplus(self, turn: Schedule, free_kept: Callable[[Schedule], bool]) -> None:
        allowed = BUSY_CELLS if self.slots.has_cells_in_use else IDLE_CELLS
        while self.num_surplus() > allowed and free_kept(turn):
            pass
        while self._num_storable() > STORABLE_CELLS and self.evict_oldest(turn.ops):
            pass
        self.is_trim_due = False

    def _store_ahead(self, ops: list[KVOp]) -> None:
        """Store what one idle slot keeps while no slot is empty: the next to come takes its place.

        Few that turn out not to be worth it share a turn: each costs readers the longer way.
        """
        is_full, num_ops = all(slot.kept for slot in self.slots.slots if slot.is_idle), len(ops)
        for _ in range(MOST_DECIDED if is_full else 0):
            if len(ops) > num_ops or not (self.moves.has_time and self.has_unstored):
                break
            self.store_kept(ops)
        self.is_trim_due = is_full and self.has_unstored

    def _drop_copied(self, turn: Schedule) -> None:
        """Free what idle slots keep and stored states stand for.

        First of all, so that what enters cells in this turn fills the holes; unless an effect of the turn
        reads these cells.
        """
        dropped: list[KVOp] = []
        for slot in self.slots.slots:
            if slot.kept and slot.has_copy:
                self._empty(slot, dropped)
        read = {op.src for op in turn.ops if isinstance(op, Fork)}
        read |= {op.seq for op in turn.ops if isinstance(op, Export)}
        is_needed = any(isinstance(op, Drop) and op.seq in read for op in dropped)
        turn.ops = turn.ops + dropped if is_needed else dropped + turn.ops

    def num_surplus(self) -> int:
        """Cells of no running sequence, but for those kept last."""
        return self.cells.used - self.cells.held(self.slots.in_use())

    def _num_storable(self) -> int:
        """Cells of what has ended, but for the last, where a stored state can stand for them."""
        parked = (slot.id for slot in self.slots.slots if slot.parked is not None)
        num_kept = self.cells.used - self.cells.held([*self.slots.in_use(), *parked])
        return num_kept if self.prefix_source.can_store else 0

    @property
    def has_unstored(self) -> bool:
        """Whether an idle slot keeps tokens of which storing was not decided."""
        return any(slot.kept and not slot.is_store_decided for slot in self.slots.slots)

    def store_kept(self, ops: list[KVOp]) -> None:
        """Store what one idle slot keeps, if it is worth it (SPEC C6)."""
        slot = next((slot for slot in self.slots.slots if slot.kept and not slot.is_store_decided), None)
        if slot is not None:
            self._store(slot, ops)

    def demote(self, parked: Sequence, ops: list[KVOp], best: ParkForm = ParkForm.SNAPSHOT) -> None:
        """Free a parked sequence's cells: into a snapshot if it is worth one and there is a budget for it."""
        self._demand = None
        slot = self.slots.clear(parked, [])
        if parked.is_importing:
            self._call_back(parked, ops)
        else:
            self._snapshot(parked, slot, ops, best)
            ops.append(Drop(slot.id))
        self.cells.drop(slot.id)

    def _call_back(self, parked: Sequence, ops: list[KVOp]) -> None:
        """It got this slot in the same turn and its state is not there yet: drop the import."""
        ops[:] = [e for e in ops if not (isinstance(e, Import) and e.sequence is parked)]
        parked.is_importing = False
        parked.form = ParkForm.SNAPSHOT  # of its own, or of another's tokens, which are its first

    def _snapshot(self, parked: Sequence, slot: Slot, ops: list[KVOp], best: ParkForm) -> None:
        entry = self.prefix_source.park(parked) if best is ParkForm.SNAPSHOT else None
        if entry is None:
            parked.form, parked.num_computed = ParkForm.TOKENS, 0
            return
        parked.form, parked.entry = ParkForm.SNAPSHOT, entry
        if entry.state is EntryState.PENDING:
            ops.append(Export(slot.id, entry, parked))

    # ------------------------------------------------------------ stored states

    def leave_checkpoint(self, sequence: Sequence, now: float) -> None:
        """Store its state before it moves on, where a step has brought it to a checkpoint."""
        self.prefix_source.now = now
        if sequence.slot is not None and (entry := self.prefix_source.checkpoint(sequence)) is not None:
            self.late_ops.append(Export(sequence.slot, entry))

    def _store(self, slot: Slot, ops: list[KVOp]) -> None:
        """Store what an idle slot keeps, if it may and is worth it."""
        assert slot.last is not None, f"{slot!r} keeps tokens without an owner"
        if self.limits.is_on_device and not self.moves.has_time:
            return  # and what is stored stays
        slot.is_store_decided, slot.copy = True, None
        entry = self.prefix_source.store(slot.last, len(slot.kept))
        if entry is not None:
            slot.copy = entry
            ops.append(Export(slot.id, entry))

    # ------------------------------------------------------------ answers

    def exported(self, entry: Entry, data: Snapshot) -> None:
        """The answer to an Export."""
        self.cache.filled(entry, data, self.prefix_source.now)

    def not_exported(self, entry: Entry, sequence: Sequence | None) -> None:
        """An Export failed: the sequence parked on it goes on from its tokens.

        One that was admitted again in the same turn is dealt with by its Import, which is still to come.
        """
        if entry.state is EntryState.PENDING:
            self.cache.failed(entry)
        if sequence is not None and sequence.entry is entry and not sequence.is_importing:
            self.lost(sequence)

    def store_later(self, entry: Entry) -> None:
        """There was no time for its Export: where its slot still keeps it, it is stored another time."""
        for slot in self.slots.slots:
            if slot.copy is entry:
                slot.is_store_decided, slot.copy = False, None

    def imported(self, sequence: Sequence) -> None:
        """The answer to an Import: the backend has it."""
        sequence.is_importing = False
        self.prefix_source.used(sequence)

    def lost(self, sequence: Sequence) -> None:
        """Its state could not be had: it goes on from its tokens."""
        self.prefix_source.lost(sequence)
        sequence.is_importing = False
        sequence.num_computed = 0
        if sequence.slot is not None:
            self.cells.drop(sequence.slot)
            return
        if sequence.parked_slot is not None:  # it was parked in the turn that brought it there
            self.cells.drop(self.slots.clear(sequence, []).id)
        sequence.form = ParkForm.TOKENS

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        """Assert that slots, cells and states agree."""
        self.cells.check()
        self.cache.check()
        for slot in self.slots.slots:
            assert self.cells.length(slot.id) == slot.num_tokens, f"slot {slot.id} and its cells differ"
            assert slot.sequence is None or slot.sequence.slot == slot.id, f"{slot!r}"
            assert slot.parked is None or slot.parked.parked_slot == slot.id, f"{slot!r}"
            assert slot.sequence is None or slot.parked is None, f"{slot!r} is busy and kept for another"
            assert (slot.last is not None) == bool(slot.kept), f"{slot!r} keeps tokens without an owner"

    def _empty(self, slot: Slot, ops: list[KVOp]) -> None:
        """Free what an idle slot keeps, stored first if it is worth it."""
        if slot.kept:
            if slot.is_unstored:
                self._store(slot, ops)
            slot.keep([])
            self._shorten(slot, 0)
            ops.append(Drop(slot.id))

    def _clear(self, slot: Slot, ops: list[KVOp]) -> None:
        """Make an idle slot ready for something new, also where an initial state was left without a token."""
        if slot.kept:
            self._empty(slot, ops)
        elif not self.limits.can_trim:
            ops.append(Drop(slot.id))

    def _cut(self, slot: Slot, length: int, ops: list[KVOp]) -> None:
        """Keep the first tokens of an idle slot; if many more go, or few stay, it is stored first."""
        if length == 0:
            self._clear(slot, ops)
        elif length < len(slot.kept):
            if slot.is_unstored and (length < MIN_TOKENS or len(slot.kept) - length >= MIN_TOKENS):
                self._store(slot, ops)
            slot.keep(slot.kept[:length])
            self._shorten(slot, length)
            ops.append(Trim(slot.id, length))

    def _shorten(self, slot: Slot, length: int) -> None:
        """Give back an idle slot's cells beyond the first ones."""
        num_used, num_cut = self.cells.used, self.cells.length(slot.id) - length
        self.cells.trim(slot.id, length)
        num_freed = num_used - self.cells.used
        if num_freed < num_cut:
            self._demand = None  # they were shared: another slot may have them alone now
        elif self._demand is not None:
            self._demand.num_kept -= num_freed
