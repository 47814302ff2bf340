"""Tiers, their defaults and the limit that follows."""

import pytest

from stoker.machine.limits import DEFAULTS, MemoryLimits, Tier, effective_limit, tier_of

GIB = 1024**3


def profile(physical, *, cgroup=None, user=None):
    """A machine with so much memory and these limits."""
    return MemoryLimits(
        physical_bytes=physical, available_bytes=physical, cgroup_bytes=cgroup, user_bytes=user
    )


@pytest.mark.parametrize(
    ("size_bytes", "tier"),
    [
        (1, Tier.ULTRA_LOW),
        (2 * GIB, Tier.ULTRA_LOW),
        (2 * GIB + 1, Tier.LOW),
        (3 * GIB, Tier.LOW),
        (3 * GIB + 1, Tier.STANDARD),
        (6 * GIB, Tier.STANDARD),
        (6 * GIB + 1, Tier.HIGH),
        (1024 * GIB, Tier.HIGH),
    ],
)
def test_a_bound_belongs_to_the_lower_tier(size_bytes, tier):
    """SPEC M2: ultra_low <= 2 GiB, low <= 3, standard <= 6, high above."""
    assert tier_of(size_bytes) is tier


def test_every_tier_has_the_defaults_of_the_table():
    """SPEC M2: cache, limit, tokens, edge, keep, eager cleanup; an unkept model stays a minute."""
    table = {
        tier: (
            one.allocator_cache_bytes / 1e6,
            one.memory_limit_bytes and one.memory_limit_bytes / 1e9,
            one.max_tokens,
            one.image_edge_px,
            one.keep_alive_s,
            one.cleans_eagerly,
        )
        for tier, one in DEFAULTS.items()
    }
    assert table == {
        "ultra_low": (3, 1.5, 300, 192, 60, True),
        "low": (8, 2.0, 500, 256, 60, False),
        "standard": (20, 2.5, 800, 384, 600, False),
        "high": (50, None, 1000, 448, 600, False),
    }


def test_a_small_machine_is_limited_by_its_tier():
    """SPEC M1, M2: 4 GiB are standard, of which 2.5 GB may be used."""
    assert effective_limit(profile(4 * GIB)) == 2_500_000_000


def test_a_limit_below_the_tiers_own_stays():
    """SPEC M1: the smallest counts."""
    assert effective_limit(profile(8 * GIB, cgroup=GIB)) == GIB


def test_a_control_group_moves_a_large_machine_into_a_low_tier():
    """SPEC M2: effective memory decides."""
    assert effective_limit(profile(64 * GIB, cgroup=2 * GIB)) == 1_500_000_000


def test_the_users_limit_takes_the_place_of_the_tiers():
    """SPEC M2: all overridable."""
    assert effective_limit(profile(4 * GIB, user=3 * GIB)) == 3 * GIB
    assert effective_limit(profile(4 * GIB, user=8 * GIB)) == 4 * GIB


def test_a_large_machine_has_no_limit_but_its_own():
    """SPEC M2: high has none."""
    assert effective_limit(profile(24 * GIB)) == 24 * GIB
