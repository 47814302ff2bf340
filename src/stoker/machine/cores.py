"""The cores that this process may use, and what other processes take of them (SPEC M7).

Owns reading processor times and the number of threads that fit. The thread governor acts on them.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

READ_EVERY_S = 0.25
"""Processor times come in hundredths of a second: over less than this their error is in the tenths."""
SPARE_CORES = 0.35
"""What others may take of a core that a thread still uses: our own client process, small services."""
BESIDE_S = 0.25
"""Step time that tells who runs beside steps, and the latest of it that counts."""

_STAT = Path("/proc/stat")
_ENGINE_MODULE = "stoker.engine"  # what its process is started with
_COUNTED_FROM = 0.5
"""A machine whose processors account for less of the time that passed shows no times of its own."""
_IMPOSSIBLE_CORES = -0.3
"""Others below this mean that the machine's times are not those of the cores we run on."""


def usable_cores() -> frozenset[int]:
    """Numbers of the logical cores that this thread may run on; all, where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def threads_that_fit(max_threads: int, num_cores: int, others_cores: float) -> int:
    """Number of threads that have a core each, or nearly, while others use `others_cores` of `num_cores`."""
    return max(1, min(max_threads, int(num_cores - others_cores + SPARE_CORES)))


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Seconds since some start, summed over the cores that this process may use.

    Attributes:
        total_s: all time, idle or not.
        busy_s: time neither idle nor waiting for a disk, without that of processes with a positive niceness
            unless this process has one too.
        own_s: what this process took.
    """

    total_s: float
    busy_s: float
    own_s: float


def read_core_times(usable: frozenset[int]) -> CoreTimes:
    """Read the times of the cores with these numbers now.

    Raises:
        OSError, psutil.Error: the machine does not report them.
    """
    counts_nice = os.getpriority(os.PRIO_PROCESS, 0) > 0
    total = busy = 0.0
    for number, core in enumerate(psutil.cpu_times(percpu=True)):
        if number not in usable:
            continue
        spent = core.user + core.system + _optional(core, "irq", "softirq", "steal")
        nice = _optional(core, "nice")
        total += spent + nice + core.idle + _optional(core, "iowait")
        busy += spent + (nice if counts_nice else 0.0)
    return CoreTimes(total_s=total, busy_s=busy, own_s=time.process_time())


def _optional(core: object, *names: str) -> float:
    """Sum of times that only some systems report."""
    return sum(getattr(core, name, 0.0) for name in names)


def num_running() -> int | None:
    """Tasks of the whole machine that run or wait for a core now, this thread one of them; None: not told.

    Linux tells (proc(5), `procs_running` of /proc/stat).
    """
    try:
        _, found, rest = _STAT.read_text(encoding="ascii").partition("\nprocs_running ")
    except OSError:
        return None
    return int(rest.split(maxsplit=1)[0]) if found else None


class CoreWatch:
    """How many cores other processes used lately; for use in the engine's process.

    Args:
        usable: numbers of the cores that count; those this thread may run on if not given.
        read_times: reads the cores' times; another one in tests.
    """

    def __init__(
        self,
        usable: frozenset[int] | None = None,
        read_times: Callable[[frozenset[int]], CoreTimes] = read_core_times,
    ) -> None:
        self._usable = usable or usable_cores()
        self._read_times = read_times
        self.num_cores = len(self._usable)
        self._last: tuple[float, CoreTimes] | None = None
        self._others: float | None = None

    def __repr__(self) -> str:
        return f"<CoreWatch others={self._others} of {self.num_cores} cores>"

    @property
    def read_at_s(self) -> float:
        """When the machine was read last; -inf: never."""
        return self._last[0] if self._last else -math.inf

    def read(self, now_s: float) -> float | None:
        """Cores that others used since the last reading; reads anew at most every READ_EVERY_S.

        After a pause the answer is the mean over the pause.

        Args:
            now_s: seconds on a monotonic clock.

        Returns:
            None before the second reading, and where the machine's times are not usable.
        """
        if self._last is not None and now_s - self._last[0] < READ_EVERY_S:
            return self._others
        try:
            times = self._read_times(self._usable)
        except (OSError, ValueError, psutil.Error):
            self._last = self._others = None
            return None
        if self._last is not None:
            self._others = self._between(now_s - self._last[0], self._last[1], times)
        self._last = now_s, times
        return self._others

    def _between(self, took_s: float, before: CoreTimes, after: CoreTimes) -> float | None:
        if after.total_s - before.total_s < _COUNTED_FROM * took_s * self.num_cores:
            return None
        others = ((after.busy_s - before.busy_s) - (after.own_s - before.own_s)) / took_s
        return None if others < _IMPOSSIBLE_CORES else max(0.0, others)


class Beside:
    """How many cores others used while steps ran; who computes between steps alone takes nothing from them.

    The machine's times tell of a quarter of a second and more, and a step is often shorter: a client that
    works on each answer before it asks again is as busy there as one that is in the way. So it is looked at
    who runs as a step ends, and a look counts as long as its step. A step's own helping threads may still
    spin then, and count as others: it may say too many.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()
        self._wall_s = self._running_s = 0.0

    def __repr__(self) -> str:
        return f"<Beside {self.num_cores} cores in {self._wall_s:.2f} s>"

    @property
    def num_cores(self) -> float | None:
        """Cores that others used beside steps; None: not seen for long enough."""
        return self._running_s / self._wall_s if self._wall_s >= BESIDE_S else None

    def add(self, wall_s: float, num_others: int) -> None:
        """A step of `wall_s` has ended, with so many tasks of others that run."""
        self._looks.append((wall_s, num_others))
        self._wall_s += wall_s
        self._running_s += wall_s * num_others
        while self._wall_s - self._looks[0][0] >= BESIDE_S:
            wall_s, num_others = self._looks.popleft()
            self._wall_s -= wall_s
            self._running_s -= wall_s * num_others

    def clear(self) -> None:
        """What was seen says nothing any more."""
        self._looks.clear()
        self._wall_s = self._running_s = 0.0


@dataclass(frozen=True, slots=True)
class BusyProcess:
    """A process and the cores it uses; its name only, never its arguments."""

    name: str
    pid: int
    num_cores: float


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Use of the cores over a short time.

    `others_cores` is None where the machine does not report it; `busiest` is neither this process nor an
    engine.
    """

    num_cores: int
    others_cores: float | None
    busiest: BusyProcess | None


def look_at_cores(for_s: float = 0.5) -> CoreUse:
    """Measure the use of the cores for `for_s` seconds, without this process and running engines."""
    watch = CoreWatch()
    started_s = time.monotonic()
    watch.read(started_s)
    before = _process_times()
    time.sleep(for_s)
    took_s = time.monotonic() - started_s
    others = watch.read(started_s + took_s)
    used = [
        BusyProcess(who[1], who[0], (spent_s - before[who]) / took_s)
        for who, spent_s in _process_times().items()
        if who in before and spent_s > before[who]
    ]
    engines = [process for process in used if _is_engine(process.pid)]
    if others is not None:
        others = max(0.0, others - sum(engine.num_cores for engine in engines))
    programs = [process for process in used if process not in engines]
    return CoreUse(
        watch.num_cores, others, max(programs, key=lambda process: process.num_cores, default=None)
    )


def _process_times() -> dict[tuple[int, str], float]:
    """Processor seconds of every other readable process, by process id and name."""
    times = {}
    for process in psutil.process_iter(["pid", "name", "cpu_times"]):
        spent = process.info["cpu_times"]
        if spent is not None and process.info["pid"] != os.getpid():
            times[process.info["pid"], process.info["name"] or "?"] = spent.user + spent.system
    return times


def _is_engine(pid: int) -> bool:
    try:
        return _ENGINE_MODULE in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
