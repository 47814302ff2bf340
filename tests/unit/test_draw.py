"""The counter-based uniform numbers and the draw from probabilities."""

import numpy as np
import pytest

from stoker.sampling.sampler import Stream, pick, probabilities, uniform


def test_the_uniform_number_depends_on_seed_index_and_stream_only():
    """SPEC D1: u = f(seed, token index); these values may never change, or a replay would differ."""
    assert uniform(1, 0, Stream.TOKEN) == uniform(1, 0, Stream.TOKEN)
    assert uniform(42, 7, Stream.TOKEN) == 0.04572156290398832
    assert uniform(42, 7, Stream.XTC) == 0.013753152485688758


def test_neighbouring_seeds_indices_and_streams_give_unrelated_numbers():
    """SPEC D1: choices use seed + i and must not share their draws."""
    seeds = np.array([uniform(seed, 0, Stream.TOKEN) for seed in range(2000)])
    indices = np.array([uniform(0, index, Stream.TOKEN) for index in range(2000)])
    others = np.array([uniform(0, index, Stream.XTC) for index in range(2000)])
    for numbers in (seeds, indices, others):
        assert abs(numbers.mean() - 0.5) < 0.03
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.08
    assert abs(np.corrcoef(indices, others)[0, 1]) < 0.08
    assert abs(np.corrcoef(seeds, indices)[0, 1]) < 0.08


def test_uniform_numbers_fill_the_unit_interval_evenly():
    """SPEC D1: a chi-square over 64 bins stays under its 99.9 % point for 63 degrees of freedom."""
    numbers = np.array([uniform(9, index, Stream.TOKEN) for index in range(20_000)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=64, range=(0.0, 1.0))
    expected = len(numbers) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.4


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**64 - 1, 2**64 + 31])
def test_every_seed_that_a_request_may_carry_draws(seed):
    """SPEC D1: seeds are 64 bits of either sign, and choice i adds i to it."""
    assert 0.0 <= uniform(seed, 0, Stream.TOKEN) < 1.0


def test_a_seed_and_its_64_bit_twin_draw_alike():
    """SPEC D1: -1 and 2**64 - 1 are the same 64 bits."""
    assert uniform(-1, 3, Stream.TOKEN) == uniform(2**64 - 1, 3, Stream.TOKEN)


def test_draws_follow_the_distribution_at_the_temperature():
    """SPEC D1: chi-square of 20,000 draws from six logits at temperature 0.7 (99.9 % point, 5 degrees)."""
    logits = np.array([2.0, 1.0, 0.0, -1.0, 1.5, -3.0], np.float32)
    exact = np.exp(logits.astype(np.float64) / 0.7)
    exact /= exact.sum()
    weights = probabilities(logits, 0.7)
    np.testing.assert_allclose(weights, exact, rtol=1e-12)
    draws = [pick(weights, uniform(5, index, Stream.TOKEN)) for index in range(20_000)]
    counts = np.bincount(draws, minlength=6)
    assert ((counts - 20_000 * exact) ** 2 / (20_000 * exact)).sum() < 20.5


def test_two_nearly_equal_logits_that_swap_ranks_hardly_move_the_draw():
    """SPEC E1: another batch shape changes logits in the last digits; the drawn token stays."""
    first = probabilities(np.array([1.0, 2.000001, 2.0, 0.5], np.float32), 1.0)
    second = probabilities(np.array([1.0, 2.0, 2.000001, 0.5], np.float32), 1.0)
    numbers = [uniform(0, index, Stream.TOKEN) for index in range(2000)]
    assert [pick(first, u) for u in numbers] == [pick(second, u) for u in numbers]


def test_a_token_without_probability_is_never_picked():
    """SPEC D1: forbidden tokens at either end of the sum stay out, even at the extremes of u."""
    weights = np.array([0.0, 0.0, 0.25, 0.75, 0.0])
    assert pick(weights, 0.0) == 2
    assert pick(weights, 0.25) == 3
    assert pick(weights, np.nextafter(1.0, 0.0)) == 3
    assert pick(np.array([0.1, 0.2, 0.0]), 1.0) == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-4])
def test_a_tiny_temperature_draws_the_best_token_without_overflow(temperature):
    """SPEC D1: temperature near 0 tends to greedy and never divides into infinities."""
    weights = probabilities(np.array([1.0, 3.0, -np.inf, 2.5, -80.0], np.float32), temperature)
    np.testing.assert_array_equal(weights, [0.0, 1.0, 0.0, 0.0, 0.0])


def test_a_huge_temperature_is_nearly_uniform_over_allowed_tokens():
    """SPEC D1: temperature 100 flattens, but what is forbidden stays forbidden."""
    weights = probabilities(np.array([1.0, 3.0, -np.inf, 2.5], np.float32), 100.0)
    assert weights[2] == 0.0
    assert weights[[0, 1, 3]].max() / weights[[0, 1, 3]].min() < 1.03
