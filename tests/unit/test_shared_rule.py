"""Whether and how long a prefix of a shared store is waited for, and when it is left alone (SPEC C19)."""

from __future__ import annotations

import pytest

from stoker.cache.shared.rule import (
    FIRST_LATENCY_S,
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    LEAST_GAIN,
    MAX_FAILURES,
    MAX_WAIT_S,
    StoreBreaker,
    StoreSpeed,
    wait_limit_s,
)


@pytest.mark.parametrize(
    ("get_s", "compute_s", "waits_s"),
    [
        (0.1, None, MAX_WAIT_S),  # nothing of the model was measured: what is near enough is got
        (MAX_WAIT_S + 0.1, None, 0.0),
        (0.1, 1.0, 1.0),  # ten times as quick
        (0.1, 0.151, 0.151),  # just quick enough
        (0.1, 0.149, 0.0),
        (0.1, 0.1, 0.0),
        (0.001, 0.0, 0.0),
        (0.1, 60.0, MAX_WAIT_S),  # never longer, however much it saves
        (MAX_WAIT_S / LEAST_GAIN, 60.0, MAX_WAIT_S),
        (MAX_WAIT_S / LEAST_GAIN + 0.01, 60.0, 0.0),  # it might not come in that time
    ],
)
def test_the_rule(get_s: float, compute_s: float | None, waits_s: float) -> None:
    """C19: bytes over bandwidth against tokens over prefill."""
    assert wait_limit_s(get_s, compute_s) == pytest.approx(waits_s)


def test_speed_follows_what_transfers_took() -> None:
    """C19: small ones tell the latency, large ones the bandwidth behind it."""
    speed = StoreSpeed()
    assert speed.get_s(0) == FIRST_LATENCY_S
    for _ in range(30):
        speed.learn(100, 0.005)
    for _ in range(30):
        speed.learn(10_000_000, 1.005)
    assert speed.latency_s == pytest.approx(0.005, rel=0.01)
    assert speed.bytes_per_s == pytest.approx(1e7, rel=0.01)
    assert speed.get_s(20_000_000) == pytest.approx(2.005, rel=0.01)


def test_a_transfer_within_the_latency_is_no_endless_bandwidth() -> None:
    """C19: nor is one that took no time."""
    speed = StoreSpeed()
    before = speed.bytes_per_s
    speed.learn(1_000_000, 0.0)
    assert speed.bytes_per_s == before
    for _ in range(30):
        speed.learn(1_000_000, FIRST_LATENCY_S / 2)
    assert speed.bytes_per_s <= 1_000_000 / (FIRST_LATENCY_S / 20) * 1.01


def test_three_failures_in_a_row_open_the_breaker_for_a_growing_while() -> None:
    """C19: 5 s, doubling to 5 min; one success closes it, and begins anew."""
    breaker = StoreBreaker()
    for number in range(MAX_FAILURES):
        assert not breaker.is_open
        breaker.failed(f"reason {number}", 100.0)
    assert (breaker.problem, breaker.until_s) == (f"reason {MAX_FAILURES - 1}", 100.0 + FIRST_PAUSE_S)
    pauses = []
    for _ in range(8):
        now = breaker.until_s
        breaker.failed("still", now)
        pauses.append(breaker.until_s - now)
    assert pauses == [min(FIRST_PAUSE_S * 2**n, LAST_PAUSE_S) for n in range(1, 9)]
    breaker.worked()
    assert (breaker.problem, breaker.until_s) == ("", 0.0)
    breaker.failed("once", 0.0)
    breaker.worked()
    breaker.failed("once more", 0.0)
    breaker.failed("and again", 0.0)
    assert not breaker.is_open
