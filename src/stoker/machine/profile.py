"""How much memory this process may really use (SPEC M1).

Owns bringing together the physical size, the control groups and the user's own limit, and what is free now.
What is done about a shortage is policy's business; accelerator memory is the backend's to report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from stoker.machine.groups import Group, limited_groups


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


def read_profile(memory_limit: int | None = None, root: Path = Path("/")) -> MemoryProfile:
    """Measure now; what this process takes counts against the user's limit.

    Args:
        memory_limit: the user's own limit in bytes.
        root: where `/proc` and `/sys` are found.
    """
    system = psutil.virtual_memory()
    bounds = profile_of(system.total, system.available, limited_groups(root))
    if memory_limit is None:
        return bounds
    left = max(0, memory_limit - psutil.Process().memory_info().rss)
    return MemoryProfile(
        physical_bytes=bounds.physical_bytes,
        available_bytes=min(bounds.available_bytes, left),
        cgroup_bytes=bounds.cgroup_bytes,
        user_bytes=memory_limit,
    )


def profile_of(physical_bytes: int, available_bytes: int, groups: Sequence[Group]) -> MemoryProfile:
    """What a machine with so much RAM, so much of it available, and these control groups allows."""
    return MemoryProfile(
        physical_bytes=physical_bytes,
        available_bytes=min([available_bytes, *(group.free_bytes for group in groups)]),
        cgroup_bytes=min((group.limit_bytes for group in groups), default=None),
    )
