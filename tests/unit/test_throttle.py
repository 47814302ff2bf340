"""Who is held back, and what that does to those that run and wait, on the bare scheduler."""

import pytest

from stepping import Machine, alone
from stoker.backends.fake.backend import FakeBackend
from stoker.cache.prefix_cache import CacheLimits
from stoker.ipc.request import Priority
from stoker.kv.sequence import Sequence, SequenceKey, SequenceState
from stoker.scheduler.queue import Throttle

BACKGROUND = {"priority": Priority.BACKGROUND}


@pytest.fixture
def machine():
    """Four slots, four hundred cells."""
    return Machine(FakeBackend(num_cells=400, n_batch=64), CacheLimits(), num_slots=4, n_batch=64)


def sequence(priority):
    """One of that class."""
    return Sequence(key=SequenceKey("r", 0), tokens=[1], num_prompt=1, priority=priority)


def run(machine, *sequences, most=500):
    """Step until those have ended."""
    for _ in range(most):
        if all(s.state is SequenceState.DONE for s in sequences):
            return
        machine.step()
    raise AssertionError(f"not done: {sequences}")


@pytest.mark.parametrize(
    ("throttle", "held"),
    [
        (Throttle(), ""),
        (Throttle(holds_background=True), "b"),
        (Throttle(holds_all=True), "bi"),
        (Throttle(is_lowered=True, keeps_nothing=True), ""),
    ],
)
def test_who_is_held(throttle, held):
    """SPEC M4, M6: as made nobody."""
    assert throttle.holds(sequence(Priority.BACKGROUND)) == ("b" in held)
    assert throttle.holds(sequence(Priority.INTERACTIVE)) == ("i" in held)


def test_half_of_anything_is_at_least_one():
    """SPEC M4: a lowered limit still lets one run."""
    lowered = Throttle(is_lowered=True).lowered
    assert [lowered(number) for number in (1, 2, 3, 8, 2048)] == [1, 1, 1, 4, 1024]
    assert Throttle().lowered(3) == 3


def test_held_background_stands_still_with_its_tokens_and_goes_on(machine):
    """SPEC M4: parked at the next step, in cells where there is room."""
    job = machine.enter_prompt(b"a job", 40, **BACKGROUND)
    talk = machine.enter_prompt(b"a talk", 30)
    for _ in range(5):
        machine.step()
    machine.scheduler.throttle = Throttle(holds_background=True, reason="tested")
    num_tokens = len(job.tokens)
    run(machine, talk)
    assert len(job.tokens) <= num_tokens + 1
    assert job.state is SequenceState.PARKED
    assert not machine.scheduler.has_work, "it would spin"
    assert len(machine.scheduler.queue) > 0
    machine.scheduler.throttle = Throttle()
    assert machine.scheduler.has_work
    run(machine, job)
    assert job.tokens == alone(b"a job", 40)
    assert talk.tokens == alone(b"a talk", 30)


def test_held_background_takes_no_place_from_those_behind_it(machine):
    """SPEC M4, Q2: the line goes on without it, and its patience owes it nothing meanwhile."""
    jobs = [machine.enter_prompt(f"job {n}".encode(), 20, **BACKGROUND) for n in range(6)]
    machine.scheduler.throttle = Throttle(holds_background=True)
    machine.now += 1000
    talks = [machine.enter_prompt(f"talk {n}".encode(), 20) for n in range(6)]
    assert not machine.scheduler.is_owed(machine.now)
    run(machine, *talks)
    assert all(job.num_generated == 0 for job in jobs)
    machine.scheduler.throttle = Throttle()
    run(machine, *jobs)
    for number, job in enumerate(jobs):
        assert job.tokens == alone(f"job {number}".encode(), 20)


def test_everybody_held_nothing_is_planned_and_all_go_on(machine):
    """SPEC M4: interactive too, last."""
    sequences = [machine.enter_prompt(f"talk {n}".encode(), 30) for n in range(6)]
    for _ in range(4):
        machine.step()
    machine.scheduler.throttle = Throttle(holds_all=True)
    assert machine.step() == {}
    assert not machine.scheduler.slots.running
    assert not machine.scheduler.has_work
    late = machine.enter_prompt(b"late", 5)
    assert machine.step() == {}
    machine.scheduler.throttle = Throttle()
    run(machine, *sequences, late)
    for number, talk in enumerate(sequences):
        assert talk.tokens == alone(f"talk {number}".encode(), 30)


def test_lowered_limits_count_for_newcomers_only(machine):
    """SPEC M4: half the slots; those that run stay."""
    first = [machine.enter_prompt(f"first {n}".encode(), 20) for n in range(4)]
    machine.step()
    machine.scheduler.throttle = Throttle(is_lowered=True)
    late = [machine.enter_prompt(f"late {n}".encode(), 20) for n in range(4)]
    most = 0
    for _ in range(100):
        machine.step()
        if all(s.state is SequenceState.DONE for s in first):
            most = max(most, len(machine.scheduler.slots.running))
    assert most == 2
    assert not any(s.num_preemptions for s in first)
    assert all(s.state is SequenceState.DONE for s in late)


def test_under_lowered_limits_interactive_still_takes_the_place_of_background(machine):
    """SPEC M4, Q3."""
    machine.scheduler.throttle = Throttle(is_lowered=True)
    jobs = [machine.enter_prompt(f"job {n}".encode(), 100, **BACKGROUND) for n in range(3)]
    for _ in range(3):
        machine.step()
    talk = machine.enter_prompt(b"talk", 5)
    run(machine, talk, most=10)
    assert sum(job.num_preemptions for job in jobs) == 1
    run(machine, *jobs)
    for number, job in enumerate(jobs):
        assert job.tokens == alone(f"job {number}".encode(), 100)


def test_under_lowered_limits_one_alone_may_have_every_cell(machine):
    """SPEC M4, Q15: nothing else can be served."""
    machine.scheduler.throttle = Throttle(is_lowered=True)
    large = machine.enter_prompt(b"x" * 300, 50)
    other = machine.enter_prompt(b"y" * 300, 50)
    run(machine, large, other)
    assert large.tokens == alone(b"x" * 300, 50)
    assert other.tokens == alone(b"y" * 300, 50)


def test_where_nothing_is_kept_ended_work_leaves_no_cells(machine):
    """SPEC M4: those of running and parked ones stay."""
    machine.scheduler.throttle = Throttle(keeps_nothing=True)
    short = machine.enter_prompt(b"short one", 2)
    long = machine.enter_prompt(b"long one", 60)
    run(machine, short)
    for _ in range(3):
        machine.step()
    assert machine.scheduler.cells.used <= len(long.tokens)
    run(machine, long)
    assert long.tokens == alone(b"long one", 60)
