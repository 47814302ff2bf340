"""Who else had the cores while something was measured: what the machine computed less what our processes did.

The machine's time is the kernel's count (`/proc/stat` on Linux), our own that of the benchmark and of all it
started. Stolen time, in which a hypervisor ran somebody else, is the others' as well.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from bench.idle import tree_cpu_s

if TYPE_CHECKING:
    from collections.abc import Iterable

DISTURBED_CORES = 0.1
"""More than this taken by others disturbs. The threads of a step wait for each other, so who takes a tenth of
one core may slow a step by a tenth, which is twice what the bars of speed tell apart. Interrupts and the
daemons of a quiet machine take less."""
NOT_BUSY = frozenset({"idle", "iowait", "guest", "guest_nice"})
"""What is not work, and what the kernel counts within `user` and `nice` too."""
LEAST_SEEN = 0.5
"""A kernel that counts less than this part of what our own processes used does not count (some sandboxes)."""
WATCHED_S = 1.0


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds used up to a moment: by everybody on the cores we may use, and by our own processes."""

    at_s: float
    machine_s: float
    own_s: float


def cpu_use() -> CpuUse:
    """The counts of this moment."""
    return CpuUse(time.monotonic(), _machine_cpu_s(), tree_cpu_s(psutil.Process()))


def cores_of_others(before: CpuUse, after: CpuUse) -> float | None:
    """Cores that other processes had between two moments, on average; None: the kernel does not count."""
    machine_s, own_s = after.machine_s - before.machine_s, after.own_s - before.own_s
    if machine_s < LEAST_SEEN * own_s:
        return None
    # the kernel's two counts are of clock ticks and need not agree to the last one
    return max(0.0, machine_s - own_s) / (after.at_s - before.at_s)


def is_disturbed(cores: Iterable[float | None]) -> bool:
    """Whether others took a core in one of these."""
    return any(each is not None and each > DISTURBED_CORES for each in cores)


def load_mean() -> float:
    """Processes that ran or wanted to, mean of a minute."""
    return os.getloadavg()[0]


async def describe_load() -> str:
    """The load, and what others take in a second in which nothing of ours runs, as text."""
    load, before = load_mean(), cpu_use()
    await asyncio.sleep(WATCHED_S)
    cores = cores_of_others(before, cpu_use())
    taken = "what others take is not counted here" if cores is None else f"others take {cores:.2f} cores"
    return f"{load:.1f} (1 minute mean); {taken}"


def _machine_cpu_s() -> float:
    times = psutil.cpu_times(percpu=True)
    # a container may have a few of the machine's cores; who is on the others disturbs nobody here
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(times))
    busy = [
        seconds
        for core, used in enumerate(times)
        if core in cores
        for name, seconds in used._asdict().items()
        if name not in NOT_BUSY
    ]
    return float(sum(busy))
