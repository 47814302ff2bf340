"""Draws from the largest logits of many rows at once, against draws from each whole row."""

import ctypes
import math

import numpy as np
import pytest
from llama_cpp import llama_cpp

from stoker.backends.protocol.backend import Candidates
from stoker.errors import InvalidRequestError, StepFailedError
from stoker.ipc.request import Sampling
from stoker.sampling.logit_edits import EarlyEndBan, LogitBias, RepeatPenalty
from stoker.sampling.sampler import Sampler, Stream, pick, probabilities, uniform
from stoker.sampling.together import draw_rows, draw_together, plain_samplers
from stoker.sampling.truncation import Workspace, largest

NUM_VOCAB = 2000
COUNT = 64
WORKSPACE = Workspace(NUM_VOCAB)
KINDS = {
    "greedy": {"temperature": 0.0},
    "defaults": {},
    "hot": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.0},
    "top k alone": {"top_k": 30, "top_p": 1.0, "min_p": 0.0},
    "one": {"top_k": 1},
    "typical": {"typical_p": 0.7},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "dynamic": {"dynatemp_range": 0.5},
    "cold": {"temperature": 1e-12},
}


def _rows(num_rows, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, (num_rows, NUM_VOCAB)).astype(np.float32)


def _best(rows, count=COUNT):
    """As a device finds them: equal logits in an order of its own."""
    shuffled = np.random.default_rng(1).permutation(rows.shape[1])
    order = shuffled[np.argsort(-rows[:, shuffled], axis=1, kind="stable")[:, :count]]
    logits = np.take_along_axis(rows, order, axis=1)
    logits[np.isnan(rows).any(axis=1), 0] = np.nan
    return Candidates(order.astype(np.int32), logits)


def _sampler(kind, seed, edits=()):
    return Sampler(Sampling(seed=seed, **KINDS[kind]), 0, edits, WORKSPACE)


def _drawn(sampler, row):
    try:
        return sampler.draw(row.copy())
    except (StepFailedError, InvalidRequestError) as error:
        return type(error)


def _draw_natively(row, sampling):
    """The draw as it was before rows were cut first: llama.cpp's whole chain over the vocabulary."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in (
        llama_cpp.llama_sampler_init_top_k(sampling.top_k),
        llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
        llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1),
    ):
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    data = (llama_cpp.llama_token_data * len(row))()
    for token, logit in enumerate(row.tolist()):
        data[token].id, data[token].logit = token, logit
    array = llama_cpp.llama_token_data_array(data, len(row), -1, False)
    llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
    left = sorted((data[at].id, data[at].logit) for at in range(array.size))
    llama_cpp.llama_sampler_free(chain)
    weights = probabilities(np.array([logit for _, logit in left], np.float32), sampling.temperature)
    return left[pick(weights, uniform(sampling.seed, 0, Stream.TOKEN))][0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_of_a_row_draw_what_the_whole_row_draws(kind):
    """B6, D1: same seed, same logits, same id, for every way to draw that the best are enough for."""
    rows = _rows(100)
    samplers = [_sampler(kind, seed) for seed in range(len(rows))]
    assert all(sampler.num_needed <= COUNT for sampler in samplers)
    expected = [sampler.draw(row.copy()) for sampler, row in zip(samplers, rows, strict=True)]
    assert draw_together(samplers, _best(rows), WORKSPACE) == expected
    if kind in {"defaults", "hot", "top k alone"}:
        assert len(set(expected)) > 50, "a test of one token tells nothing"


def test_a_step_of_whole_rows_is_drawn_from_as_each_row_is():
    """D1: whatever its requests ask for; who needs more of a row than its best draws from it alone."""
    rows = _rows(66, seed=11)
    kinds = [*KINDS] * 8
    samplers = [_sampler(kind, seed) for seed, kind in enumerate(kinds[:60])]
    best, penalties = int(rows[60].argmax()), Sampling(repeat_penalty=1.5)
    samplers += [
        _sampler("greedy", 60, [LogitBias({best: -100.0}, NUM_VOCAB)]),
        _sampler("defaults", 61, [EarlyEndBan(largest(rows[61], 2).tolist(), 5)]),
        _sampler("greedy", 62, [RepeatPenalty(penalties, rows[62].argsort()[-3:].tolist())]),
        Sampler(Sampling(seed=63, top_k=0), 0, [], WORKSPACE),
        Sampler(Sampling(seed=64, top_k=1500), 0, [], WORKSPACE),
        _sampler("defaults", 65),
    ]
    rows[5, 7], rows[65, 3] = np.nan, np.inf
    raw = rows.copy()
    drawn = draw_rows(samplers, rows, WORKSPACE)
    np.testing.assert_array_equal(rows, raw)
    alone = {at for at, token in enumerate(drawn) if token is None}
    assert alone == {5, 60, 62, 63, 64, 65}
    for at in set(range(66)) - alone:
        assert drawn[at] == samplers[at].draw(rows[at].copy()), f"row {at}"


def test_samplers_of_every_kind_draw_together():
    """B6: one call for a step, whatever its requests ask for."""
    rows = _rows(60, seed=3)
    kinds = [*KINDS] * 7
    samplers = [_sampler(kind, seed) for seed, kind in enumerate(kinds[:60])]
    expected = [sampler.draw(row.copy()) for sampler, row in zip(samplers, rows, strict=True)]
    assert draw_together(samplers, _best(rows), WORKSPACE) == expected


PLAIN = ("defaults", "hot", "top k alone", "one", "cold")


def test_samplers_that_stay_the_same_draw_the_same_step_after_step():
    """D1, B6: what is kept of them between steps is what stays; every step has numbers of its own."""
    samplers = [_sampler(PLAIN[seed % len(PLAIN)], seed) for seed in range(30)]
    plain = plain_samplers(samplers)
    for step in range(6):
        best = _best(_rows(30, seed=20 + step))
        expected = draw_together(samplers, best, WORKSPACE)
        assert plain.draw(best, WORKSPACE) == expected
        for sampler, token in zip(samplers, expected, strict=True):
            sampler.accept(token)


def test_ties_and_rows_that_are_no_numbers_are_seen_in_samplers_that_stay_the_same():
    """B6, Q12: ties count by lower id; what is wrong with a row is found out row by row."""
    samplers = [_sampler("defaults", seed) for seed in range(40)]
    rows = np.round(_rows(40, seed=7) * 8.0) / np.float32(8.0)
    plain = plain_samplers(samplers)
    assert plain.draw(_best(rows), WORKSPACE) == draw_together(samplers, _best(rows), WORKSPACE)
    rows[7, 3] = np.nan
    assert plain.draw(_best(rows), WORKSPACE) is None


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(PLAIN)))
def test_other_ways_to_draw_are_not_taken_for_plain_ones(kind):
    """D1: one among them is enough."""
    samplers = [_sampler("defaults", seed) for seed in range(4)]
    assert plain_samplers(samplers)
    assert plain_samplers([*samplers, _sampler(kind, 4)]) is None
    assert plain_samplers(samplers[:1]) is None, "one by itself is quicker"
    assert plain_samplers([*samplers, _sampler("defaults", 4, [LogitBias({5: -1.0}, NUM_VOCAB)])]) is None
    by_sigma = Sampler(Sampling(seed=4, top_n_sigma=1.0), 0, [], WORKSPACE)
    assert plain_samplers([*samplers, by_sigma]) is None, "it needs the whole row"


def test_what_was_closed_is_not_drawn_from():
    """D1: an assertion, and no native memory that was freed."""
    samplers = [_sampler("defaults", seed) for seed in range(3)]
    plain = plain_samplers(samplers)
    samplers[1].close()
    with pytest.raises(AssertionError, match="after close"):
        plain.draw(_best(_rows(3)), WORKSPACE)


def test_the_draw_is_what_the_native_chain_over_the_vocabulary_gives():
    """D1: cutting a row before llama.cpp's chain sees it changes no draw."""
    for seed, row in enumerate(_rows(40, seed=5, scale=1.0)):
        for settings in ({}, {"top_k": 300, "top_p": 0.99, "min_p": 0.001}, {"top_k": 7, "temperature": 2.0}):
            sampling = Sampling(seed=seed, **settings)
            assert Sampler(sampling, 0, [], WORKSPACE).draw(row.copy()) == _draw_natively(row, sampling)


@pytest.mark.parametrize("kind", ["greedy", "defaults", "top k alone", "typical"])
def test_equal_logits_count_by_lower_id(kind):
    """B6: a device may give them in any order; rows of few distinct values have ties at every edge."""
    rows = np.round(_rows(80, seed=7) * 8.0) / np.float32(8.0)
    samplers = [_sampler(kind, seed) for seed in range(len(rows))]
    expected = [sampler.draw(row.copy()) for sampler, row in zip(samplers, rows, strict=True)]
    assert draw_together(samplers, _best(rows), WORKSPACE) == expected


def test_tokens_that_are_lowered_make_room_for_the_next_best():
    """B6, D1: bans and negative biases act on the best alone, of which so many more are needed."""
    rows = _rows(50, seed=9)
    for kind in ("greedy", "defaults", "typical"):
        samplers = []
        for seed, row in enumerate(rows):
            best = largest(row, 6).tolist()
            biases = dict(zip(best[:4], (-math.inf, -3.5, -0.1, 0.0), strict=True))
            samplers.append(_sampler(kind, seed, [LogitBias(biases, NUM_VOCAB), EarlyEndBan(best[4:], 2)]))
        expected = [sampler.draw(row.copy()) for sampler, row in zip(samplers, rows, strict=True)]
        assert samplers[0].num_needed == (1 if kind == "greedy" else 40) + 6
        assert draw_together(samplers, _best(rows), WORKSPACE) == expected


@pytest.mark.parametrize(
    ("settings", "edits"),
    [
        ({"top_k": 0}, []),
        ({"top_n_sigma": 1.0}, []),
        ({"mirostat": 2}, []),
        ({}, [LogitBias({5: 1.0}, NUM_VOCAB)]),
        ({}, [RepeatPenalty(Sampling(repeat_penalty=1.1), [1, 2])]),
    ],
)
def test_what_may_change_any_token_needs_the_whole_row(settings, edits):
    """B6: decided by the settings alone, before the first token."""
    assert Sampler(Sampling(seed=1, **settings), 0, edits, WORKSPACE).num_needed is None


def test_a_row_that_is_no_number_fails_alone():
    """B6, Q12: a NaN anywhere in the row, an infinity, or nothing finite; the rows beside it are drawn."""
    rows = _rows(5, seed=11)
    rows[1, 1700], rows[2, 3], rows[3] = np.nan, np.inf, -np.inf
    for kind in ("greedy", "defaults", "xtc"):
        samplers = [_sampler(kind, seed) for seed in range(5)]
        found = draw_together(samplers, _best(rows), WORKSPACE)
        assert [type(each) for each in found] == [int, StepFailedError, StepFailedError, StepFailedError, int]
        expected = [_drawn(sampler, row) for sampler, row in zip(samplers, rows, strict=True)]
        assert [each if isinstance(each, int) else type(each) for each in found] == expected


@pytest.mark.parametrize("kind", ["greedy", "defaults", "xtc"])
def test_a_row_that_is_no_number_fails_whatever_stands_beside_it(kind):
    """B6, Q12: also where other candidates of it are equal or lowered, and are put in order again."""
    rows = np.round(_rows(3, seed=11) * 8.0) / np.float32(8.0)
    rows[1, 1700] = np.nan
    banned = LogitBias({int(np.argsort(-rows[1])[5]): -math.inf}, NUM_VOCAB)
    for edits in ([], [banned]):
        found = draw_together([_sampler(kind, seed, edits) for seed in range(3)], _best(rows), WORKSPACE)
        assert [type(each) for each in found] == [int, StepFailedError, int]


def test_what_is_drawn_after_a_token_does_not_depend_on_how_that_was_drawn():
    """D1: the uniform number is the token's own, for who has drawn those before and who has not."""
    drawing, before = _sampler("hot", 5), []
    for row in _rows(30, seed=17):
        found, resumed = _best(row[np.newaxis]), _sampler("hot", 5)
        for token in before:
            resumed.accept(token)
        before += draw_together([drawing], found, WORKSPACE)
        assert before[-1:] == draw_together([resumed], found, WORKSPACE)
        drawing.accept(before[-1])
    assert len(set(before)) > 20, "a test of one token tells nothing"


def test_forbidden_and_impossible_tokens_keep_their_place():
    """D1: where fewer than top_k tokens are possible, the draw is that of the native chain over them all."""
    row = np.full(NUM_VOCAB, -np.inf, np.float32)
    row[[5, 700, 1999]] = [1.0, 1.5, 0.5]
    for seed in range(20):
        for settings in ({}, {"dynatemp_range": 0.5}, {"top_p": 1.0, "min_p": 0.0}):
            sampler = Sampler(Sampling(seed=seed, **settings), 0, [], WORKSPACE)
            token = sampler.draw(row.copy())
            assert token in {5, 700, 1999}
            assert draw_together([sampler], _best(row[np.newaxis]), WORKSPACE) == [token]


@pytest.mark.parametrize("count", [1, 7, 40, 255, 256, 257, 1999, 2000, 3000])
def test_the_largest_are_those_of_a_full_sort(count):
    """D1: a bound from blocks of a row leaves none of them out; ties by lower index, forbidden ones last."""
    for seed in range(5):
        values = np.round(_rows(1, seed)[0] * 4)
        values[np.random.default_rng(seed).random(NUM_VOCAB) < 0.5 * (seed % 3)] = -np.inf
        expected = np.argsort(-values, kind="stable")[:count]
        np.testing.assert_array_equal(largest(values, count), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_by_itself_is_drawn_as_among_others(kind):
    """B6: with ties at the top, with a ban of its best, and with a ban of what is not among its best."""
    rows = np.round(_rows(30, seed=13) * 8.0) / np.float32(8.0)
    found = _best(rows)
    for bias in ("none", "best", "worst"):
        for at, row in enumerate(rows):
            token = {"best": int(row.argmax()), "worst": int(row.argmin())}.get(bias)
            edits = [] if token is None else [LogitBias({token: -math.inf}, NUM_VOCAB)]
            sampler = _sampler(kind, at, edits)
            expected = sampler.draw(row.copy())
            assert draw_together([sampler], found[at : at + 1], WORKSPACE) == [expected]
