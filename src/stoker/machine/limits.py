"""How much memory this process may use, and what a machine of that size gets by default (SPEC M1, M2).

Owns the effective limit (physical memory, control groups, the user's own), what is free now, and the tiers
with their defaults, each of which a setting overrides. The backend reports accelerator memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import psutil

from stoker.machine.cgroups import ControlGroup, limited_groups

SERVER_BYTES = 120 * 2**20
"""What a server takes itself: its process, the engine's and a worker's, before a model is in memory."""
_GIB = 1024**3
_GB = 10**9
_MB = 10**6
_BRIEF_S = 60.0
_LONG_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
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


def read_limits(
    memory_limit: int | None = None, root: Path = Path("/"), own_bytes: int | None = None
) -> MemoryLimits:
    """The limits now; what Stoker itself uses counts against the user's limit.

    Args:
        memory_limit: the user's own limit in bytes.
        root: where `/proc` and `/sys` are found.
        own_bytes: what Stoker itself uses, where a server is started instead of this process.
    """
    system = psutil.virtual_memory()
    bounds = limits_of(system.total, system.available, limited_groups(root))
    used_bytes = psutil.Process().memory_info().rss
    available = bounds.available_bytes
    if own_bytes is not None:
        available, used_bytes = max(0, available + used_bytes - own_bytes), own_bytes
    if memory_limit is not None:
        available = min(available, max(0, memory_limit - used_bytes))
    return replace(bounds, available_bytes=available, user_bytes=memory_limit)


def limits_of(physical_bytes: int, available_bytes: int, groups: Sequence[ControlGroup]) -> MemoryLimits:
    """The limits of a machine with this much RAM, this much of it available, and these control groups."""
    return MemoryLimits(
        physical_bytes=physical_bytes,
        available_bytes=min([available_bytes, *(group.free_bytes for group in groups)]),
        cgroup_bytes=min((group.limit_bytes for group in groups), default=None),
    )


class Tier(StrEnum):
    """Size of a machine, by its effective memory."""

    ULTRA_LOW = "ultra_low"
    LOW = "low"
    STANDARD = "standard"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierDefaults:
    """What holds where no setting says otherwise.

    Attributes:
        allocator_cache_bytes: freed memory that an allocator may keep for the next allocation.
        memory_limit_bytes: for the engine and the client's process together; None: what the machine allows.
        max_tokens: of an answer whose request does not say.
        image_edge_px: the longer edge that an image is resized to.
        keep_alive_s: seconds that an idle model stays in memory. Small tiers keep it for a minute, as a
            conversation would otherwise load it for every turn.
        cleans_eagerly: return memory to the system after each request, not only under pressure.
    """

    allocator_cache_bytes: int
    memory_limit_bytes: int | None
    max_tokens: int
    image_edge_px: int
    keep_alive_s: float
    cleans_eagerly: bool = False


DEFAULTS: Mapping[Tier, TierDefaults] = MappingProxyType(
    {
        Tier.ULTRA_LOW: TierDefaults(
            allocator_cache_bytes=3 * _MB,
            memory_limit_bytes=3 * _GB // 2,
            max_tokens=300,
            image_edge_px=192,
            keep_alive_s=_BRIEF_S,
            cleans_eagerly=True,
        ),
        Tier.LOW: TierDefaults(
            allocator_cache_bytes=8 * _MB,
            memory_limit_bytes=2 * _GB,
            max_tokens=500,
            image_edge_px=256,
            keep_alive_s=_BRIEF_S,
        ),
        Tier.STANDARD: TierDefaults(
            allocator_cache_bytes=20 * _MB,
            memory_limit_bytes=5 * _GB // 2,
            max_tokens=800,
            image_edge_px=384,
            keep_alive_s=_LONG_S,
        ),
        Tier.HIGH: TierDefaults(
            allocator_cache_bytes=50 * _MB,
            memory_limit_bytes=None,
            max_tokens=1000,
            image_edge_px=448,
            keep_alive_s=_LONG_S,
        ),
    }
)
"""The table of SPEC M2."""

_UP_TO = ((2 * _GIB, Tier.ULTRA_LOW), (3 * _GIB, Tier.LOW), (6 * _GIB, Tier.STANDARD))


def tier_of(effective_bytes: int) -> Tier:
    """The tier of a machine with this effective limit; a bound belongs to the lower tier."""
    return next((tier for bound, tier in _UP_TO if effective_bytes <= bound), Tier.HIGH)


def effective_limit(limits: MemoryLimits) -> int:
    """Bytes for the engine and the client's process together: the effective limit.

    Where the user set no limit of their own, that of the tier counts too.
    """
    limit = DEFAULTS[tier_of(limits.effective_bytes)].memory_limit_bytes
    if limits.user_bytes is not None or limit is None:
        return limits.effective_bytes
    return min(limits.effective_bytes, limit)
