"""Admits, parks, pauses and retires the sequences of one loaded model.

Pure and synchronous: time is an argument, operations on the backend leave as values, in order. Owns the queue
and who is paused, and decides who gives way to whom. The allocator owns the cells, the planner a step's
contents.

An interactive arrival takes the place of the youngest background sequence at the next step (SPEC Q3). A pool
that runs out of cells ends no request (SPEC Q12): what is only kept goes first, then the youngest running
sequence, background before interactive, is parked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from stoker.cache.prefix_cache import PrefixCache
from stoker.ipc.request import FinishReason, Priority
from stoker.kv.allocator import KVAllocator
from stoker.kv.cells import SchedulerLimits
from stoker.kv.context_shift import note_dropped, num_kept, shifted
from stoker.kv.ops import Parking, Schedule
from stoker.kv.sequence import Hindrance, ParkForm, Sequence, SequenceState
from stoker.kv.slots import SlotPlacement
from stoker.scheduler.cost import StepActivity, StepCost, StepTally
from stoker.scheduler.device_budget import DeviceStepBudget, StreamStepBudget
from stoker.scheduler.eta import EtaEstimator
from stoker.scheduler.plan import Planner, StepBudget, StepPlan
from stoker.scheduler.queue import Aging, PrefixWait, RequestQueue, Throttle
from stoker.scheduler.tiled_budget import TiledStepBudget

STREAM_COPY_S = 0.004
"""What a copy of a device's stream takes, or of a state into one, with the graph that is built anew: measured
on an H100, 1.3 to 5 ms for up to 1,024 tokens."""
NO_SLOT, NO_CELLS = Hindrance("no free slot"), Hindrance("no free cells")
TELL_QUEUE_EVERY_S = 0.25
"""How often it is noted why those wait that stand behind others; of many that is some work."""
MOST_GUESSES = 31
"""Cells that a step after one that is not counted may take beside those of its rows."""
MOST_UNNOTED = 16
"""Steps that are counted together in what estimates are made from."""


class Scheduler:
    """Which sequences run, wait and are kept.

    Attributes:
        planner: what a step computes.
        throttle: which may not run for now; the next `schedule` applies it.
        bursts: when work for images may delay decode rows.
        activity: what steps were like lately.
        tally: what they did since that was asked last.
    """

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache) -> None:
        self.limits = limits
        self.queue = RequestQueue(limits.max_queue)
        self.paused: list[Sequence] = []
        self.throttle = Throttle()
        self.cost = StepCost()
        self.allocator = KVAllocator(limits, cache, self.cost.among_others)
        self.slots, self.cells = self.allocator.slots, self.allocator.cells
        self.prefix_statistics = self.allocator.prefix_source.prefix_statistics
        self._prefix_wait = PrefixWait(self.allocator)
        budget = _budget_of(limits)(
            self.cost, limits.n_batch, limits.policy, limits.target_step_s, limits.max_step_s
        )
        self.eta = EtaEstimator(self.cost, budget, limits.num_slots)
        self.activity = StepActivity()
        self.tally = StepTally()
        self.planner = Planner(budget, limits.max_prompt_rows)
        self.bursts = self.planner.budget.bursts
        self._aging = Aging(limits.background_patience_s)
        self._favoured: Sequence | None = None
        self._is_beyond = False
        self._has_raised = False  # background may count as interactive since the last turn
        self._stepped_s = 0.0  # the last step's end, or when work began
        self._told_queue_s = -TELL_QUEUE_EVERY_S
        self._unnoted: list[tuple[StepPlan, float, float]] = []
        self.num_parked_total = 0
        self.num_retired_total = 0

    def __repr__(self) -> str:
        return f"<Scheduler {self.queue!r} {len(self.paused)} paused {self.allocator!r}>"

    # ------------------------------------------------------------ questions

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something; sequences that wait for the disk hold the first places."""
        for sequence in self.slots.running:
            if not sequence.awaits_image:
                return True
        allowed = (sequence for sequence in self.queue if not self.throttle.holds(sequence))
        return any(
            not (sequence.is_held or self.allocator.prefix_source.is_fetching(sequence))
            for sequence in islice(allowed, self.limits.num_slots)
        )

    @property
    def has_people(self) -> bool:
        """Whether any interactive sequence waits or runs."""
        for sequence in self.slots.running:
            if not sequence.is_background:
                return True
        return any(not sequence.is_background for sequence in self.queue)

    def is_owed(self, now: float) -> bool:
        """Whether a background sequence has waited too long (SPEC Q7)."""
        return any(self._aging.is_owed(s, now) for s in self._allowed())

    def _allowed(self) -> list[Sequence]:
        return [s for s in (*self.queue, *self.slots.running) if not self.throttle.holds(s)]

    def etas_s(self) -> list[float | None]:
        """Estimated seconds until each queued sequence runs, next first (SPEC Q14)."""
        return self.eta.waits_s(self.slots.running, list(self.queue))

    def eta_s(self, position: int) -> float | None:
        """The same for one position; None: no step was measured yet."""
        return self.eta.wait_s(self.slots.running, list(self.queue), position)

    def _all(self) -> tuple[Sequence, ...]:
        return (*self.queue, *self.paused, *self.slots.running)

    def stats(self) -> dict[str, float]:
        """Every counter, for status pages and bug reports."""
        running = self.slots.running
        return {
            "num_waiting": len(self.queue),
            "num_parked": sum(s.state is SequenceState.PARKED for s in self.queue),
            "num_paused": len(self.paused),
            "num_running": len(running),
            "num_prefill": sum(s.state is SequenceState.PREFILL for s in running),
            "num_slots": self.limits.num_slots,
            "cells_total": self.cells.total,
            "cells_used": self.cells.used,
            "num_preemptions_total": self.num_parked_total,
            "num_retired_total": self.num_retired_total,
            "num_owed": sum(s.is_owed for s in (*self.queue, *running)),
            "num_owed_steps_total": self._aging.num_steps_total,
            "num_copies_refused_total": self.allocator.moves.num_refused_total,
            **self.prefix_statistics.stats(),
        }

    # ------------------------------------------------------------ commands

    def check_queue(self, priority: Priority, num_arriving: int) -> None:
        """Raises QueueFullError at the bound of the queue (SPEC Q11); `num_arriving` are on their way."""
        num_idle = self.limits.num_slots - len(self.slots.running)
        waiting = {s.key.request_id for s in self.queue if s.state is SequenceState.QUEUED}
        self.queue.check_queue(priority, len(waiting) + num_arriving - num_idle, self.eta.retry_after_s())

    def enqueue(self, sequence: Sequence, now: float) -> int:
        """Put a new sequence in the queue; returns its position."""
        sequence.tell(now, "queued: arrived")
        sequence.last_step_s = now
        self.note_steps()
        self.eta.people = self.activity.people_to_come(now)
        self.allocator.prefix_source.begin_checkpoints(sequence)
        return self.queue.push(sequence)

    def retire(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence in any state. What was computed of it is kept for reuse while there is room."""
        if sequence.state is SequenceState.PAUSED:
            self.paused.remove(sequence)
        elif sequence.slot is None:
            self.queue.remove(sequence)
        else:
            self.eta.note_end(sequence, reason, now)
        self.take_back(sequence)
        self.allocator.release(sequence, now)
        sequence.finish_reason = reason
        sequence.move(SequenceState.DONE, now, reason)
        self.num_retired_total += 1

    def pause(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of its slot or the queue until `resume` (SPEC Q17); its cells stay for now."""
        if sequence.slot is not None:
            self.allocator.park(sequence, now)
        else:
            self.queue.remove(sequence)
            if sequence.form is not ParkForm.SNAPSHOT:
                self.allocator.prefix_source.release(sequence)  # what it waited for from disk
        sequence.move(SequenceState.PAUSED, now, "asked to")
        self.paused.append(sequence)

    def resume(self, sequence: Sequence, now: float) -> int:
        """Put a paused sequence back in the queue by its arrival; returns the position."""
        self.paused.remove(sequence)
        state = SequenceState.QUEUED if sequence.form is None else SequenceState.PARKED
        sequence.move(state, now, "resumed")
        sequence.last_step_s = now
        return self.queue.rejoin(sequence)

    def park(self, sequence: Sequence, form: ParkForm, now: float) -> Schedule:
        """Park a running sequence in that form, as tokens where no snapshot can be had."""
        turn = self._begin(now)
        self._park(sequence, "asked to", turn, now)
        if form is not ParkForm.CELLS and sequence.parked_slot is not None:
            self.allocator.demote(sequence, turn.ops, best=form)
        return turn

    # ------------------------------------------------------------ a turn

    def schedule(self, now: float) -> Schedule:
        """Make room for the next step, admit from the queue."""
        turn = self._begin(now)
        self.note_steps()
        if not self.slots.running:
            self._stepped_s = now
        self._has_raised = bool(self.queue)
        if self.limits.is_on_device and self.limits.has_streams:
            self.allocator.expect_copies(self.cost.tokens_at_best(STREAM_COPY_S, self.limits.n_batch))
        self.eta.people = self.activity.people_to_come(now)
        self._prefix_wait.raise_leaders(self.queue)
        self._hold_back(turn, now)
        self._return_favoured(turn, now)
        self._make_room(turn, now)
        if self._favoured is None:
            self._favoured = self._aging.next_owed(self._allowed(), now)
        if self.queue:
            self._admit_queue(turn, now)
            self._make_room(turn, now)
        self.eta.num_places = self._num_places()
        # not before an admitted sequence could use it
        self.allocator.trim(turn, self._free_kept, keeps_nothing=self.throttle.keeps_nothing)
        return turn

    def is_steady(self, now: float, in_flight: StepPlan | None = None) -> bool:
        """Whether what runs goes on as it is, so that `schedule` need not be asked.

        Nothing waits, nobody gives way, there is room, and the backend is to do nothing first.

        Args:
            now: seconds.
            in_flight: a step of decode rows that is not counted as computed: are these what decodes next too?
        """
        running, throttle, allocator = self.slots.running, self.throttle, self.allocator
        if not running or self.queue or self._has_raised or self._favoured is not None:
            return False
        if self.limits.is_on_device:
            allocator.moves.begin(now)
        if allocator.late_ops or throttle.holds_any or throttle.keeps_nothing:
            return False
        if allocator.is_trim_due and (allocator.moves.has_time or not self.limits.has_streams):
            return False  # streams are only stored, and where there is time
        if not self.limits.has_streams and self.cells.free < self._next_step_cells():
            return False
        for sequence in running:
            if sequence.priority is not Priority.INTERACTIVE:
                return False
        return in_flight is None or self._is_of_all(in_flight)

    def _is_of_all(self, plan: StepPlan) -> bool:
        """Whether a step in flight has the row of each sequence that runs, and there is room for the next."""
        num_running = len(self.slots.running)
        has_room = self.limits.has_streams or self.cells.free >= 2 * num_running + MOST_GUESSES
        if not (has_room and num_running == len(plan.parts)):
            return False
        for part in plan.parts:  # noqa: SIM110 - asked each step, without a generator
            if part.sequence.state is not SequenceState.DECODE:
                return False
        return True

    def _num_places(self) -> int:
        """Sequences that run at once: fewer than slots where the next one finds no room beside them."""
        is_fetching = self.allocator.prefix_source.is_fetching
        has_no_room = any(
            not (s.is_held or s.follows or is_fetching(s) or self.throttle.holds(s))
            for s in islice(self.queue, self.limits.num_slots)
        )
        return max(1, len(self.slots.running)) if has_no_room else self.limits.num_slots

    def store_idle(self, now: float) -> Schedule:
        """With nothing to compute: store one prefix that is only in cells, if there is any (SPEC C6)."""
        turn = self._begin(now)
        self.allocator.moves.begin_idle()
        self.allocator.store_kept(turn.ops)
        return turn

    def drop_idle(self, now: float) -> Schedule:
        """Free every cell that no running or waiting sequence needs (SPEC M4)."""
        turn = self._begin(now)
        while self.allocator.evict_oldest(turn.ops):
            pass
        return turn

    def shift(self, sequence: Sequence, n_ctx: int, now: float) -> int:
        """Its context is full: drop its oldest tokens after the first ones (SPEC C12); returns how many."""
        tokens = shifted(sequence.tokens, n_ctx)
        count = len(sequence.tokens) - len(tokens)
        note_dropped(sequence, count, n_ctx)
        self.allocator.shift(sequence, tokens, min(num_kept(n_ctx), sequence.num_computed))
        sequence.move(SequenceState.PREFILL, now, f"context full: {count} tokens dropped")
        return count

    def _begin(self, now: float) -> Schedule:
        return Schedule(ops=self.allocator.begin_turn(now))

    def plan(self, after: StepPlan | None = None) -> StepPlan | None:
        """The next step; `schedule` has made sure that there are cells for it.

        Args:
            after: a step of decode rows that is not counted as computed, whose rows decode again: their
                tokens are drawn.
        """
        if after is not None:
            self._aging.stepped(None)
            return self.planner.again(after)
        favoured = self._favoured if self._favoured and self._favoured.is_running else None
        plan = self.planner.plan(self.slots.running, favoured)
        if plan is not None:
            self._aging.stepped(favoured)
        return plan

    def computed(self, plan: StepPlan, now: float) -> None:
        """The step of `plan` succeeded: its tokens are in the backend."""
        if len(self._unnoted) >= MOST_UNNOTED:
            self.note_steps()
        self._unnoted.append((plan, now - self._stepped_s, now))
        self.planner.computed(now - self._stepped_s)
        self._stepped_s = now
        tally = self.tally
        tally.num_rows += len(plan.parts)
        for part in plan.parts:
            sequence, count = part.sequence, len(part.item.tokens)
            self.cells.extend(part.item.seq, count)
            sequence.last_step_s = now
            if count > 1 or sequence.state is not SequenceState.DECODE:
                sequence.num_ahead = part.num_drafted
                count -= sequence.num_ahead
                self.prefix_statistics.computed(sequence, count)
                if sequence.state is not SequenceState.DECODE:
                    tally.num_rows -= 1
                    tally.num_prompt_tokens += count
            sequence.num_computed += count
            if sequence.checkpoints is not None:
                self.allocator.leave_checkpoint(sequence, now)
            if sequence.num_computed == len(sequence.tokens):
                sequence.owed_since_s = None  # its row is about to become a token
                if sequence.state is SequenceState.PREFILL:
                    sequence.move(SequenceState.DECODE, now, "prompt computed")

    def note_steps(self) -> None:
        """Count the steps that were computed in what estimates are made from; idempotent."""
        unnoted, self._unnoted = self._unnoted, []
        for plan, took_s, now in unnoted:
            self.activity.stepped(plan, took_s, now)
            self.eta.stepped(self.num_rows(plan), took_s)

    def num_rows(self, plan: StepPlan) -> int:
        """Rows that a step takes as long as: those of its tokens, and what it is padded with."""
        if self.limits.tiles is None or plan.is_rows:
            return plan.num_tokens
        return plan.num_tokens + self.limits.tiles.num_missing(plan.batch())

    def take_back(self, sequence: Sequence) -> None:
        """What is left of its draft is not drawn; the backend drops it before the next step."""
        if sequence.num_ahead:
            self.allocator.take_back(sequence)

    def completed(self, sequence: Sequence) -> None:
        """The backend has computed its last token by itself."""
        assert sequence.slot is not None, f"{sequence!r} does not run"
        self.cells.extend(sequence.slot, sequence.num_pending)
        sequence.num_computed += sequence.num_pending

    def free_more(self, now: float) -> Schedule:
        """The backend had no room where the count had: free one thing more, if there is any."""
        turn = self._begin(now)
        self._free_something(turn, now)
        return turn

    def check(self) -> None:
        """Assert that slots, queue, cells and stored states agree."""
        self.allocator.check()
        running, queue = self.slots.running, list(self.queue)
        waiting, everybody = [*queue, *self.paused], self._all()
        assert len({s.key for s in everybody}) == len(everybody), "held twice"
        assert all(s.state in (SequenceState.PREFILL, SequenceState.DECODE) for s in running), running
        assert all(s.state in (SequenceState.QUEUED, SequenceState.PARKED) for s in queue), queue
        assert all(s.state is SequenceState.PAUSED for s in self.paused), self.paused
        for sequence in waiting:
            assert sequence.slot is None, f"{sequence!r} waits with a slot"
            assert (sequence.form is ParkForm.CELLS) == (sequence.parked_slot is not None), repr(sequence)
        assert {id(parked) for parked in self.slots.parked()} <= {id(s) for s in waiting}, (
            "a parked one is gone"
        )
        for sequence in everybody:
            entry = sequence.entry
            assert entry is None or sequence.key in entry.leases, f"{sequence!r} has no lease"
            assert sequence.form is not ParkForm.SNAPSHOT or entry is not None, repr(sequence)

    # ------------------------------------------------------------ giving way

    def _park(
        self, victim: Sequence, why: str, turn: Schedule, now: float, by: Sequence | None = None
    ) -> None:
        """Take a running sequence out of its slot, for another one or none; its cells stay for now."""
        victim.num_preemptions += 1
        self.num_parked_total += 1
        if victim.ends_if_preempted:
            self.retire(victim, FinishReason.PREEMPTED, now)
            turn.preempted.append(victim)
            return
        self._park_in_place(victim, why, turn, now, by)

    def _park_in_place(
        self, sequence: Sequence, why: str, turn: Schedule, now: float, by: Sequence | None = None
    ) -> None:
        other = ""
        if by is not None:
            other = by.key.request_id
            why = f"{why} {other} ({by.priority})"
        self.allocator.park(sequence, now)
        sequence.move(SequenceState.PARKED, now, why, other)
        self.queue.rejoin(sequence)
        turn.parked.append(Parking(sequence, why, other))

    def _return_favoured(self, turn: Schedule, now: float) -> None:
        """Park background that had a step beyond the slots; its cells stay.

        Where these might have to go and no state of it would be kept, it goes on to its token: otherwise each
        of its steps would begin with the first token again, in a pool that stays full.
        """
        favoured = self._favoured
        if favoured is None or not favoured.is_running:
            self._favoured, self._is_beyond = None, False
        elif not favoured.is_owed or self.allocator.prefix_source.can_park(favoured):
            is_too_many = self._is_beyond and len(self.slots.running) > self.limits.num_slots
            self._favoured, self._is_beyond = None, False
            if is_too_many:
                self._park_in_place(favoured, "its step in ten is over", turn, now)

    def _hold_back(self, turn: Schedule, now: float) -> None:
        """Park what may not run for now (SPEC M4, M6)."""
        for sequence in [s for s in self.slots.running if self.throttle.holds(s)]:
            self._park(sequence, self.throttle.reason, turn, now)

    @staticmethod
    def _youngest(running: list[Sequence]) -> Sequence:
        return max(running, key=lambda s: (s.is_background, s.arrival_s, s.key.index))

    # ------------------------------------------------------------ room

    def _make_room(self, turn: Schedule, now: float) -> None:
        while self.cells.free < self._next_step_cells():
            if not self._free_something(turn, now):
                return

    def _next_step_cells(self) -> int:
        """Cells the running sequences take in the next step at most."""
        num_pending = num_beyond = 0
        for sequence in self.slots.running:
            num_pending += len(sequence.tokens) - sequence.num_computed
            num_beyond += sequence.is_to_embed  # its last token, which the backend adds
        return min(self.limits.n_batch, num_pending) + num_beyond

    def _free_something(self, turn: Schedule, now: float) -> bool:
        """Unused cells, then those of waiting sequences, then the youngest running one, never the last."""
        if self._free_kept(turn):
            return True
        running = self.slots.running
        if len(running) <= 1:
            return False
        victim = self._youngest([s for s in running if s is not self._favoured] or running)
        self._park(victim, f"no cells: {self.cells.free} free of {self.cells.total}", turn, now)
        if victim.form is ParkForm.CELLS:
            self.allocator.demote(victim, turn.ops)
        return True

    def _free_kept(self, turn: Schedule) -> bool:
        """Free cells that no running sequence needs; False: there are none."""
        return self.allocator.evict_oldest(turn.ops) or self._demote_last(turn)

    def _demote_last(self, turn: Schedule) -> bool:
        """Demote the parked sequence that runs last: a paused one, else the last of the queue."""
        for sequence in (*self.paused, *reversed(list(self.queue))):
            if sequence.parked_slot is not None:
                self.allocator.demote(sequence, turn.ops)
                return True
        return False

    # ------------------------------------------------------------ admission

    def _admit_queue(self, turn: Schedule, now: float) -> None:
        favoured = self._favoured
        if favoured is not None and not favoured.is_running and not self._prefix_wait.is_awaiting(favoured):
            self._admit_favoured(favoured, turn, now)
        num_ahead = 0  # sequences that wait for a prefix keep their places
        held = Hindrance(self.throttle.reason)
        for sequence in self.queue:
            if self.throttle.holds(sequence):
                _hinder(sequence, held, turn)
            elif not (self._has_place(num_ahead) or self._may_displace(sequence)):
                self._hinder_rest(NO_SLOT, turn, now)
                return
            elif (awaited := self._prefix_wait.awaited(sequence)) is not None:
                num_ahead += 1
                _hinder(sequence, awaited, turn)
            elif placement := self._make_place(sequence, num_ahead, turn, now):
                self._admit(sequence, placement, turn, now)
            else:
                self._hinder_rest(NO_CELLS if self._has_place(num_ahead) else NO_SLOT, turn, now)
                return

    def _hinder_rest(self, hindrance: Hindrance, turn: Schedule, now: float) -> None:
        """What keeps the first of the queue that could run keeps those behind it too."""
        if now - self._told_queue_s < TELL_QUEUE_EVERY_S:
            return
        self._told_queue_s = now
        for sequence in self.queue:
            waits_by_itself = self.throttle.holds(sequence) or sequence.is_held or sequence.follows
            if not waits_by_itself and not self.allocator.prefix_source.is_fetching(sequence):
                _hinder(sequence, hindrance, turn)

    def _may_displace(self, sequence: Sequence) -> bool:
        """Whether background gives way to it (SPEC Q3)."""
        return not sequence.is_background and bool(self._displaceable())

    def _displaceable(self) -> list[Sequence]:
        return [s for s in self.slots.running if s.is_background and s is not self._favoured]

    def _make_place(
        self, sequence: Sequence, num_ahead: int, turn: Schedule, now: float
    ) -> SlotPlacement | None:
        """Where there is a slot and cells for it; interactive makes background give way (SPEC Q3)."""
        while True:
            placement = self._fitting(sequence, turn) if self._has_place(num_ahead) else None
            if placement is not None:
                return placement
            background = self._displaceable()
            if sequence.is_background or not background or not self._has_place(num_ahead - len(background)):
                return None
            self._park(self._youngest(background), "gave its slot to", turn, now, sequence)

    def _fitting(self, sequence: Sequence, turn: Schedule) -> SlotPlacement | None:
        placement = self._placement(sequence, turn)
        if placement is None:
            return None
        most = self.throttle.lowered(self.cells.total)
        return placement if self.allocator.fits(sequence, placement, most) else None

    def _has_place(self, num_ahead: int) -> bool:
        """Whether one more may run; the one that is owed a step takes no place."""
        num_slots = self.throttle.lowered(self.limits.num_slots)
        return len(self.slots.running) - self._is_beyond + num_ahead < num_slots

    def _admit_favoured(self, sequence: Sequence, turn: Schedule, now: float) -> None:
        """Admit it for one step, in a spare sequence if all slots are taken (SPEC Q7).

        Where there are no cells for it, the youngest give way.
        """
        while (placement := self._fitting(sequence, turn)) is None:
            self._park(self._youngest(self.slots.running), "gave its cells to", turn, now, sequence)
        self._admit(sequence, placement, turn, now)
        self._is_beyond = True

    def _placement(self, sequence: Sequence, turn: Schedule) -> SlotPlacement | None:
        """Where it would go; the slot of a parked sequence is cleared for it. None: all are busy."""
        placement = self.allocator.placement(sequence)
        while placement is None and self._demote_last(turn):
            placement = self.allocator.placement(sequence)
        return placement

    def _admit(self, sequence: Sequence, placement: SlotPlacement, turn: Schedule, now: float) -> None:
        self.allocator.prefix_source.lease(sequence, placement.entry)
        num_cells = self.allocator.prefix_source.num_to_import(sequence)
        while self.cells.free < num_cells and self._free_kept(turn):
            pass
        self.queue.remove(sequence)
        told = self.allocator.admit(sequence, placement, turn.ops)
        if sequence.started_s is None:
            sequence.started_s = now
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.prefix_statistics.admitted(sequence)
        sequence.move(SequenceState.PREFILL, now, told)
        turn.admitted.append(sequence)


def _hinder(sequence: Sequence, hindrance: Hindrance, turn: Schedule) -> None:
    """Note why a newcomer waits; one that is parked waits for what it was parked for."""
    if sequence.state is SequenceState.QUEUED and sequence.hindrance != hindrance:
        sequence.hindrance = hindrance
        turn.hindered.append(sequence)


def _budget_of(limits: SchedulerLimits) -> Callable[..., StepBudget]:
    if limits.tiles is not None:
        return partial(TiledStepBudget, tiles=limits.tiles)
    if not limits.is_on_device:
        return StepBudget
    return StreamStepBudget if limits.has_streams else DeviceStepBudget
