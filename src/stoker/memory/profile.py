"""How much memory this process may really use (SPEC M1).

Owns reading the physical size, the control groups (v1 and v2, with all their parents) and what is free now.
What is done about a shortage is policy's business; accelerator memory is the backend's to report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_UNLIMITED = 2**60  # v1 writes "no limit" as the largest multiple of a page


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes, as the machine, its control groups and the user set them.

    Attributes:
        physical_bytes: RAM of the machine.
        available_bytes: what can be used now without swapping, inside every limit.
        cgroup_bytes: the tightest control group limit; None where there is none.
        user_bytes: the `memory_limit` setting; None where it is not set.
    """

    physical_bytes: int
    available_bytes: int
    cgroup_bytes: int | None = None
    user_bytes: int | None = None

    @property
    def effective_bytes(self) -> int:
        """The limit that counts: the smallest of the three."""
        limits = (self.physical_bytes, self.cgroup_bytes, self.user_bytes)
        return min(limit for limit in limits if limit is not None)


@dataclass(frozen=True, slots=True)
class _Group:
    limit_bytes: int
    free_bytes: int


def read_profile(memory_limit: int | None = None, root: Path = Path("/")) -> MemoryProfile:
    """Measure now.

    Args:
        memory_limit: the user's own limit in bytes.
        root: where `/proc` and `/sys` are found.
    """
    system = psutil.virtual_memory()
    groups = list(_groups(root))
    available = min([system.available, *(group.free_bytes for group in groups)])
    if memory_limit is not None:
        available = min(available, max(0, memory_limit - psutil.Process().memory_info().rss))
    return MemoryProfile(
        physical_bytes=system.total,
        available_bytes=available,
        cgroup_bytes=min((group.limit_bytes for group in groups), default=None),
        user_bytes=memory_limit,
    )


def _groups(root: Path) -> Iterator[_Group]:
    """Every limited control group this process is in, whatever the version."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return  # no control groups: not Linux
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(mount, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _limits(mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _limits(mount: Path, path: str, limit_name: str, usage_name: str) -> Iterator[_Group]:
    """The group and its parents up to the mount; in a container only the mount itself may be visible."""
    relative = Path(path.lstrip("/"))
    if ".." in relative.parts or not (mount / relative).is_dir():
        relative = Path()
    for folder in (mount / relative, *(mount / parent for parent in relative.parents)):
        limit = _number(folder / limit_name)
        if limit is None or limit >= _UNLIMITED:
            continue
        used = (_number(folder / usage_name) or 0) - _reclaimable(folder)
        yield _Group(limit, max(0, limit - used))


def _number(path: Path) -> int | None:
    """The number in the file; None if it cannot be read or says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reclaimable(folder: Path) -> int:
    """File cache the kernel gives back before it refuses memory; counted as used otherwise."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    stats = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(stats.get("total_inactive_file", stats.get("inactive_file", 0)))
