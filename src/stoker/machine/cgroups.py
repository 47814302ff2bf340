"""The control groups that bound this process's memory (Linux, v1 and v2; SPEC M1).

Owns reading their limits, their use and the kernel's counters. `limits` and `monitor` draw the conclusions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_UNLIMITED = 2**60  # v1 writes "no limit" as the largest multiple of a page
_CUTS = ("high", "max")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group with a limit, as it is now.

    Attributes:
        folder: where the kernel shows it.
        limit_bytes: what all its processes may use together.
        used_bytes: its working set: its use less inactive file cache.
        num_cuts: times since its creation that its use reached the limit and the kernel reclaimed. File cache
            counts too: reading a large file in a small group makes up to 1,700 a second.
        num_kills: processes that the kernel killed for memory.
        cached_bytes: inactive file cache, which `used_bytes` is without.
    """

    folder: Path
    limit_bytes: int
    used_bytes: int
    num_cuts: int = 0
    num_kills: int = 0
    cached_bytes: int = 0

    def without(self, mapped_bytes: int) -> ControlGroup:
        """The same where so much of its file cache may go at any time, though processes have it mapped.

        Some of that may be inactive, and so left out already: the greater of the two is left out.
        """
        further_bytes = max(0, mapped_bytes - self.cached_bytes)
        return replace(self, used_bytes=max(0, self.used_bytes - further_bytes))

    @property
    def free_bytes(self) -> int:
        """Bytes left, reclaimable file cache included."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def fraction(self) -> float:
        """Used part of the limit, 0 to 1."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 1.0


def limited_groups(root: Path = Path("/")) -> list[ControlGroup]:
    """The control groups of this process and their parents that have a limit, v1 and v2.

    Args:
        root: where `/proc` and `/sys` are found.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []  # no control groups: not Linux
    mount = root / "sys/fs/cgroup"
    groups: list[ControlGroup | None] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups += map(_read_v2, _family(mount, path))
        elif "memory" in controllers.split(","):
            groups += map(_read_v1, _family(mount / "memory", path))
    return [group for group in groups if group is not None]


def _family(mount: Path, path: str) -> Iterator[Path]:
    """The group and its parents up to the mount; in a container only the mount itself may be visible."""
    relative = Path(path.lstrip("/"))
    if ".." in relative.parts or not (mount / relative).is_dir():
        relative = Path()
    yield mount / relative
    yield from (mount / parent for parent in relative.parents)


def _read_v1(folder: Path) -> ControlGroup | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= _UNLIMITED:
        return None
    usage = _number(folder / "memory.usage_in_bytes") or 0
    cached = _pairs(folder / "memory.stat").get("total_inactive_file", 0)
    cuts = _number(folder / "memory.failcnt") or 0
    kills = _pairs(folder / "memory.oom_control").get("oom_kill", 0)
    return ControlGroup(folder, limit, max(0, usage - cached), cuts, kills, cached)


def _read_v2(folder: Path) -> ControlGroup | None:
    limit = _number(folder / "memory.max")
    high = _number(folder / "memory.high")  # over this the kernel slows the group down until it is useless
    bounds = [bound for bound in (limit, high) if bound is not None]
    if not bounds:
        return None
    usage = _number(folder / "memory.current") or 0
    cached = _pairs(folder / "memory.stat").get("inactive_file", 0)
    events = _pairs(folder / "memory.events")
    cuts = sum(events.get(name, 0) for name in _CUTS)
    kills = events.get("oom_kill", 0)
    return ControlGroup(folder, min(bounds), max(0, usage - cached), cuts, kills, cached)


def _number(path: Path) -> int | None:
    """The number in the file; None if it cannot be read or says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _pairs(path: Path) -> dict[str, int]:
    """The `name number` lines of a file; empty if it cannot be read."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}  # noqa: PLR2004
