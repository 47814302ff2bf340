"""How many threads a CPU step should use: the physical cores this process may really have."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CPU_DIR = Path("/sys/devices/system/cpu")
_CGROUP_DIR = Path("/sys/fs/cgroup")


def num_physical_cores() -> int:
    """Physical cores within the affinity mask and below the cgroup's CPU quota, at least 1.

    A quota of 1.5 CPUs counts as one: spinning threads that are throttled together are slower than fewer.
    """
    cores = _cores_in_mask()
    quota = _quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def _cores_in_mask() -> int:
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = _CPU_DIR / f"cpu{cpu}" / "topology"
        try:
            package = (topology / "physical_package_id").read_text().strip()
            core = (topology / "core_id").read_text().strip()
        except OSError:
            package, core = "?", str(cpu)
        cores.add((package, core))
    return len(cores)


def _quota() -> float | None:
    """CPUs per period of the tightest cgroup around this process (v2, then v1); None: no bound."""
    bounds = [bound for file in _quota_files() if (bound := _read_quota(file)) is not None]
    return min(bounds, default=None)


def _quota_files() -> list[Path]:
    files = [_CGROUP_DIR / "cpu.max", _CGROUP_DIR / "cpu" / "cpu.cfs_quota_us"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            group = _CGROUP_DIR / name.lstrip("/")
            inside = [group, *group.parents]
            files += [parent / "cpu.max" for parent in inside if parent.is_relative_to(_CGROUP_DIR)]
        elif "cpu" in controllers.split(","):
            files.append(_CGROUP_DIR / "cpu" / name.lstrip("/") / "cpu.cfs_quota_us")
    return files


def _read_quota(file: Path) -> float | None:
    try:
        words = file.read_text().split()
        if file.name == "cpu.cfs_quota_us":
            words.append(file.with_name("cpu.cfs_period_us").read_text().strip())
        quota, period = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):  # no such file, or "max": no bound here
        return None
    return quota / period if quota > 0 and period > 0 else None
