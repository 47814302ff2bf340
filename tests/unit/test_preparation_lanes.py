"""Lanes of work: order among jobs that are quick, and no place for a slow one to hold the others up."""

import threading
import weakref
from threading import Event

import pytest

from stoker.engine.jobs.preparations import STACK_BYTES, Lane

LONG_S = 600.0


@pytest.fixture
def lane_of():
    """Lanes, closed at the end; what is held in them is let go first."""
    lanes, gates = [], []

    def make(*args):
        lanes.append(Lane("test", *args))
        return lanes[-1]

    make.gate = lambda: gates.append(Event()) or gates[-1]
    yield make
    for gate in gates:
        gate.set()
    for lane in lanes:
        lane.close(60.0)


def test_jobs_of_one_place_are_done_one_after_the_other_in_the_order_they_came(lane_of):
    """SPEC Q2."""
    lane, gate, told = lane_of(1, 3, LONG_S), lane_of.gate(), []
    lane.submit(lambda: (gate.wait(), told.append(0)))
    jobs = [lane.submit(lambda number=number: told.append(number)) for number in range(1, 50)]
    assert not any(job.running() or job.done() for job in jobs)
    gate.set()
    jobs[-1].result()
    assert told == list(range(50))


def test_a_job_over_its_patience_holds_nobody_up(lane_of):
    """SPEC Q2: one slow text delays its own request only."""
    lane, gate = lane_of(1, 3, 0.0), lane_of.gate()
    slow = lane.submit(gate.wait)
    assert lane.submit(lambda: "done").result(timeout=60) == "done"
    assert not slow.done()
    gate.set()
    assert slow.result(timeout=60)


def test_so_many_may_be_slow_and_then_the_next_wait(lane_of):
    """What is abandoned is bounded."""
    lane, gate = lane_of(1, 2, 0.0), lane_of.gate()
    has_begun = [Event() for _ in range(3)]
    slow = [lane.submit(lambda begun=begun: (begun.set(), gate.wait())) for begun in has_begun]
    assert all(begun.wait(60) for begun in has_begun)
    waits = lane.submit(lambda: "done")
    assert lane.is_jammed(float("inf"))
    assert not lane.is_jammed(0.0)
    assert not waits.running()
    assert waits.cancel()
    gate.set()
    assert all(job.result(timeout=60) for job in slow)
    assert lane.submit(lambda: "done").result(timeout=60) == "done"
    assert not waits.running()


def test_several_places_are_used_at_once(lane_of):
    """A second long text needs not wait for the first."""
    lane, gate = lane_of(2, 0, LONG_S), lane_of.gate()
    first = lane.submit(gate.wait)
    assert lane.submit(lambda: "done").result(timeout=60) == "done"
    assert not first.done()


def test_an_error_is_the_jobs_own(lane_of):
    """The next one is done by the same thread."""
    lane = lane_of(1, 0, LONG_S)
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 / 0).result(timeout=60)
    assert lane.submit(threading.current_thread).result(timeout=60).name == "stoker-test-0"


def test_a_closed_lane_drops_what_waits_and_does_not_wait_for_ever_for_what_runs(lane_of):
    """SPEC L4."""
    lane, gate, begun = lane_of(1, 0, LONG_S), lane_of.gate(), Event()
    runs = lane.submit(lambda: (begun.set(), gate.wait()))
    waits = lane.submit(gate.wait)
    assert begun.wait(60)
    lane.close(0.0)
    assert waits.cancelled()
    assert not runs.done()


def test_its_threads_have_a_stack_of_their_own_size_and_no_other_threads_have(lane_of, monkeypatch):
    """What native code recurses for a long word."""
    usual, sizes, start = threading.stack_size(), [], threading.Thread.start

    def noting(thread):
        sizes.append(threading.stack_size())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noting)
    lane_of(1, 0, LONG_S).submit(int).result(timeout=60)
    assert sizes == [STACK_BYTES]
    assert threading.stack_size() == usual != STACK_BYTES


def test_a_job_that_is_withdrawn_before_it_begins_is_let_go_at_once(lane_of):
    """What it holds may be large, and no place may become free for long."""
    lane, gate, begun = lane_of(1, 0, LONG_S), lane_of.gate(), Event()
    runs = lane.submit(lambda: (begun.set(), gate.wait()))
    held = Event()
    told = weakref.ref(held)
    waits = lane.submit(held.set)
    del held
    assert begun.wait(60)
    assert (lane.withdraw(waits), lane.withdraw(runs)) == (True, False)
    assert told() is None


def test_where_no_further_thread_can_be_started_the_others_go_on(lane_of, monkeypatch):
    """A lane without any raises, and takes jobs later."""
    lane, gate = lane_of(2, 0, LONG_S), lane_of.gate()
    start = threading.Thread.start

    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="start new thread"):
        lane.submit(gate.wait)
    monkeypatch.setattr(threading.Thread, "start", start)
    lane.submit(gate.wait)
    monkeypatch.setattr(threading.Thread, "start", refused)
    second = lane.submit(lambda: "done")
    gate.set()
    assert second.result(timeout=60) == "done"
