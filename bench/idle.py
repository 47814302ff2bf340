"""What a server costs when nobody asks it anything: CPU time of its process tree over some idle seconds."""

from __future__ import annotations

import asyncio
import time

import psutil

IDLE_S = 10.0


async def idle_cpu_percent(pid: int, duration_s: float = IDLE_S) -> float:
    """Percent of one core that the process and its children used over `duration_s` seconds."""
    began_s, before_s = time.monotonic(), tree_cpu_s(psutil.Process(pid))
    await asyncio.sleep(duration_s)
    return 100.0 * (tree_cpu_s(psutil.Process(pid)) - before_s) / (time.monotonic() - began_s)


def tree_cpu_s(root: psutil.Process) -> float:
    """CPU seconds, user and system, that a process and its descendants have used, ended ones included."""
    # children first: the time of one that ends meanwhile is its parent's count of ended children
    return sum(map(_cpu_s, (*reversed(root.children(recursive=True)), root)))


def _cpu_s(process: psutil.Process) -> float:
    try:
        t = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(t.user + t.system + t.children_user + t.children_system)
