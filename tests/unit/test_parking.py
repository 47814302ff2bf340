"""Who gives way to whom, in which form the others are kept, and that background does not starve."""

import itertools

import pytest

from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.backends.fake.history import SEED, tensors_of
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.runners import steps as orders
from stoker.ipc.request import FinishReason, Priority
from stoker.kv.allocator import KVAllocator
from stoker.kv.cells import SchedulerLimits
from stoker.kv.ops import Drop, Export, Fork, Import
from stoker.kv.sequence import ParkForm, Sequence, SequenceKey, SequenceState
from stoker.machine.ledger import Ledger
from stoker.scheduler.scheduler import Scheduler

INTERACTIVE, BACKGROUND = Priority.INTERACTIVE, Priority.BACKGROUND
STATE_BYTES = 100


def scheduler(**limits):
    """Two slots and two spare sequences, 512 cells of ten bytes, room for snapshots."""
    defaults = {
        "num_slots": 2,
        "num_sequences": 4,
        "num_cells": 512,
        "n_batch": 128,
        "cell_bytes": 10,
        "park_bytes": 2**20,
    }
    return Scheduler(SchedulerLimits(**defaults | limits), PrefixCache(CacheLimits(), Ledger()))


def sequence(name, num_tokens=40, priority=BACKGROUND, **fields):
    """A queued sequence whose tokens are its own."""
    tokens = [ord(name[0]) * 1000 + at for at in range(num_tokens)]
    return Sequence(
        key=SequenceKey(name, 0), tokens=tokens, num_prompt=num_tokens, priority=priority, **fields
    )


def person(name, num_tokens=40, **fields):
    """An interactive one."""
    return sequence(name, num_tokens, INTERACTIVE, **fields)


def enter(machine, *sequences, now=0.0):
    """Put them in the line, in this order."""
    for member in sequences:
        member.arrival_s = now
        machine.enqueue(member, now)
        now += 0.001


def step(machine, now=0.0):
    """One turn as the engine does it; exports give STATE_BYTES, draws token 7."""
    turn = machine.schedule(now)
    carry_out(machine, turn)
    plan = machine.plan()
    if plan is not None:
        machine.computed(plan, now)
        for part in plan.parts:
            if part.sequence.num_pending == 0:
                part.sequence.tokens.append(7)
    machine.check()
    return turn


def carry_out(machine, turn):
    """What the resident does about snapshots."""
    for op in turn.ops:
        match op:
            case Export():
                machine.allocator.exported(op.entry, bytes(STATE_BYTES))
            case Import():
                machine.allocator.imported(op.sequence)


def names(sequences):
    """Request ids."""
    return [member.key.request_id for member in sequences]


def test_an_interactive_arrival_takes_the_place_of_the_youngest_background_at_the_next_step():
    """Q3, Q4: its cells stay where they are, nothing is copied."""
    machine = scheduler()
    old, young = sequence("old"), sequence("young")
    enter(machine, old, young)
    step(machine)
    step(machine)
    arrival = person("me")
    enter(machine, arrival, now=1.0)
    turn = step(machine, 1.0)
    assert [parking.sequence for parking in turn.parked] == [young]
    assert turn.admitted == [arrival]
    assert turn.ops == []
    assert young.form is ParkForm.CELLS
    assert young.num_computed == 40
    assert young.num_generated == 1
    machine.retire(arrival, FinishReason.STOP, 2.0)
    turn = step(machine, 2.0)
    assert turn.admitted == [young]
    assert turn.ops == []
    assert young.num_computed == 41


def test_background_gives_way_in_the_middle_of_its_prompt():
    """Q3: at a chunk's boundary, and it goes on from there."""
    machine = scheduler(num_slots=1, num_sequences=2)
    job = sequence("job", 200)
    enter(machine, job)
    step(machine)
    assert 0 < job.num_computed < 200
    computed = job.num_computed
    arrival = person("me")
    enter(machine, arrival, now=1.0)
    step(machine, 1.0)
    assert job.state is SequenceState.PARKED
    assert job.num_computed == computed
    machine.retire(arrival, FinishReason.STOP, 2.0)
    step(machine, 2.0)
    assert job.num_computed > computed


def test_interactive_work_is_not_preempted_by_interactive_arrivals():
    """Q3."""
    machine = scheduler()
    enter(machine, person("a"), person("b"))
    step(machine)
    enter(machine, person("c"), now=1.0)
    turn = step(machine, 1.0)
    assert turn.parked == []
    assert names(machine.queue) == ["c"]


def test_a_request_that_asked_for_it_is_ended_instead_of_parked():
    """Q4: `preempt: "cancel"`."""
    machine = scheduler(num_slots=1)
    job = sequence("job", ends_if_preempted=True)
    enter(machine, job)
    step(machine)
    enter(machine, person("me"), now=1.0)
    turn = step(machine, 1.0)
    assert turn.preempted == [job]
    assert job.finish_reason is FinishReason.PREEMPTED
    assert turn.parked == []
    assert names(machine.slots.running) == ["me"]


def test_room_freed_for_a_parked_one_is_not_taken_by_a_later_arrival_of_its_class():
    """Q5."""
    machine = scheduler(num_slots=1)
    job, visitor = sequence("job"), person("me")
    enter(machine, job)
    step(machine)
    enter(machine, visitor, now=1.0)
    step(machine, 1.0)
    enter(machine, sequence("later"), now=2.0)
    machine.retire(visitor, FinishReason.STOP, 3.0)
    assert step(machine, 3.0).admitted == [job]


def test_cells_that_are_needed_move_to_a_snapshot_and_come_back():
    """Q4: the second form, where host memory has room."""
    machine = scheduler(num_slots=1, num_cells=128, n_batch=128)
    job, visitor = sequence("job", 60), person("me", 100)
    enter(machine, job)
    step(machine)
    enter(machine, visitor, now=1.0)
    turn = step(machine, 1.0)
    assert turn.ops == [Export(0, job.entry, job), Drop(0)]
    entry = job.entry
    assert (job.form, job.entry.size_bytes) == (ParkForm.SNAPSHOT, STATE_BYTES)
    assert machine.allocator.cache.parked_bytes == STATE_BYTES
    machine.retire(visitor, FinishReason.STOP, 2.0)
    turn = step(machine, 2.0)
    assert turn.ops[-1] == Import(job.slot, entry, job, 60)
    assert job.num_computed == 61
    assert machine.allocator.cache.parked_bytes == 0


@pytest.mark.parametrize(
    "limits", [{"park_bytes": 599}, {"cell_bytes": 0}], ids=["over the budget", "no export"]
)
def test_tokens_are_kept_where_no_snapshot_can_be(limits):
    """Q4: the third form; the sequence is computed again."""
    machine = scheduler(num_slots=1, num_cells=128, n_batch=128, **limits)
    job, visitor = sequence("job", 60), person("me", 100)
    enter(machine, job)
    step(machine)
    enter(machine, visitor, now=1.0)
    assert step(machine, 1.0).ops == [Drop(0)]
    assert (job.form, job.num_computed) == (ParkForm.TOKENS, 0)
    machine.retire(visitor, FinishReason.STOP, 2.0)
    step(machine, 2.0)
    assert job.num_computed == 61


def test_cells_move_out_of_the_way_of_those_who_run_before_anybody_is_parked():
    """Q4, Q12: the one that will run last gives its cells first."""
    machine = scheduler(num_slots=2, num_cells=200, n_batch=200)
    jobs = [sequence("first", 50), sequence("last", 50)]
    enter(machine, *jobs)
    step(machine)
    step(machine)
    enter(machine, person("a", 40), person("b", 65), now=1.0)
    step(machine, 1.0)
    assert [job.form for job in jobs] == [ParkForm.CELLS, ParkForm.SNAPSHOT]


def test_many_parked_cells_are_moved_before_attention_over_them_costs_much():
    """Q4: by cost, not only by room."""
    machine = scheduler(num_slots=2, num_sequences=8, num_cells=16_000, n_batch=8000)
    jobs = [sequence("first", 700), sequence("last", 700)]
    enter(machine, *jobs)
    for _ in range(30):
        step(machine)
    enter(machine, person("a"), person("b"), now=1.0)
    step(machine, 1.0)
    enter(machine, person("c"), now=2.0)
    step(machine, 2.0)
    assert [job.form for job in jobs] == [ParkForm.CELLS, ParkForm.SNAPSHOT]


def test_a_place_that_is_given_and_taken_within_one_turn_leaves_the_snapshot_whole():
    """Q4: its state is not put back, and it is counted once."""
    limits = scheduler().limits
    allocator = KVAllocator(limits, PrefixCache(CacheLimits(), Ledger()))
    job, ops = sequence("job", 60), []
    allocator.admit(job, allocator.placement(job), ops)
    allocator.cells.extend(job.slot, 60)
    job.num_computed = 60
    allocator.slots.park(job, 0.0)
    allocator.demote(job, ops)
    allocator.exported(job.entry, bytes(STATE_BYTES))
    coming = []
    allocator.admit(job, allocator.placement(job), coming)
    assert coming == [Import(0, job.entry, job, 60)]
    allocator.slots.park(job, 1.0)
    allocator.demote(job, coming)
    assert coming == []
    assert (job.form, job.entry.size_bytes, allocator.cells.used) == (ParkForm.SNAPSHOT, STATE_BYTES, 0)
    assert allocator.cache.parked_bytes == STATE_BYTES
    allocator.check()


class Place:
    """One place of a recurrent model, and a job that begins from a state given to it and is parked.

    Exports and imports fail as long as `has_memory` is False.
    """

    def __init__(self):
        self.has_memory = True
        self.backend = FakeBackend(num_sequences=1, num_cells=128, faults=FakeFaults(recurrent=True))
        self._guard("export_state")
        self._guard("import_state")
        limits = {"num_slots": 1, "num_sequences": 1, "can_trim": False, "can_fork": False}
        self.allocator = scheduler(**limits).allocator
        self.given = tensors_of(12345)
        self.job = sequence("job", 60, initial_state=self.given)
        self.job.tokens = [97] * 60
        self.ops = []
        self.admit()
        self.carry_out()
        self.backend.launch(BatchPlan((PlanItem(0, 0, self.job.tokens, 0),))).rows()
        self.allocator.cells.extend(0, 60)
        self.job.num_computed = 60
        self.allocator.slots.park(self.job, 0.0)

    def _guard(self, name):
        real = getattr(self.backend, name)

        def guarded(*args):
            if not self.has_memory:
                raise MemoryError
            return real(*args)

        setattr(self.backend, name, guarded)

    def admit(self):
        """The job has the place again."""
        self.allocator.admit(self.job, self.allocator.placement(self.job), self.ops)

    def demote(self):
        """Its cells go."""
        self.allocator.demote(self.job, self.ops)

    def carry_out(self):
        """The turn ends: room and backend tell one story."""
        orders.carry_out(self.ops, self.backend, self.allocator)
        self.ops = []
        self.allocator.check()
        self.backend.check()
        assert self.backend.num_cells_used == self.allocator.cells.used


def test_one_parked_in_the_turn_its_state_should_have_come_back_keeps_no_place():
    """Q4, K5: it goes on from its tokens later, and nothing of it is left where it would have been."""
    place = Place()
    place.demote()
    place.carry_out()
    assert place.job.form is ParkForm.SNAPSHOT
    place.admit()
    place.allocator.slots.park(place.job, 1.0)
    place.has_memory = False
    place.carry_out()
    job = place.job
    assert (job.form, job.parked_slot, job.entry, job.num_computed) == (ParkForm.TOKENS, None, None, 0)
    assert not job.is_importing
    assert place.backend.read_state(0) == tensors_of(SEED)
    place.admit()
    place.carry_out()
    assert place.backend.read_state(0) == place.given


def test_one_that_lost_its_state_on_the_way_begins_from_what_it_was_given():
    """Q4, K5: also where the state is to go and come back within one turn and cannot be had."""
    place = Place()
    place.demote()
    place.admit()
    place.has_memory = False
    place.carry_out()
    assert (place.job.slot, place.job.num_computed) == (0, 0)
    assert place.backend.read_state(0) == place.given


def test_a_lost_snapshot_costs_time_and_no_token():
    """Q4."""
    machine = scheduler(num_slots=1, num_cells=128, n_batch=128)
    job, visitor = sequence("job", 60), person("me", 100)
    enter(machine, job)
    step(machine)
    enter(machine, visitor, now=1.0)
    step(machine, 1.0)
    machine.retire(visitor, FinishReason.STOP, 2.0)
    machine.schedule(2.0)
    machine.allocator.lost(job)  # the backend refused it
    machine.check()
    tokens = list(job.tokens)
    machine.computed(machine.plan(), 2.0)
    assert job.tokens == tokens
    assert job.num_computed == 61


@pytest.mark.parametrize("state", ["queued", "running", "parked"])
def test_a_paused_request_is_out_of_everybodys_way_and_comes_back_to_its_place(state):
    """Q17."""
    machine = scheduler(num_slots=1)
    first, second = sequence("first"), sequence("second")
    enter(machine, first, second)
    step(machine)
    paused = second if state == "queued" else first
    if state == "parked":
        enter(machine, person("me"), now=1.0)
        step(machine, 1.0)
    machine.pause(paused, 2.0)
    machine.check()
    assert paused not in machine.queue
    assert paused not in machine.slots.running
    enter(machine, sequence("third"), now=3.0)
    machine.resume(paused, 4.0)
    waiting = names(machine.queue)
    assert waiting.index(paused.key.request_id) < waiting.index("third")
    for at in range(5, 9):
        step(machine, float(at))
    machine.check()


def test_a_paused_request_can_be_ended():
    """Q6, Q17: by its deadline, which the engine's table of requests watches, or by a cancel."""
    machine = scheduler()
    late, cancelled = person("late"), person("cancelled")
    enter(machine, late, cancelled)
    step(machine)
    machine.pause(late, 1.0)
    machine.pause(cancelled, 1.0)
    assert not machine.has_work
    machine.retire(cancelled, FinishReason.CANCELLED, 2.0)
    machine.retire(late, FinishReason.ERROR, 9.0)
    assert late.state is cancelled.state is SequenceState.DONE
    assert list(machine.paused) == []
    machine.check()


def endless(machine, now, num_people=3):
    """Interactive requests at any time, some waiting: somebody always wants the slots."""
    people = [s for s in (*machine.slots.running, *machine.queue) if not s.is_background]
    for number in range(num_people - len(people)):
        enter(machine, person(f"p{now}{number}", 8), now=now)
    for running in list(machine.slots.running):
        if not running.is_background and running.num_generated >= 5:
            machine.retire(running, FinishReason.LENGTH, now)


@pytest.mark.parametrize("num_spare", [0, 2])
def test_background_gets_its_first_token_within_its_patience_and_twenty_steps(num_spare):
    """Q7: also where no sequence is to spare, and it goes on and on."""
    machine = scheduler(num_sequences=2 + num_spare, background_patience_s=3.0)
    endless(machine, 0.0)
    step(machine, 0.0)
    job = sequence("job", 100)
    enter(machine, job, now=0.01)
    steps_over, token_times = 0, []
    for at in range(1, 2500):
        now = at / 100
        endless(machine, now)
        step(machine, now)
        steps_over += now > 3.01 and not job.num_generated
        if job.num_generated > len(token_times):
            token_times.append(now)
    assert steps_over <= 20
    assert len(token_times) >= 5
    assert all(later - former < 3.5 for former, later in itertools.pairwise(token_times))


def test_one_step_in_ten_is_for_background_that_waited_and_not_more():
    """Q7: ten jobs that waited do not take the machine over."""
    machine = scheduler(num_sequences=16, num_cells=4000, background_patience_s=1.0)
    endless(machine, 0.0)
    step(machine, 0.0)
    enter(machine, *(sequence(f"{name}job", 30) for name in "abcdefghij"), now=0.01)
    shares = []
    for at in range(1, 400):
        now = 1.0 + at / 100
        endless(machine, now)
        turn = machine.schedule(now)
        carry_out(machine, turn)
        plan = machine.plan()
        machine.computed(plan, now)
        shares.append(any(part.sequence.is_background for part in plan.parts))
        for part in plan.parts:
            if part.sequence.num_pending == 0:
                part.sequence.tokens.append(7)
    assert 0.05 <= sum(shares) / len(shares) <= 0.11


def test_completions_that_share_a_prompt_are_parked_and_resumed_as_one_would_be():
    """Q16, Q4."""
    machine = scheduler(num_slots=2, num_sequences=6)
    leader = sequence("n", 60)
    follower = sequence("n", 60, leader=leader)
    follower.key = SequenceKey("n", 1)
    enter(machine, leader, follower)
    for _ in range(4):
        step(machine)
    assert follower.num_cached >= 59
    visitors = [person("a"), person("b")]
    enter(machine, *visitors, now=1.0)
    turn = step(machine, 1.0)
    assert {parking.sequence.key.index for parking in turn.parked} == {0, 1}
    for visitor in visitors:
        machine.retire(visitor, FinishReason.STOP, 2.0)
    turn = step(machine, 2.0)
    assert len(turn.admitted) == 2
    assert not any(isinstance(op, Fork) for op in turn.ops)


def test_owed_background_that_needs_cells_gets_them_from_the_youngest_for_its_step():
    """Q7: within its patience and twenty steps also where people fill the pool."""
    machine = scheduler(num_cells=400, background_patience_s=1.0)
    enter(machine, person("a", 110), person("b", 110))
    step(machine, 0.0)
    job = sequence("job", 200)
    enter(machine, job, now=0.01)
    steps_over = 0
    for at in range(1, 80):
        now = at * 0.05
        for running in list(machine.slots.running):
            if not running.is_background and running.num_generated >= 60:
                machine.retire(running, FinishReason.LENGTH, now)
                enter(machine, person(f"p{at}", 110), now=now)
        step(machine, now)
        steps_over += now > 1.01 and not job.num_generated
    assert job.num_generated
    assert steps_over <= 20


def test_a_step_in_ten_that_is_over_is_told():
    """Q7, L3: the front must know that it is in no step any more."""
    machine = scheduler(background_patience_s=1.0)
    endless(machine, 0.0, num_people=6)
    step(machine, 0.0)
    job = sequence("job", 20)
    enter(machine, job, now=0.01)
    told = []
    for at in range(1, 200):
        endless(machine, at / 100, num_people=6)
        told += [parking.reason for parking in step(machine, at / 100).parked if parking.sequence is job]
    assert "its step in ten is over" in told
    assert job.num_preemptions == 0


def test_what_paused_requests_hold_is_bounded_like_what_idle_slots_keep():
    """Q17, adr/0006."""
    machine = scheduler(num_slots=4, num_sequences=8, num_cells=8000, n_batch=4000)
    jobs = [sequence(name, 700) for name in ("first", "second", "third")]
    enter(machine, *jobs)
    for _ in range(40):
        step(machine)
    for job in jobs:
        machine.pause(job, 1.0)
    enter(machine, person("me"), now=2.0)
    step(machine, 2.0)
    step(machine, 2.1)
    assert machine.allocator.num_surplus() <= 1024
    assert {job.form for job in jobs} == {ParkForm.CELLS, ParkForm.SNAPSHOT}
