"""What other processes take of the cores, from times like those the system shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stoker.machine import cores
from stoker.machine.cores import (
    Beside,
    BusyProcess,
    CoreTimes,
    CoreWatch,
    look_at_cores,
    num_running,
    read_core_times,
    usable_cores,
)

TWO = frozenset({0, 1})


class Times:
    """Processor times as a test sets them."""

    def __init__(self) -> None:
        self.total_s = self.busy_s = self.own_s = 0.0
        self.num_reads = 0
        self.is_broken = False

    def __call__(self, usable: frozenset[int]) -> CoreTimes:
        """The times now."""
        self.num_reads += 1
        if self.is_broken:
            raise OSError("no /proc")
        return CoreTimes(self.total_s, self.busy_s, self.own_s)

    def move(self, total_s: float, busy_s: float, own_s: float) -> None:
        """Time passes."""
        self.total_s += total_s
        self.busy_s += busy_s
        self.own_s += own_s


def test_others_are_what_is_busy_less_our_own() -> None:
    """SPEC M7: cores used by processes other than this one."""
    times = Times()
    watch = CoreWatch(TWO, times)
    assert watch.num_cores == 2
    assert watch.read(10.0) is None
    times.move(total_s=1.0, busy_s=0.9, own_s=0.5)
    assert watch.read(10.5) == pytest.approx(0.8)
    assert "0.8" in repr(watch)


def test_the_machine_is_read_four_times_a_second_at_most() -> None:
    """SPEC M7: cheap enough to ask at each step."""
    times = Times()
    watch = CoreWatch(TWO, times)
    for at in range(100):
        watch.read(at / 100)
    assert times.num_reads == 4


def test_times_that_do_not_pass_mean_nothing() -> None:
    """SPEC M7: some containers show a machine whose times stand still."""
    times = Times()
    watch = CoreWatch(TWO, times)
    watch.read(1.0)
    times.move(total_s=0.1, busy_s=0.0, own_s=0.0)
    assert watch.read(2.0) is None


def test_times_of_another_machine_mean_nothing() -> None:
    """SPEC M7: we cannot have computed more than the cores we see were busy."""
    times = Times()
    watch = CoreWatch(TWO, times)
    watch.read(1.0)
    times.move(total_s=2.0, busy_s=0.1, own_s=1.9)
    assert watch.read(2.0) is None
    times.move(total_s=2.0, busy_s=1.95, own_s=2.0)  # rounding
    assert watch.read(3.0) == 0.0


def test_a_machine_without_times_says_nothing() -> None:
    """SPEC M7: and is asked again."""
    times = Times()
    watch = CoreWatch(TWO, times)
    watch.read(1.0)
    times.is_broken = True
    assert watch.read(2.0) is None
    times.is_broken = False
    assert watch.read(3.0) is None
    times.move(total_s=2.0, busy_s=1.0, own_s=0.0)
    assert watch.read(4.0) == 1.0


def core(**spent: float) -> Any:
    """A core's times, as Linux shows them."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    return SimpleNamespace(**(dict.fromkeys(names, 0.0) | spent))


def test_only_our_cores_count_and_nice_processes_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC M7: what gives way is no reason to; what a hypervisor takes is."""
    cores = [core(user=3.0, nice=5.0, idle=1.0), core(system=1.0, steal=1.0, iowait=2.0), core(user=100.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: cores)
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    times = read_core_times(TWO)
    assert (times.total_s, times.busy_s) == (13.0, 5.0)
    monkeypatch.setattr(os, "getpriority", lambda *_: 5)
    assert read_core_times(TWO).busy_s == 10.0


def test_a_system_that_tells_less_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC M7: macOS shows user, nice, system and idle."""
    monkeypatch.setattr(
        psutil, "cpu_times", lambda percpu: [SimpleNamespace(user=1.0, nice=0.0, system=1.0, idle=2.0)]
    )
    assert read_core_times(frozenset({0})).total_s == 4.0


def test_this_machine_can_be_read() -> None:
    """SPEC M7: the real times, once."""
    usable = usable_cores()
    times = read_core_times(usable)
    assert 0 < len(usable) <= (os.cpu_count() or 1)
    assert times.total_s > times.busy_s > 0 < times.own_s


def test_a_look_finds_the_busiest_program() -> None:
    """SPEC M7, doctor: its name and share; this process and engines do not count."""
    spinning = "import sys\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spinning], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            use = look_at_cores(0.3)
        finally:
            process.kill()
    assert use.num_cores == len(usable_cores())
    assert isinstance(use.busiest, BusyProcess)
    assert use.busiest.num_cores > 0


def test_a_running_engine_is_not_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC M7, doctor: a server at work is no reason to stop it."""
    monkeypatch.setattr("stoker.machine.cores._is_engine", lambda pid: True)
    assert look_at_cores(0.05).busiest is None


def test_it_is_told_how_many_tasks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC M7: this thread is one of them; where no such file is, or it says nothing of it, none are told."""
    if sys.platform == "linux":
        assert (num_running() or 0) >= 1
    told, silent = tmp_path / "told", tmp_path / "silent"
    told.write_text("cpu  1 2 3\nprocesses 9\nprocs_running 7\nprocs_blocked 0\n", encoding="ascii")
    silent.write_text("cpu  1 2 3\n", encoding="ascii")
    found = []
    for file in (told, silent, tmp_path / "none"):
        monkeypatch.setattr(cores, "_STAT", file)
        found.append(num_running())
    assert found == [7, None, None]


def test_it_takes_some_time_of_steps_to_tell() -> None:
    """SPEC M7: a single look may meet who only passes an answer on."""
    beside = Beside()
    beside.add(0.2, 0)
    assert beside.num_cores is None
    beside.add(0.1, 0)
    assert beside.num_cores == 0.0


def test_a_look_counts_as_long_as_its_step_and_the_latest_count() -> None:
    """SPEC M7: who takes an answer runs at the end of a short step, and is not beside the long one."""
    beside = Beside()
    beside.add(0.9, 0)
    beside.add(0.1, 1)
    assert beside.num_cores == pytest.approx(0.1)
    for _ in range(5):
        beside.add(0.1, 1)
    assert beside.num_cores == pytest.approx(1.0)


def test_what_was_seen_is_dropped() -> None:
    """SPEC M7."""
    beside = Beside()
    beside.add(1.0, 1)
    beside.clear()
    assert beside.num_cores is None
    beside.add(0.5, 0)
    assert beside.num_cores == 0.0
