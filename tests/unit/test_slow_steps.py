"""Why a step was slow, told once; what the keeper does about it."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path

import pytest

from stoker.engine.threads import slow_steps
from stoker.engine.threads.controller import Clocks, ThreadBinder, ThreadController
from stoker.engine.threads.governor import Decision, StepSample
from stoker.engine.threads.slow_steps import HindranceCounters, Hindrances, SlowReason, SlowSteps, why_slow
from stoker.machine.cores import CoreTimes, CoreWatch


def slow(cpu_s: float = 2.5, at_s: float = 10.0, num_threads: int = 2) -> StepSample:
    """A step of 2.5 s that should have taken 0.03."""
    return StepSample(at_s=at_s, wall_s=2.5, cpu_s=cpu_s, predicted_s=0.03, num_threads=num_threads)


def told(steps: SlowSteps, sample: StepSample, others: float) -> str | None:
    """The line logged for a long step."""
    ended = steps.end(sample, others, sample.at_s)
    return steps.tell(ended) if ended else None


def found(steps: SlowSteps, sample: StepSample) -> SlowReason | None:
    """The reason found for a long step, others being at rest."""
    ended = steps.end(sample, 0.0, sample.at_s)
    return ended.reason if ended else None


@pytest.mark.parametrize(
    ("sample", "met", "others", "expected"),
    [
        (slow(), Hindrances(), 1.0, SlowReason.OTHERS),
        (slow(), Hindrances(), 0.0, SlowReason.SHARED_CORE),
        (slow(), Hindrances(), None, SlowReason.LOST_CORES),
        (slow(cpu_s=0.1, num_threads=1), Hindrances(), 0.0, SlowReason.LOST_CORES),
        (slow(), Hindrances(throttled_s=1.0), 0.0, SlowReason.THROTTLED),
        (slow(), Hindrances(num_faults=500), 0.0, SlowReason.PAGE_FAULTS),
        (slow(), Hindrances(slept_s=60.0), 1.0, SlowReason.SLEPT),
        (slow(cpu_s=5.0), Hindrances(num_faults=500), 0.1, SlowReason.UNKNOWN),
    ],
)
def test_each_reason_has_its_signs(
    sample: StepSample, met: Hindrances, others: float | None, expected: SlowReason
) -> None:
    """SPEC M7: what others used, lost cores, faults, quota, sleep."""
    assert why_slow(sample, met, 2, others) is expected


def test_a_reason_is_told_once_a_minute() -> None:
    """SPEC M7: with the numbers; another reason has its own minute."""
    steps = SlowSteps(2, Hindrances)
    assert told(steps, slow(), 0.0) == (
        "a step took 2.50 s instead of 0.030 s: its threads shared a core while another was free "
        "(2 threads got 1.0 of 2 cores, others use 0.0)"
    )
    assert told(steps, slow(at_s=13.0), 0.0) is None
    assert told(steps, slow(at_s=13.0), 1.0) is not None
    assert told(steps, slow(at_s=71.0), 0.0) is not None


def test_steps_near_their_prediction_are_not_told() -> None:
    """SPEC M7: nor such as nothing was predicted for."""
    steps = SlowSteps(2, Hindrances)
    assert steps.end(StepSample(1.0, 0.2, 0.2, 0.03, 2), 0.0, 1.0) is None
    assert steps.end(StepSample(61.0, 60.0, 0.2, None, 2), 0.0, 61.0) is None


def test_a_short_slow_step_waits_for_what_is_known_after_it() -> None:
    """SPEC M7: the reading at its end may be from before others came."""
    steps = SlowSteps(2, Hindrances)
    short = StepSample(at_s=10.2, wall_s=0.2, cpu_s=0.2, predicted_s=0.01, num_threads=2)
    assert steps.end(short, 0.1, 10.1) is None
    next_one = StepSample(at_s=10.35, wall_s=0.15, cpu_s=0.2, predicted_s=0.01, num_threads=2)
    ended = steps.end(next_one, 0.7, 10.35)
    assert ended is not None
    assert (ended.sample, ended.reason, ended.others_cores) == (short, SlowReason.OTHERS, 0.7)


def test_only_what_was_counted_since_the_step_began_counts() -> None:
    """SPEC M7: page faults of the load are not those of a step minutes later."""
    counted = Hindrances(num_faults=9000)
    steps = SlowSteps(2, lambda: counted)
    steps.begin(5.0)
    assert found(steps, slow()) is SlowReason.SHARED_CORE
    counted = Hindrances(num_faults=9100)
    assert found(steps, slow()) is SlowReason.PAGE_FAULTS
    steps.begin(20.0)
    assert found(steps, slow(at_s=22.5)) is SlowReason.SHARED_CORE


def test_quota_files_of_both_versions_are_read(tmp_path: Path) -> None:
    """SPEC M7: microseconds in version 2, nanoseconds in version 1."""
    (tmp_path / "two").write_text("usage_usec 5\nnr_throttled 3\nthrottled_usec 1500000\n", encoding="ascii")
    (tmp_path / "one").write_text(
        "nr_periods 9\nnr_throttled 3\nthrottled_time 2500000000\n", encoding="ascii"
    )
    assert slow_steps._throttled_s([tmp_path / "two"]) == 1.5
    assert slow_steps._throttled_s([tmp_path / "two", tmp_path / "one"]) == 2.5
    assert slow_steps._throttled_s([tmp_path / "none"]) == 0.0


def test_this_machine_can_be_asked() -> None:
    """SPEC M7: counters only grow."""
    read = HindranceCounters()
    before = read()
    grown = read().since(before)
    assert grown.num_faults >= 0
    assert abs(grown.slept_s) < 1.0


# ---------------------------------------------------------------- the keeper


class Desk:
    """Clocks and a machine of two cores that a test moves by hand."""

    def __init__(self) -> None:
        self.now_s = self.cpu_s = self.busy_s = 0.0
        self.running = [1]  # tasks at each look, from the last on
        self.num_looks = 0
        self.binder = BinderStandIn()
        clocks = Clocks(
            wall=lambda: self.now_s, cpu=lambda: self.cpu_s, sleep=self.pause, num_running=self.look
        )
        times = lambda _: CoreTimes(2 * self.now_s, self.busy_s, self.cpu_s)  # noqa: E731 - of this desk
        self.watch = CoreWatch(frozenset({0, 1}), times)
        self.keeper = ThreadController(2, self.watch, self.binder, clocks)

    def look(self) -> int | None:
        """Tasks that run now."""
        self.num_looks += 1
        return self.running.pop() if len(self.running) > 1 else self.running[0]

    def step(
        self, wall_s: float, cpu_s: float, others: float = 0.0, predicted_s: float = 0.03
    ) -> Decision | None:
        """One step during which others use `others` cores; what it leads to."""
        self.keeper.begin()
        self.pause(wall_s, cpu_s, others)
        return self.keeper.judge(self.keeper.stop(), self.keeper.governor.num_threads, predicted_s)

    def pause(self, wall_s: float, cpu_s: float = 0.0, others: float = 0.0) -> None:
        """Time passes."""
        self.now_s += wall_s
        self.cpu_s += cpu_s
        self.busy_s += cpu_s + others * wall_s


class BinderStandIn(ThreadBinder):
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def note(self) -> None:
        """See `ThreadBinder`."""
        self.calls.append("note")

    def rebind(self, num_threads: int) -> bool:
        """See `ThreadBinder`."""
        self.calls.append(f"rebind {num_threads}")
        self._is_bound = True
        return True

    def unbind(self) -> None:
        """See `ThreadBinder`."""
        if self._is_bound:
            self.calls.append("unbind")
        self._is_bound = False


@pytest.fixture
def desk() -> Desk:
    """A keeper that has seen two quiet steps."""
    desk = Desk()
    for _ in range(2):
        desk.step(0.3, 0.6, predicted_s=0.3)
    return desk


@pytest.mark.parametrize(
    ("watched_s", "running", "num_threads"), [(2.0, 3, 1), (0.5, 3, 2), (2.0, 1, 2)], ids=str
)
def test_the_first_step_follows_who_was_watched_long_enough_and_is_there(
    watched_s: float, running: int, num_threads: int
) -> None:
    """SPEC M7: from the engine's start on; what begins with the engine is no company that stays."""
    desk = Desk()
    desk.running = [running]
    desk.watch.read(desk.now_s)
    desk.pause(watched_s, others=1.5)
    desk.keeper.begin()
    assert desk.keeper.governor.num_threads == num_threads


def test_threads_on_one_core_are_moved_apart(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """SPEC M7: told, bound, released after a while; no thread is given up."""
    assert desk.step(2.5, 2.5) is None
    assert desk.binder.calls == ["rebind 2"]
    assert "shared a core" in caplog.text
    for _ in range(5):
        desk.step(0.3, 0.6)
    assert desk.binder.is_bound
    desk.pause(9.0)
    desk.keeper.begin()
    assert desk.binder.calls == ["rebind 2", "unbind"]


def test_short_steps_on_one_core_are_seen_too(desk: Desk) -> None:
    """SPEC M7: some time of them, with who had computed how much noted at the first."""
    for _ in range(5):
        desk.step(0.12, 0.12)
    assert desk.binder.calls == ["note", "rebind 2"]


def test_bound_threads_are_released_when_others_come(desk: Desk) -> None:
    """SPEC M7: a bound thread could not leave the core that is taken."""
    desk.step(2.5, 2.5)
    desk.step(0.3, 0.4, others=0.7)
    assert desk.binder.calls == ["rebind 2", "unbind"]


def test_a_core_that_others_take_is_left_not_fought_for(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """SPEC M7: fewer threads, none bound."""
    with caplog.at_level(logging.DEBUG):
        decision = desk.step(0.5, 0.65, others=0.7)
    assert decision == Decision(1, "other processes use 0.7 of 2 cores")
    assert desk.binder.calls == []
    assert "other processes took the cores" in caplog.text
    assert "threads from now on: 1 (other processes use 0.7 of 2 cores)" in caplog.text


def test_after_a_pause_the_keeper_takes_free_cores_before_the_step(desk: Desk) -> None:
    """SPEC M7: the prompt that follows a pause runs with all threads."""
    desk.step(0.5, 0.65, others=0.7)
    desk.pause(5.0)
    assert desk.keeper.begin() == Decision(2, "the cores are free again")
    desk.keeper.abandon()
    desk.keeper.close()


def test_a_step_that_failed_says_nothing(desk: Desk) -> None:
    """SPEC M7: its time is not that of a step."""
    desk.keeper.begin()
    desk.pause(5.0)
    desk.keeper.abandon()
    assert desk.keeper.governor.num_threads == 2
    assert "2 of 2 threads" in repr(desk.keeper)


def test_clocks_are_the_systems_unless_told() -> None:
    """SPEC M7: processor time of all threads of this process."""
    clocks = Clocks()
    assert clocks.wall is time.monotonic
    assert clocks.cpu is time.process_time


@pytest.mark.parametrize(
    ("pause_s", "others", "running", "num_threads"),
    [
        (3.0, 1.9, [3], 1),
        (1.2, 1.9, [3], 1),
        (600.0, 1.9, [3], 1),
        (0.5, 1.9, [3], 2),
        (3.0, 0.3, [3], 2),
        (3.0, 1.9, [1], 2),
        (3.0, 1.9, [1, 4, 3], 2),
        (3.0, 1.9, [1, *[3] * 9], 2),
        (3.0, 1.9, [None], 2),
    ],
    ids=[
        "taken",
        "short",
        "long",
        "too short to tell",
        "free",
        "over",
        "passed on",
        "passed on slowly",
        "not told",
    ],
)
def test_the_step_after_a_pause_begins_with_fewer_threads_where_cores_were_taken(
    pause_s: float, others: float, running: list[int | None], num_threads: int
) -> None:
    """SPEC M7: else it would last many times as long, and a person who asks then would wait for its end."""
    desk = Desk()
    desk.running = running
    for _ in range(40):
        assert desk.step(0.03, 0.06) is None
    desk.pause(pause_s, others=others)
    decision = desk.keeper.begin()
    assert (decision.num_threads if decision else 2) == num_threads
    assert desk.keeper.governor.num_threads == num_threads


def test_cores_that_were_taken_in_a_pause_are_taken_back_when_they_are_free() -> None:
    """SPEC M7: what a pause has told may be over; half a second of steps shows it."""
    desk = Desk()
    desk.step(0.03, 0.06)
    desk.running = [3]
    desk.pause(3.0, others=1.9)
    for _ in range(20):
        desk.step(0.06, 0.06)
    assert desk.keeper.governor.num_threads == 2


@pytest.mark.parametrize(
    ("running", "num_threads"),
    [(1, 2), (2, 1), (None, 1)],
    ids=["between steps", "beside them", "not told"],
)
def test_others_that_run_between_steps_alone_take_no_threads(running: int | None, num_threads: int) -> None:
    """SPEC M7: as a client does that works on each answer before it asks again."""
    desk = Desk()
    desk.step(0.5, 1.0)
    assert desk.step(0.5, 0.55, others=0.9) is not None
    desk.running = [running]
    for _ in range(12):
        desk.step(0.06, 0.06 * desk.keeper.governor.num_threads)
        desk.pause(0.06, others=1.9)
    assert desk.keeper.governor.num_threads == num_threads


def test_who_runs_beside_steps_is_asked_while_threads_are_given_up(desk: Desk) -> None:
    """SPEC M7: a look is not free."""
    for _ in range(20):
        desk.step(0.06, 0.12)
    assert desk.num_looks == 0
    desk.step(0.5, 0.55, others=0.9)
    desk.running = [2]
    for _ in range(9):
        desk.step(0.06, 0.06, others=0.9)
    assert desk.num_looks == 8


def test_where_cores_that_seemed_free_beside_steps_are_lost_it_is_doubted_for_longer_and_longer() -> None:
    """SPEC M7: a hypervisor takes its time without a task that runs."""
    desk = Desk()
    desk.step(0.5, 1.0)
    raised = []
    while desk.now_s < 300.0:
        before = desk.keeper.governor.num_threads
        desk.step(0.06, 0.06 if before == 1 else 0.066, others=0.9)
        if desk.keeper.governor.num_threads > before:
            raised.append(desk.now_s)
    assert 3 <= len(raised) <= 4
    apart = [later - earlier for earlier, later in itertools.pairwise(raised)]
    assert apart[0] > 30.0
    assert all(later > 1.9 * earlier for earlier, later in itertools.pairwise(apart))


def test_a_doubt_that_is_long_past_is_as_short_again_as_the_first() -> None:
    """SPEC M7: an engine runs for weeks, and is moved to another machine."""
    desk = Desk()
    desk.step(0.5, 1.0)

    def until_doubted() -> float:
        """Cores that seemed free are lost; how long it is doubted then."""
        desk.running = [1]
        while desk.keeper.governor.num_threads == 1:
            desk.step(0.06, 0.06, others=0.9)
        begun_s = desk.now_s
        while desk.now_s < begun_s + 1.0:
            desk.step(0.06, 0.066 if desk.keeper.governor.num_threads == 2 else 0.06, others=0.9)
        begun_s = desk.now_s
        while desk.keeper.governor.num_threads == 1:
            desk.step(0.06, 0.06, others=0.9)
        return desk.now_s - begun_s

    desk.step(0.5, 0.55, others=0.9)
    first, second = until_doubted(), until_doubted()
    assert second > 1.8 * first
    for _ in range(20):
        desk.step(0.06, 0.12)
    desk.pause(2000.0)
    desk.step(0.06, 0.12)
    desk.step(0.5, 0.55, others=0.9)
    assert until_doubted() == pytest.approx(first, rel=0.2)


def test_what_was_seen_beside_steps_before_a_change_says_nothing_after_it() -> None:
    """SPEC M7: it takes a quarter of a second of steps again."""
    desk = Desk()
    desk.step(0.5, 1.0)
    for _ in range(2):
        desk.step(0.5, 0.55, others=0.9)
        assert desk.keeper.governor.num_threads == 1
        desk.running = [1]
        num = 0
        while desk.keeper.governor.num_threads == 1:
            desk.step(0.06, 0.06)
            desk.pause(0.06, others=1.9)
            num += 1
        assert num >= 6
        for _ in range(30):
            desk.step(0.06, 0.12)


@pytest.mark.parametrize(("running", "num_threads"), [(1, 2), (3, 1)], ids=["gone", "there"])
def test_a_step_that_an_arrival_ended_is_begun_anew_with_the_cores_that_are_free_then(
    running: int, num_threads: int
) -> None:
    """SPEC M7, Q27: who passes several requests on takes a core for longer than a look."""
    desk = Desk()
    desk.step(0.03, 0.06)
    desk.running = [3]
    desk.pause(3.0, others=1.9)
    desk.keeper.begin()
    assert desk.keeper.governor.num_threads == 1
    desk.keeper.abandon()
    desk.pause(0.05)
    desk.running = [running]
    desk.keeper.begin()
    assert desk.keeper.governor.num_threads == num_threads
