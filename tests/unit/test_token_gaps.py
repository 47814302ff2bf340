"""Times between tokens in bounded memory: how near to the truth they are."""

from __future__ import annotations

import random

import pytest

from stoker.client.requests.meter import MAX_GAP_CLASSES, TokenGaps

ERROR = 0.025


def gaps_of(seconds: list[float]) -> TokenGaps:
    """The gaps of one choice."""
    gaps, now = TokenGaps(), 50.0
    gaps.delivered(0, now)
    for gap_s in seconds:
        now += gap_s
        gaps.delivered(0, now)
    return gaps


def test_percentiles_are_near_and_mean_and_maximum_exact() -> None:
    """SPEC O22: over four orders of magnitude."""
    draw = random.Random(7)
    seconds = [10 ** draw.uniform(-3.5, 0.5) for _ in range(5000)]
    found = gaps_of(seconds).status()
    assert found is not None
    ordered = sorted(seconds)
    assert found.p50 == pytest.approx(ordered[2499] * 1000, rel=ERROR)
    assert found.p99 == pytest.approx(ordered[4949] * 1000, rel=ERROR)
    assert found.mean == pytest.approx(sum(seconds) / 5000 * 1000)
    assert found.max == pytest.approx(ordered[-1] * 1000)


def test_one_long_gap_among_many_is_the_maximum_and_not_the_percentile() -> None:
    """SPEC O22: 1 of 1,000; 20 of 1,000 are."""
    rare, often = gaps_of([0.02] * 999 + [2.0]).status(), gaps_of([0.02] * 980 + [2.0] * 20).status()
    assert rare is not None
    assert often is not None
    assert (rare.p99, rare.max) == (pytest.approx(20, rel=ERROR), pytest.approx(2000))
    assert often.p99 == pytest.approx(2000, rel=ERROR)


def test_time_in_which_a_choice_stands_still_is_no_gap() -> None:
    """SPEC O22: parked, paused or without an engine; other choices go on."""
    gaps = TokenGaps()
    for index in (0, 1):
        gaps.delivered(index, 1.0)
    gaps.interrupted(0)
    gaps.delivered(0, 61.0)
    gaps.delivered(1, 1.5)
    gaps.delivered(0, 61.25)
    found = gaps.status()
    assert found is not None
    assert (found.mean, found.max) == (pytest.approx(375), pytest.approx(500))
    gaps.interrupted()
    gaps.delivered(1, 900.0)
    assert gaps.status() == found


def test_whatever_the_gaps_are_memory_has_a_bound() -> None:
    """SPEC O22: from nothing to hours."""
    gaps = gaps_of([0.0, 1e-9, 1e6, *(1e-6 * 1.01**power for power in range(3000))])
    assert len(gaps._counts) <= MAX_GAP_CLASSES
    assert TokenGaps().status() is None
