"""Admits, parks and retires the sequences of one loaded model.

Pure and synchronous: time is an argument, what has to happen to the backend leaves as effects, in order.
Owns the line, the slots and the count of cells; the step's contents are the planner's, the draw is decode's.

A pool that runs out of cells costs nobody an answer (SPEC Q12): idle slots give up what they keep, then
the youngest running sequence (background first) is parked with its tokens and comes back when there is room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.request import FinishReason, Priority
from stoker.scheduler.cells import CellPool
from stoker.scheduler.plan import Planner, StepPlan
from stoker.scheduler.queue import WaitingLine
from stoker.scheduler.sequence import Sequence, SequenceState
from stoker.scheduler.slots import MIN_REUSE, Placement, Reuse, Slot, SlotTable

REST_SURPLUS_CELLS = 512
"""Cells that idle slots may keep besides the newest: attention walks over them, 7 % of a step each 1,000."""
BUSY_SURPLUS_CELLS = 2048
"""The same while others run, since freeing cells under them costs exactness (docs/adr/0006)."""
RESUME_MARGIN = 64
"""Cells beyond its own tokens that a parked sequence waits for, lest two park each other in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the loaded model and the settings allow."""

    num_slots: int
    num_sequences: int = 0
    num_cells: int
    n_batch: int
    max_queue: int = 512
    max_prompt_rows: int = 64
    can_trim: bool = True
    can_fork: bool = True


@dataclass(frozen=True, slots=True)
class Fork:
    """Backend: the empty sequence `dst` shares the first `length` tokens of `src`."""

    src: int
    dst: int
    length: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Backend: keep the first `length` tokens of `seq`."""

    seq: int
    length: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Backend: forget `seq`."""

    seq: int


Effect = Fork | Trim | Drop


@dataclass(slots=True)
class Schedule:
    """What one call of `schedule` decided; effects are to be run in order before the step."""

    effects: list[Effect] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    parked: list[Sequence] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Who runs, who waits, what is kept."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.line = WaitingLine(limits.max_queue)
        self.slots = SlotTable(limits.num_slots, limits.num_sequences)
        self.cells = CellPool(limits.num_cells)
        self.planner = Planner(limits.n_batch, limits.max_prompt_rows)
        self.num_parked_total = 0
        self.num_retired_total = 0
        self._service_s = 1.0

    def __repr__(self) -> str:
        return f"<Scheduler {self.line!r} {self.slots!r} {self.cells!r}>"

    # ------------------------------------------------------------ questions

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return len(self.line) > 0 or len(self.slots.running) > 0

    def waiting(self) -> list[Sequence]:
        """Sequences in the line, next first, parked ones included."""
        return list(self.line)

    def parked(self) -> list[Sequence]:
        """Sequences that ran and wait to run on."""
        return [s for s in self.line if s.state is SequenceState.PARKED]

    def num_waiting_requests(self) -> int:
        """Requests of which a choice waits."""
        return len({s.key.request_id for s in self.line if s.state is SequenceState.QUEUED})

    def retry_after_s(self) -> float:
        """When a refused caller may find room: the measured time a retirement takes."""
        return max(1.0, self._service_s)

    def stats(self) -> dict[str, float]:
        """Every counter, for status pages and bug reports."""
        running = self.slots.running
        return {
            "num_waiting": len(self.line),
            "num_parked": len(self.parked()),
            "num_running": len(running),
            "num_prefill": sum(s.state is SequenceState.PREFILL for s in running),
            "num_slots": self.limits.num_slots,
            "cells_total": self.cells.total,
            "cells_used": self.cells.used,
            "num_parked_total": self.num_parked_total,
            "num_retired_total": self.num_retired_total,
        }

    # ------------------------------------------------------------ commands

    def check_room(self, priority: Priority, num_arriving: int) -> None:
        """Raises QueueFullError when the line is at its bound (SPEC Q11); `num_arriving` are on their way."""
        num_idle = self.limits.num_slots - len(self.slots.running)
        num_waiting = self.num_waiting_requests() + num_arriving - num_idle
        self.line.check_room(priority, num_waiting, self.retry_after_s())

    def enqueue(self, sequence: Sequence, now: float) -> int:
        """Put a new sequence in the line; returns its position."""
        sequence.story.append((now, "queued: arrived"))
        return self.line.push(sequence)

    def retire(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence wherever it is. Its slot becomes idle and keeps the computed tokens for reuse."""
        if sequence.slot is None:
            self.line.remove(sequence)
        else:
            self.slots.vacate(sequence, sequence.tokens[: sequence.num_computed], now)
            self._service_s += 0.2 * ((now - sequence.arrival_s) / self.limits.num_slots - self._service_s)
        sequence.finish_reason = reason
        sequence.move(SequenceState.DONE, now, reason)
        self.num_retired_total += 1

    def schedule(self, now: float) -> Schedule:
        """Let go who is past its deadline, make room for the next step, give free slots to the line."""
        turn = Schedule()
        self._expire(turn, now)
        if self.cells.free < self.limits.n_batch:
            self._make_room(turn, now)
        if self.line:
            allowed = BUSY_SURPLUS_CELLS if self.slots.running else REST_SURPLUS_CELLS
            while self.slots.surplus_cells() > allowed:
                self._evict_oldest(turn)
            self._admit(turn, now)
            self._make_room(turn, now)
        return turn

    def plan(self) -> StepPlan | None:
        """The next step; `schedule` has made sure that there are cells for it."""
        return self.planner.plan(self.slots.running)

    def relieve(self, now: float) -> Schedule:
        """The backend found no room where the count saw some: free one thing more, if there is one."""
        turn = Schedule()
        if not self._evict_oldest(turn):
            self._park_youngest(turn, now)
        return turn

    def computed(self, plan: StepPlan, now: float) -> None:
        """The step of `plan` succeeded: its tokens are in the backend."""
        for part in plan.parts:
            sequence, count = part.sequence, len(part.item.tokens)
            self.cells.extend(part.item.seq, count)
            sequence.num_computed += count
            if sequence.state is SequenceState.PREFILL and sequence.num_pending == 0:
                sequence.move(SequenceState.DECODE, now, "prompt computed")

    def check(self) -> None:
        """Assert the invariants: slots, line and cells tell one story."""
        self.cells.check()
        running = self.slots.running
        assert len({s.key for s in (*self.line, *running)}) == len(self.line) + len(running), "held twice"
        for slot in self.slots.slots:
            assert self.cells.length(slot.id) == len(slot.tokens), f"slot {slot.id} and its cells differ"
            assert slot.sequence is None or (
                slot.sequence.slot == slot.id
                and slot.sequence.state in (SequenceState.PREFILL, SequenceState.DECODE)
            ), f"slot {slot.id} and {slot.sequence!r} differ"
        for sequence in self.line:
            assert sequence.slot is None, f"{sequence!r} waits with a slot"
            assert sequence.state in (SequenceState.QUEUED, SequenceState.PARKED), repr(sequence)

    def _expire(self, turn: Schedule, now: float) -> None:
        for sequence in (*self.line, *self.slots.running):
            if sequence.deadline_s is not None and sequence.deadline_s <= now:
                turn.expired.append(sequence)
        for sequence in turn.expired:
            self.retire(sequence, FinishReason.ERROR, now)

    # ------------------------------------------------------------ room

    def _next_step_cells(self) -> int:
        """Cells the running sequences take in the next step at most."""
        running = self.slots.running
        return min(self.limits.n_batch, sum(s.num_pending for s in running))

    def _make_room(self, turn: Schedule, now: float) -> None:
        while self.cells.free < self._next_step_cells():
            if not self._evict_oldest(turn) and not self._park_youngest(turn, now):
                return

    def _evict_oldest(self, turn: Schedule) -> bool:
        slot = self.slots.oldest_kept()
        if slot is None:
            return False
        self._drop(slot, turn)
        return True

    def _park_youngest(self, turn: Schedule, now: float) -> bool:
        """Park background before interactive, the youngest first, never the last one running."""
        running = self.slots.running
        if len(running) <= 1:
            return False
        victim = max(running, key=lambda s: (s.priority is Priority.BACKGROUND, s.arrival_s, s.key.index))
        self._drop(self.slots.vacate(victim, [], now), turn)
        victim.num_computed = 0
        victim.move(SequenceState.PARKED, now, f"no cells: {self.cells.free} free of {self.cells.total}")
        self.line.push_parked(victim)
        self.num_parked_total += 1
        turn.parked.append(victim)
        return True

    def _drop(self, slot: Slot, turn: Schedule) -> None:
        slot.kept = []
        self.cells.drop(slot.id)
        turn.effects.append(Drop(slot.id))

    # ------------------------------------------------------------ admission

    def _admit(self, turn: Schedule, now: float) -> None:
        for sequence in self.line:
            if not self.slots.has_idle:
                return
            if sequence.is_held:
                continue
            placement = self._placement(sequence)
            if not self._fits(sequence, placement):
                return
            self._place(sequence, placement, turn, now)

    def _fits(self, sequence: Sequence, placement: Placement) -> bool:
        """Whether its tokens fit beside what the running ones hold and still need for theirs."""
        running = self.slots.running
        if not running:
            return True
        evictable = sum(self.cells.exclusive(slot.id) for slot in self.slots.slots if slot.is_idle)
        promised = self.cells.used - evictable + sum(s.num_pending for s in running)
        shared = 0 if self.slots[placement.source].is_idle else placement.length
        margin = RESUME_MARGIN if sequence.state is SequenceState.PARKED else 1
        return promised + len(sequence.tokens) - shared + margin <= self.cells.total

    def _place(self, sequence: Sequence, placement: Placement, turn: Schedule, now: float) -> None:
        slot = self.slots[placement.slot]
        self.line.remove(sequence)
        if placement.source == placement.slot:
            self._trim(slot, placement.length, turn)
        else:
            if slot.kept:
                self._drop(slot, turn)
            self.cells.fork(placement.source, slot.id, placement.length)
            turn.effects.append(Fork(placement.source, slot.id, placement.length))
        self.slots.occupy(slot, sequence, now)
        sequence.num_computed = placement.length
        if sequence.num_cached is None:
            sequence.num_cached = min(placement.length, sequence.num_prompt)
        sequence.move(SequenceState.PREFILL, now, f"slot {slot.id}, {placement.length} tokens reused")
        turn.admitted.append(sequence)

    def _placement(self, sequence: Sequence) -> Placement:
        limits = self.limits
        is_sibling = sequence.leader is not None
        reuse = Reuse(limits.can_trim, limits.can_fork, 1 if is_sibling else MIN_REUSE)
        tokens = sequence.tokens[:1] if sequence.wants_prompt_logits else sequence.tokens
        placement = self.slots.place(tokens, reuse)
        assert placement is not None, f"no idle slot for {sequence!r}"
        return placement

    def _trim(self, slot: Slot, length: int, turn: Schedule) -> None:
        if length == len(slot.kept):
            return
        if length == 0:
            self._drop(slot, turn)
            return
        slot.kept = slot.kept[:length]
        self.cells.trim(slot.id, length)
        turn.effects.append(Trim(slot.id, length))
