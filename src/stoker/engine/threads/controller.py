"""What surrounds each native step on a CPU: how many threads it uses, and on which cores (SPEC M7).

Measures steps and the machine, and acts on what the thread governor decides and slow steps show: it logs, and
moves threads apart where two share a core while another is free. Only Linux lets a process choose cores for
its threads. They are bound for a short while only: a bound thread cannot leave a core that another process
takes, and threads and processes that it starts inherit its one core.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from stoker.engine.threads.governor import RELAPSE_S, Decision, StepSample, ThreadGovernor
from stoker.engine.threads.slow_steps import HALF_A_CORE, SlowReason, SlowSteps
from stoker.machine.cores import SPARE_CORES, Beside, CoreWatch, num_running

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_TASKS = Path("/proc/self/task")
_CPUS = Path("/sys/devices/system/cpu")
# /proc/PID/task/TID/stat after the name in brackets, proc_pid_stat(5): 14 utime, 15 stime, 39 processor
_UTIME, _STIME, _PROCESSOR = 11, 12, 36


@dataclass(frozen=True, slots=True)
class _ThreadUse:
    ticks: int
    core: int


class ThreadBinder:
    """Gives the busiest threads of this process a core each, and takes that back.

    Used on one thread, which is one of those that compute.
    """

    def __init__(self) -> None:
        self._can_bind = hasattr(os, "sched_setaffinity") and _TASKS.is_dir()
        self._usable = _affinity(0) if self._can_bind else set[int]()
        self._is_bound = False
        self._threads: dict[int, _ThreadUse] = {}
        self._cores: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<ThreadBinder of {sorted(self._usable)}{' bound' if self._is_bound else ''}>"

    @property
    def is_bound(self) -> bool:
        """Whether threads are held on their cores."""
        return self._is_bound

    def note(self) -> None:
        """Remember who computed how much and where, so that `rebind` can tell the time since from all."""
        if self._can_bind:
            self._threads, self._cores = _thread_uses(), _busy_s()

    def rebind(self, num_threads: int) -> bool:
        """Bind the `num_threads` busiest threads, this one among them, to a core each.

        The cores are those that others use least; two threads are never put on one.

        Returns:
            Whether it was done. Not done: a system that cannot, fewer cores or threads than asked for, and
            threads that are bound already.
        """
        self.unbind()
        if not self._can_bind or not 1 < num_threads <= len(self._usable):
            return False
        uses = _thread_uses()
        if any(_affinity(thread) != self._usable for thread in uses):
            return False
        busiest = self._busiest(uses, num_threads)
        cores = self._least_used(uses)[: len(busiest)]
        if len(busiest) < num_threads:
            return False
        self._is_bound = True
        try:
            for thread, core in _spread(busiest, cores, uses).items():
                os.sched_setaffinity(thread, {core})
        except OSError:
            self.unbind()
        return self._is_bound

    def unbind(self) -> None:
        """Let every thread of this process run on every core it may use; idempotent."""
        if not self._is_bound:
            return
        self._is_bound = False
        for thread in _thread_uses():
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(thread, self._usable)

    def _busiest(self, uses: dict[int, _ThreadUse], num_threads: int) -> list[int]:
        own = threading.get_native_id()
        spent = {thread: use.ticks - self._ticks_before(thread) for thread, use in uses.items()}
        others = sorted((t for t in spent if t != own), key=lambda thread: spent[thread], reverse=True)
        return [own, *others[: num_threads - 1]]

    def _least_used(self, uses: dict[int, _ThreadUse]) -> list[int]:
        """Usable cores: a first one of each physical core before its siblings, then by others' use."""
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        busy = {core: spent - self._cores.get(core, 0.0) for core, spent in _busy_s().items()}
        for thread, use in uses.items():
            busy[use.core] = busy.get(use.core, 0.0) - tick_s * (use.ticks - self._ticks_before(thread))
        ranks: dict[int, int] = {}
        seen: dict[str, int] = {}
        for core in sorted(self._usable, key=lambda core: busy.get(core, 0.0)):
            siblings = _siblings(core)
            ranks[core] = seen[siblings] = seen.get(siblings, -1) + 1
        return sorted(ranks, key=lambda core: (ranks[core], busy.get(core, 0.0)))

    def _ticks_before(self, thread: int) -> int:
        before = self._threads.get(thread)
        return before.ticks if before else 0


def _spread(threads: list[int], cores: list[int], uses: dict[int, _ThreadUse]) -> dict[int, int]:
    """A core for each thread, the one it is on where that is free."""
    placed: dict[int, int] = {}
    for thread in threads:
        if uses[thread].core in cores and uses[thread].core not in placed.values():
            placed[thread] = uses[thread].core
    free = iter([core for core in cores if core not in placed.values()])
    return {thread: placed[thread] if thread in placed else next(free) for thread in threads}


def _thread_uses() -> dict[int, _ThreadUse]:
    """Each thread of this process: clock ticks it has computed, and where it ran last."""
    uses = {}
    for folder in _TASKS.iterdir():
        try:
            words = (folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        ticks = int(words[_UTIME]) + int(words[_STIME])
        uses[int(folder.name)] = _ThreadUse(ticks, int(words[_PROCESSOR]))
    return uses


def _busy_s() -> dict[int, float]:
    """Seconds each core was busy, by its number."""
    return {number: core.user + core.system for number, core in enumerate(psutil.cpu_times(percpu=True))}


def _affinity(thread: int) -> set[int]:
    """Cores a thread may use, 0 being this one; none if it has ended."""
    try:
        return os.sched_getaffinity(thread)
    except OSError:
        return set()


def _siblings(core: int) -> str:
    """What the logical cores of one physical core have in common."""
    siblings = _CPUS / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        return siblings.read_text(encoding="ascii").strip()
    except OSError:
        return str(core)


SHARED_S = 0.6
"""Step time with threads on one core after which they are moved apart: by then, what is known of others is
not from before."""
SHARED_SLOWDOWN = 2.0
BOUND_S = 10.0
"""How long they are held apart: the system's scheduler leaves threads that compute where they are."""
LOOK_EVERY_S = 0.1
"""How often, at most, a step's beginning asks what time has changed."""
WATCHED_S = 1.0
"""How long others have to be watched before a step, the first or one after a pause, for it to follow them."""
DOUBT_S, MAX_DOUBT_S = 30.0, 600.0
"""How long nobody asks who runs beside steps where the answer was wrong: doubled each time, to the second."""
NUM_LOOKS = 10
LOOKS_APART_S = 0.004
"""So often, and so far apart, it is looked at who runs: what only passes a request on has done so by then."""


class Clocked(NamedTuple):
    """A native step by the clocks.

    Attributes:
        at_s: when it ended, on a monotonic clock.
        wall_s: how long it took.
        cpu_s: processor time that this process used meanwhile, all threads together.
        num_others: tasks of others that ran as it ended; None: nobody asked, or it is not told.
    """

    at_s: float
    wall_s: float
    cpu_s: float
    num_others: int | None = None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time is read: seconds on a monotonic clock, and of processor time of this process.

    Attributes:
        sleep: lets seconds pass.
        num_running: see `stoker.machine.cores.num_running`.
    """

    wall: Callable[[], float] = time.monotonic
    cpu: Callable[[], float] = time.process_time
    sleep: Callable[[float], None] = time.sleep
    num_running: Callable[[], int | None] = num_running


class ThreadController:
    """Watches the steps of one engine that computes on the CPU. Used on the loop's thread only.

    Args:
        max_threads: what steps use when nothing is in the way.
        watch: tells what other processes use.
        binder: moves threads apart.
        clocks: other ones in tests.
    """

    def __init__(
        self,
        max_threads: int,
        watch: CoreWatch | None = None,
        binder: ThreadBinder | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self._watch = watch or CoreWatch()
        self._binder = binder or ThreadBinder()
        self._clocks = clocks or Clocks()
        self.governor = ThreadGovernor(max_threads, self._watch.num_cores)
        self._slow = SlowSteps(self._watch.num_cores)
        self._begun: tuple[float, float] | None = None
        self._shared_s = 0.0
        self._bound_at_s = 0.0
        self._look_s = -math.inf
        self._beside = Beside()
        self._waits = False  # for cores that others use: it matters whether they do so beside steps
        self._believed_s = self._doubted_until_s = -math.inf
        self._doubt_s = DOUBT_S
        self._is_untried = False  # fewer threads were chosen for a step that has not ended yet

    def __repr__(self) -> str:
        return f"<ThreadController {self.governor!r} {self._binder!r}>"

    def begin(self) -> Decision | None:
        """A native step is about to start; after a pause, cores that became free are taken at once."""
        now_s = self._clocks.wall()
        decision = None
        if now_s >= self._look_s or self._is_untried:
            self._look_s = now_s + LOOK_EVERY_S
            decision = self._look(now_s)
            now_s = self._clocks.wall()
        self._begun = now_s, self._clocks.cpu()
        return decision

    def _look(self, now_s: float) -> Decision | None:
        self._slow.begin(now_s)
        if now_s - self._bound_at_s >= BOUND_S:
            self._binder.unbind()
        watched_s = now_s - self._watch.read_at_s
        others = self._watch.read(now_s)
        decision = self.governor.wake(now_s, others)
        if others is not None and watched_s >= WATCHED_S and self.governor.is_short(others):
            decision = self.governor.start(now_s, min(others, self._num_still_running()))
            self._is_untried = decision is not None
        elif self._is_untried:  # that step was ended by an arrival, which takes a core while it is passed on
            decision = self.governor.take_back(now_s, self._num_still_running())
        if decision is not None:
            self._changed(decision)
        return decision

    def _num_still_running(self) -> int:
        """Tasks of others that run now: the mean of a pause tells of those that have ended in it as well."""
        least = self._watch.num_cores + 1
        for at in range(NUM_LOOKS):
            if at:
                self._clocks.sleep(LOOKS_APART_S)
            least = min(least, (self._clocks.num_running() or 1) - 1)
            if not least:
                break
        return least

    def abandon(self) -> None:
        """The step failed: its time says nothing."""
        self._begun = None

    def stop(self) -> Clocked:
        """It succeeded; `judge` may follow when there is time."""
        assert self._begun is not None, "a step ended that had not begun"
        started_s, spent_s = self._begun
        self._begun = None
        now_s = self._clocks.wall()
        clocked = Clocked(now_s, now_s - started_s, self._clocks.cpu() - spent_s)
        if not self._waits or (num_running := self._clocks.num_running()) is None:
            return clocked
        return clocked._replace(num_others=max(0, num_running - 1))

    def judge(self, clocked: Clocked, num_threads: int, predicted_s: float | None) -> Decision | None:
        """What a step says about the cores.

        Args:
            clocked: the step.
            num_threads: what it ran with.
            predicted_s: what it takes with them on a quiet machine; None: not known.

        Returns:
            What to change before the next step, or None.
        """
        self._is_untried = False
        sample = StepSample(clocked.at_s, clocked.wall_s, clocked.cpu_s, predicted_s, num_threads)
        others = self._watch.read(sample.at_s)
        if self._look_into(sample, others):
            return None
        decision = self.governor.observe(sample, others, self._others_beside(clocked, others))
        if decision is not None:
            self._weigh(decision, num_threads, sample.at_s)
            self._changed(decision)
        return decision

    def _others_beside(self, clocked: Clocked, others: float | None) -> float | None:
        """Cores that others used beside steps, while more threads would not fit beside all that they use."""
        self._waits = others is not None and self.governor.waits_for_cores(others)
        if not self._waits or clocked.at_s < self._doubted_until_s:
            self._beside.clear()
        elif clocked.num_others is not None:
            self._beside.add(clocked.wall_s, clocked.num_others)
        return self._beside.num_cores

    def _weigh(self, decision: Decision, num_threads: int, now_s: float) -> None:
        """Doubt who ran beside steps for a while where cores that seemed free by it are lost at once.

        A hypervisor takes time without a task that runs, and what takes turns with steps is not seen either.
        """
        if decision.num_threads > num_threads:
            self._believed_s = now_s if self._waits else -math.inf
        elif now_s - self._believed_s < RELAPSE_S:
            self._doubted_until_s = now_s + self._doubt_s
            self._doubt_s = min(MAX_DOUBT_S, 2 * self._doubt_s)
        elif now_s - self._doubted_until_s > MAX_DOUBT_S:
            self._doubt_s = DOUBT_S

    def close(self) -> None:
        """Give threads back their cores; idempotent."""
        self._binder.unbind()

    def _changed(self, decision: Decision) -> None:
        self._binder.unbind()  # threads that start now would inherit one core
        log.debug("threads from now on: %d (%s)", decision.num_threads, decision.reason)

    def _look_into(self, sample: StepSample, others: float | None) -> bool:
        """Tell about a slow step, mend a shared core; returns whether that has been done."""
        slow = self._slow.end(sample, others, self._watch.read_at_s)
        line = self._slow.tell(slow) if slow else None
        if line:
            log.warning("%s", line)
        if self._binder.is_bound:
            if others is None or others >= SPARE_CORES:
                self._binder.unbind()
        elif slow is not None and slow.reason not in {SlowReason.SHARED_CORE, SlowReason.UNKNOWN}:
            self._shared_s = 0.0
        elif self._shares_a_core(sample, others):
            return self._move_apart(sample)
        return False

    def _shares_a_core(self, sample: StepSample, others: float | None) -> bool:
        """Whether that has been so for SHARED_S of step time."""
        is_slow = sample.predicted_s is not None and sample.wall_s >= SHARED_SLOWDOWN * sample.predicted_s
        is_alone = others is not None and others < SPARE_CORES
        if not (is_slow and is_alone) or sample.lost_cores < HALF_A_CORE:
            self._shared_s = 0.0
            return False
        is_first = self._shared_s == 0.0
        self._shared_s += sample.wall_s
        if self._shared_s >= SHARED_S:
            return True
        if is_first:
            self._binder.note()
        return False

    def _move_apart(self, sample: StepSample) -> bool:
        self._shared_s = 0.0
        if not self._binder.rebind(sample.num_threads):
            return False
        self._bound_at_s = sample.at_s
        self.governor.forget()
        log.info("%d threads shared a core and were moved apart", sample.num_threads)
        return True
