"""The control groups that bound this process's memory (Linux, v1 and v2; SPEC M1).

Owns reading their limits, their use and how often the kernel had to cut them down. What follows from that is
for `stoker.machine.profile` and `stoker.machine.gauge`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60  # v1 writes "no limit" as the largest multiple of a page
_CUTS = ("high", "max")


@dataclass(frozen=True, slots=True)
class Group:
    """A control group with a limit, now.

    Attributes:
        folder: where the kernel shows it.
        limit_bytes: what everything in it may take together.
        used_bytes: its working set: what it takes less the file cache that the kernel gives back first.
        num_cuts: times that its use came to the limit and the kernel cut it down, since it was made. This
            counts file cache too: reading a large file in a small group was seen to make 1,700 a second.
        num_kills: times that this did not suffice and a process had to go.
    """

    folder: Path
    limit_bytes: int
    used_bytes: int
    num_cuts: int = 0
    num_kills: int = 0

    @property
    def free_bytes(self) -> int:
        """What is left to take, reclaimable file cache included."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def fraction(self) -> float:
        """Of the limit, how much is used: 0 to 1."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 1.0


def limited_groups(root: Path = Path("/")) -> list[Group]:
    """Every group with a limit that this process is in, and their parents, whatever the version.

    Args:
        root: where `/proc` and `/sys` are found.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []  # no control groups: not Linux
    mount = root / "sys/fs/cgroup"
    groups: list[Group | None] = []
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


def _read_v1(folder: Path) -> Group | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= _UNLIMITED:
        return None
    usage = _number(folder / "memory.usage_in_bytes") or 0
    cached = _pairs(folder / "memory.stat").get("total_inactive_file", 0)
    cuts = _number(folder / "memory.failcnt") or 0
    kills = _pairs(folder / "memory.oom_control").get("oom_kill", 0)
    return Group(folder, limit, max(0, usage - cached), cuts, kills)


def _read_v2(folder: Path) -> Group | None:
    limit = _number(folder / "memory.max")
    high = _number(folder / "memory.high")  # over this the kernel slows the group down until it is useless
    bounds = [bound for bound in (limit, high) if bound is not None]
    if not bounds:
        return None
    usage = _number(folder / "memory.current") or 0
    cached = _pairs(folder / "memory.stat").get("inactive_file", 0)
    events = _pairs(folder / "memory.events")
    cuts = sum(events.get(name, 0) for name in _CUTS)
    return Group(folder, min(bounds), max(0, usage - cached), cuts, events.get("oom_kill", 0))


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
