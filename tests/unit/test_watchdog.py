"""When an engine counts as hung, whose fault its end was, how long until the next start."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from stoker.client.process.exit import OomCounter, judge
from stoker.client.process.instance import Backoff, Watchdog
from stoker.client.process.lifecycle import EngineState, Lifecycle
from stoker.client.process.transport import ExitReport
from stoker.engine.threads.timer import UNMEASURED_STEP_S, Stopwatch
from stoker.ipc.events import Heartbeat

FINE = Heartbeat(step_s=0.0, step_limit_s=5.0)


def checks(watchdog: Watchdog, start: float, end: float) -> str | None:
    """The first complaint of a check every half second."""
    now = start
    while now <= end:
        if complaint := watchdog.check(now):
            return complaint
        now += 0.5
    return None


def test_silence_over_the_limit_is_a_hang() -> None:
    """L3: with the numbers."""
    watchdog = Watchdog(3.0, now=0.0)
    assert checks(watchdog, 0.5, 3.0) is None
    assert checks(watchdog, 3.5, 3.5) == "no sign of life for 3.5 s (limit 3 s)"


def test_heartbeats_keep_an_idle_engine_alive() -> None:
    """L3: nothing to do is no hang."""
    watchdog = Watchdog(3.0, now=0.0)
    for second in range(1, 60):
        watchdog.beat(FINE, float(second))
        assert watchdog.check(float(second)) is None


def test_a_step_over_its_limit_is_a_hang_though_heartbeats_go_on() -> None:
    """L3: the heartbeat's own thread lives longer than the loop."""
    watchdog = Watchdog(3.0, now=0.0)
    watchdog.beat(Heartbeat(step_s=4.9, step_limit_s=5.0), 0.1)
    assert watchdog.check(0.5) is None
    watchdog.beat(Heartbeat(step_s=5.5, step_limit_s=5.0), 0.9)
    assert watchdog.check(1.0) == "a step is 0.5 s over its limit"


def test_a_step_that_ended_late_is_forgiven() -> None:
    """L3: the next heartbeat tells."""
    watchdog = Watchdog(3.0, now=0.0)
    watchdog.beat(Heartbeat(step_s=5.5, step_limit_s=5.0), 0.4)
    watchdog.beat(FINE, 0.45)
    assert watchdog.check(0.5) is None


def test_a_front_that_stood_still_does_not_blame_the_engine() -> None:
    """L3: a late check starts the grace again; true silence is found after it."""
    watchdog = Watchdog(3.0, now=0.0)
    assert watchdog.check(0.5) is None
    assert watchdog.check(60.0) is None
    assert checks(watchdog, 60.5, 63.0) is None
    assert watchdog.check(63.5) is not None


def test_what_was_heard_before_a_stall_is_not_held_against_a_step() -> None:
    """L3: a heartbeat that stood in the socket all the while says nothing of now; the next one does."""
    watchdog = Watchdog(3.0, now=0.0)
    late = Heartbeat(step_s=5.5, step_limit_s=5.0)
    watchdog.beat(late, 0.4)
    assert watchdog.check(60.0) is None
    assert watchdog.check(60.5) is None
    watchdog.beat(late, 60.9)
    assert watchdog.check(61.0) == "a step is 0.5 s over its limit"


def test_a_tree_that_stood_still_in_a_step_is_not_taken_for_hung() -> None:
    """L3: the engine leaves the time out, and the client forgets what it heard before it."""
    clock = FakeClock(10.0)
    watchdog = Watchdog(3.0, now=0.0)
    clock.begin(1)
    for _ in range(4):
        clock.time_s += 0.5
        watchdog.beat(clock.heartbeat(), clock.time_s)
        assert watchdog.check(clock.time_s) is None
    clock.time_s += 450.0  # SIGSTOP to all, or the lid of a laptop
    assert watchdog.check(clock.time_s) is None
    assert watchdog.stalled_s == pytest.approx(449.5)
    for _ in range(40):
        watchdog.beat(clock.heartbeat(), clock.time_s)
        assert watchdog.check(clock.time_s) is None
        clock.time_s += 0.5
    assert clock.end(1) == pytest.approx(22.5, abs=1.0)


def test_a_step_that_hangs_is_found_after_a_stall_too() -> None:
    """L3: what it takes before and after counts."""
    clock = FakeClock(10.0)
    watchdog = Watchdog(3.0, now=0.0)
    clock.begin(1)
    clock.heartbeat()
    clock.time_s += 450.0
    watchdog.check(clock.time_s)
    found = None
    while found is None:
        clock.time_s += 0.5
        watchdog.beat(clock.heartbeat(), clock.time_s)
        found = watchdog.check(clock.time_s)
    assert found == "a step is 0.5 s over its limit"
    assert clock.time_s == pytest.approx(450.0 + UNMEASURED_STEP_S, abs=1.0)


def test_a_stall_teaches_nothing_of_what_a_token_costs() -> None:
    """L3: though the step ends before the next reading; without readings nothing is known of it."""
    clock = FakeClock(10.0)
    clock.heartbeat()
    clock.begin(1)
    clock.time_s += 45.0
    assert clock.end(1) == pytest.approx(0.5)
    clock.begin(1)
    assert clock.heartbeat().step_limit_s == 10.0
    unread = FakeClock(10.0)
    unread.begin(1)
    unread.time_s += 45.0
    assert unread.end(1) == 45.0


def test_a_stall_that_ended_before_a_step_is_not_its_own() -> None:
    """L3: a step is not excused for longer than it has run."""
    clock = FakeClock(10.0)
    clock.heartbeat()
    clock.time_s += 450.0
    clock.begin(1)
    clock.time_s += 0.1
    assert clock.heartbeat().step_s == 0.0
    clock.time_s += 0.5
    assert clock.heartbeat().step_s == pytest.approx(0.5)


class FakeClock(Stopwatch):
    """A step clock whose time is the test's."""

    time_s = 0.0

    def now(self) -> float:  # type: ignore[override]
        """What the test says."""
        return self.time_s

    def heartbeat(self) -> Heartbeat:
        """As the engine sends it."""
        step_s, limit_s = self.read()
        return Heartbeat(step_s=step_s, step_limit_s=limit_s)


def test_the_delay_doubles_up_to_two_seconds_and_health_ends_it() -> None:
    """L3: from 0.1 s; after ten seconds of service, or a token, the next engine starts at once."""
    backoff = Backoff()
    assert [backoff.after_serving(1.0) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert backoff.after_serving(10.0) == 0
    assert [backoff.after_serving(0.0) for _ in range(2)] == [0.1, 0.2]
    backoff.reset()
    assert backoff.after_serving(0.0) == 0


def kernel(folder: Path, machine: int, cgroup: int) -> OomCounter:
    """Counters as a kernel shows them."""
    (folder / "self").mkdir(exist_ok=True)
    (folder / "self/cgroup").write_text("0::/app\n")
    (folder / "app").mkdir(exist_ok=True)
    (folder / "vmstat").write_text(f"pgfault 7\noom_kill {machine}\n")
    (folder / "app/memory.events").write_text(f"oom 9\noom_kill {cgroup}\n")
    return OomCounter(proc=folder, cgroups=folder)


@pytest.mark.parametrize(
    ("status", "is_blamable"),
    [
        (-signal.SIGSEGV, True),
        (-signal.SIGABRT, True),
        (-signal.SIGILL, True),
        (1, True),
        (0, False),
        (-signal.SIGKILL, False),
        (-signal.SIGTERM, False),
        (-signal.SIGINT, False),
    ],
)
def test_only_a_death_that_the_work_can_cause_is_blamed_on_it(
    tmp_path: Path, status: int, is_blamable
) -> None:
    """L3: a kill -9 from outside is not the fault of the work."""
    assert judge(ExitReport(status), None, kernel(tmp_path, 3, 1)).is_blamable is is_blamable


@pytest.mark.parametrize(("machine", "cgroup"), [(4, 1), (3, 2)])
def test_a_kill_for_want_of_memory_is_blamed_once(tmp_path: Path, machine: int, cgroup: int) -> None:
    """L3: the kernel's counter rose meanwhile, on the machine or in the cgroup."""
    oom = kernel(tmp_path, 3, 1)
    kernel(tmp_path, machine, cgroup)
    assert judge(ExitReport(-signal.SIGKILL), None, oom).is_blamable
    assert not judge(ExitReport(-signal.SIGKILL), None, oom).is_blamable


def test_a_hang_is_blamed_though_it_ends_by_our_own_kill(tmp_path: Path) -> None:
    """L3: with the watchdog's words."""
    death = judge(ExitReport(-signal.SIGKILL), "no sign of life", kernel(tmp_path, 0, 0))
    assert death.is_blamable
    assert death.reason == "killed: no sign of life"


def test_a_machine_without_counters_counts_nothing(tmp_path: Path) -> None:
    """L3: other systems have no procfs."""
    assert not OomCounter(proc=tmp_path / "none", cgroups=tmp_path).has_risen()


def test_an_exit_is_named_after_its_signal() -> None:
    """L3: logs and errors say what happened."""
    assert [str(ExitReport(s)) for s in (-11, 3, -99)] == ["SIGSEGV", "exit status 3", "signal 99"]


def test_an_illegal_move_tells_the_story() -> None:
    """The table is the whole truth."""
    lifecycle = Lifecycle()
    lifecycle.move(EngineState.SERVING, "pid 1")
    lifecycle.move(EngineState.CLOSED, "close")
    with pytest.raises(AssertionError, match=r"closed -> serving .*starting -> serving \(pid 1\)"):
        lifecycle.move(EngineState.SERVING, "late")
