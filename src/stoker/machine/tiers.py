"""What a machine of a given size gets by default (SPEC M2).

Owns the tiers, their defaults and the limit that follows from them. Reading how much memory there is belongs
to `stoker.machine.profile`; every default here gives way to a setting, which is the business of who uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.machine.profile import MemoryProfile

_GIB = 1024**3
_GB = 10**9
_MB = 10**6
_BRIEF_S = 60.0
_LONG_S = 600.0


class Tier(StrEnum):
    """How large a machine is, by the memory that may really be used."""

    ULTRA_LOW = "ultra_low"
    LOW = "low"
    STANDARD = "standard"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierDefaults:
    """What holds where no setting says otherwise.

    Attributes:
        allocator_cache_bytes: freed memory that an allocator may keep for the next allocation.
        memory_limit_bytes: what the engine and its front may take together; None: what the machine allows.
        max_tokens: tokens an answer may have where its request does not say.
        image_edge_px: the longer edge that an image is resized to.
        keep_alive_s: seconds that an idle model stays in memory. A tier that keeps no model still keeps it
            for a minute: a conversation would load it for every turn otherwise.
        cleans_eagerly: memory goes back to the system after each request, not only under pressure.
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
    """The tier of a machine on which so many bytes may be used at most; a bound belongs to the lower tier."""
    return next((tier for bound, tier in _UP_TO if effective_bytes <= bound), Tier.HIGH)


def effective_limit(profile: MemoryProfile) -> int:
    """Bytes that the engine and its front may take together.

    The smallest of physical memory, control groups and the user's limit; where the user set none, the limit
    of the tier counts too.
    """
    limit = DEFAULTS[tier_of(profile.effective_bytes)].memory_limit_bytes
    if profile.user_bytes is not None or limit is None:
        return profile.effective_bytes
    return min(profile.effective_bytes, limit)
