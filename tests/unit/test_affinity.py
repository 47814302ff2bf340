"""Binding this process's threads to cores, and taking it back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from stoker.engine.threads import controller as affinity
from stoker.engine.threads.controller import ThreadBinder, _spread, _ThreadUse

needs_linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds threads")


@pytest.fixture
def worker() -> Iterator[int]:
    """A thread that computes a little and then waits; its native id."""
    is_over, has_begun = threading.Event(), threading.Event()

    def work() -> None:
        sum(range(2_000_000))
        has_begun.set()
        is_over.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert has_begun.wait(30)
    assert thread.native_id is not None
    yield thread.native_id
    is_over.set()
    thread.join(30)


@pytest.fixture
def binder() -> Iterator[ThreadBinder]:
    """One that leaves the test's process as it was."""
    binder = ThreadBinder()
    yield binder
    binder.unbind()


@needs_linux
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores")
def test_two_threads_get_a_core_each_and_give_it_back(binder: ThreadBinder, worker: int) -> None:
    """SPEC M7: this thread and the one that computed most since the note, never both on one core."""
    usable = os.sched_getaffinity(0)
    binder._threads = {
        thread: use for thread, use in affinity._thread_uses().items() if thread != worker
    }  # as if all but the worker had rested since the note
    assert binder.rebind(2)
    mine, its = os.sched_getaffinity(0), os.sched_getaffinity(worker)
    assert (len(mine), len(its)) == (1, 1)
    assert mine != its
    assert binder.is_bound
    binder.unbind()
    assert os.sched_getaffinity(0) == os.sched_getaffinity(worker) == usable
    assert not binder.is_bound


@needs_linux
def test_what_cannot_be_bound_is_left_alone(binder: ThreadBinder) -> None:
    """SPEC M7: one thread, more threads than cores."""
    assert not binder.rebind(1)
    assert not binder.rebind(10_000)
    assert not binder.is_bound


@needs_linux
def test_threads_bound_by_somebody_else_are_left_alone(
    binder: ThreadBinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC M7: OMP_PROC_BIND, taskset and the like are the user's word."""
    binder.note()
    monkeypatch.setattr(affinity, "_affinity", lambda thread: {0})
    binder._usable = {0, 1}
    assert not binder.rebind(2)
    assert "bound" not in repr(binder)


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC M7: a system that does not let threads be bound."""
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    binder = ThreadBinder()
    binder.note()
    assert not binder.rebind(2)
    binder.unbind()


def test_threads_stay_where_they_are_if_they_can() -> None:
    """SPEC M7: of two on one core, one moves."""
    uses = {7: _ThreadUse(90, 1), 8: _ThreadUse(80, 1), 9: _ThreadUse(70, 3)}
    assert _spread([7, 8], [0, 1], uses) == {7: 1, 8: 0}
    assert _spread([7, 9], [0, 1], uses) == {7: 1, 9: 0}
    assert _spread([8, 9], [1, 3], uses) == {8: 1, 9: 3}


def test_free_cores_come_before_used_ones_and_siblings_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC M7: two logical cores of one physical core are one core to spinning threads."""
    binder = ThreadBinder()
    binder._usable = {0, 1, 2, 3}
    monkeypatch.setattr(affinity, "_siblings", lambda core: "0-1" if core < 2 else "2-3")
    monkeypatch.setattr(affinity, "_busy_s", lambda: {0: 5.0, 1: 1.0, 2: 0.5, 3: 9.0})
    assert binder._least_used({}) == [2, 1, 0, 3]
