"""Moving the threads of a step apart, where two of them share a core while another is free (SPEC M7).

Only Linux lets a process choose cores for its threads; elsewhere nothing happens. Threads are bound for a
short while only: a bound thread cannot leave a core that another process takes, and threads and processes
that it starts inherit its one core.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

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
            threads that somebody else has bound already.
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
