"""Bias, truncation, XTC and mirostat against llama.cpp's own samplers and independent references."""

import ctypes
import gc

import numpy as np
import pytest
from llama_cpp import llama_cpp

from stoker.errors import InvalidRequestError, StepFailedError
from stoker.ipc.request import Sampling
from stoker.sampling.logit_edits import EarlyEndBan, LogitBias
from stoker.sampling.sampler import Mirostat, Sampler, Xtc, dynamic_temperature, probabilities, zipf_count
from stoker.sampling.truncation import TruncationChain, Workspace

NO_TRUNCATION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _row(seed, num_vocab=300, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, num_vocab).astype(np.float32)


def _native(sampler, row):
    """Ids, logits and probabilities that a llama.cpp sampler leaves of `row`, in its order; frees it."""
    data = (llama_cpp.llama_token_data * len(row))()
    for token, logit in enumerate(row.tolist()):
        data[token].id, data[token].logit = token, logit
    array = llama_cpp.llama_token_data_array(
        ctypes.cast(data, llama_cpp.llama_token_data_p), len(row), -1, False
    )
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    left = [(array.data[i].id, array.data[i].logit, array.data[i].p) for i in range(array.size)]
    llama_cpp.llama_sampler_free(sampler)
    return left


def _softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def _truncate_naively(row, sampling):
    """Candidates left, by the samplers' definitions on sorted arrays."""
    ids = np.argsort(-row, kind="stable")
    if sampling.top_n_sigma > 0.0:
        ids = ids[row[ids] >= row.max() - sampling.top_n_sigma * row.std(dtype=np.float64)]
    if sampling.top_k > 0:
        ids = ids[: sampling.top_k]
    if sampling.typical_p < 1.0:
        p = _softmax(row[ids])
        surprise = -np.log(p)
        order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        ids = ids[order[: np.searchsorted(np.cumsum(p[order]), sampling.typical_p, side="right") + 1]]
        ids = ids[np.argsort(-row[ids], kind="stable")]
    if sampling.top_p < 1.0:
        ids = ids[: np.searchsorted(np.cumsum(_softmax(row[ids])), sampling.top_p) + 1]
    if sampling.min_p > 0.0:
        p = _softmax(row[ids])
        ids = ids[p >= sampling.min_p * p.max()]
    return np.sort(ids)


@pytest.mark.parametrize("num_vocab", [40, 3000])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 7},
        {"top_k": 1},
        {"top_k": 10_000},
        {"top_p": 0.5},
        {"top_p": 0.0},
        {"min_p": 0.2},
        {"typical_p": 0.6},
        {"typical_p": 0.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 0, "top_p": 0.9, "min_p": 0.0},
        {"top_k": 300, "top_p": 0.97, "min_p": 0.01, "typical_p": 0.95},
        {"top_n_sigma": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_n_sigma": 2.5, "typical_p": 0.9, "top_k": 20},
    ],
)
def test_truncation_leaves_what_the_definitions_leave(settings, num_vocab):
    """SPEC D1: top_n_sigma, top_k, typical_p, top_p, min_p in this order; ids ascend, with their logits."""
    sampling = Sampling(**settings)
    chain = TruncationChain(sampling, Workspace(num_vocab))
    for seed in range(5):
        row = _row(seed, num_vocab)
        ids, logits = chain.apply(row)
        np.testing.assert_array_equal(ids, _truncate_naively(row, sampling))
        np.testing.assert_array_equal(logits, row[ids])
    chain.close()


@pytest.mark.parametrize("num_sigmas", [0.5, 1.0, 3.0])
def test_top_n_sigma_keeps_what_llama_cpp_leaves_a_chance(num_sigmas):
    """SPEC D1: forbidden tokens count neither for the largest logit nor for the deviation."""
    chain = TruncationChain(Sampling(top_n_sigma=num_sigmas, **NO_TRUNCATION), Workspace(300))
    for seed in range(5):
        row = _row(seed)
        row[seed] = -np.inf
        left = _native(llama_cpp.llama_sampler_init_top_n_sigma(num_sigmas), row)
        assert chain.apply(row)[0].tolist() == sorted(token for token, logit, _ in left if logit > -np.inf)
    chain.close()


@pytest.mark.parametrize("settings", [(0.8, 0.5, 1.0), (0.5, 2.0, 1.5), (1.0, 1.0, 0.3)])
def test_a_dynamic_temperature_is_that_of_llama_cpp(settings):
    """SPEC D1: by entropy, from sharp rows to flat ones."""
    temperature, reach, exponent = settings
    sampling = Sampling(temperature=temperature, dynatemp_range=reach, dynatemp_exponent=exponent)
    for seed, scale in enumerate((0.01, 1.0, 3.0, 10.0)):
        row = _row(seed, scale=scale)
        left = _native(llama_cpp.llama_sampler_init_temp_ext(*settings), row)
        best = max(logit for _, logit, _ in left)
        found = dynamic_temperature(row, sampling)
        assert float(row.max()) / best == pytest.approx(found, rel=1e-4)
        assert max(0.0, temperature - reach) <= found <= temperature + reach


def test_a_dynamic_temperature_is_what_tokens_are_drawn_at():
    """SPEC D1: a range that makes every row sharp draws the likeliest, as temperature 0 does."""
    row = _row(3)
    sharp = Sampling(temperature=5.0, dynatemp_range=5.0, dynatemp_exponent=100.0, seed=1, **NO_TRUNCATION)
    plain = Sampling(temperature=5.0, seed=1, **NO_TRUNCATION)
    drawn = {name: set() for name in ("sharp", "plain")}
    for name, sampling in (("sharp", sharp), ("plain", plain)):
        sampler = Sampler(sampling, 0, [], Workspace(300))
        for _ in range(20):
            token = sampler.draw(row.copy())
            sampler.accept(token)
            drawn[name].add(token)
        sampler.close()
    assert drawn["sharp"] == {int(row.argmax())}
    assert len(drawn["plain"]) > 1


def test_truncation_switched_off_keeps_every_candidate():
    """SPEC D1: with nothing active the draw is from the whole softmax."""
    row = _row(1)
    ids, logits = TruncationChain(Sampling(**NO_TRUNCATION), Workspace(300)).apply(row)
    np.testing.assert_array_equal(ids, np.arange(300))
    np.testing.assert_array_equal(logits, row)


def test_typical_sampling_survives_logits_whose_probability_underflows():
    """SPEC D1: with a bias of 100 and forbidden tokens the entropy is still a number."""
    row = _row(2)
    row[7] += 200.0
    row[9] = -np.inf
    chain = TruncationChain(Sampling(typical_p=0.9, **NO_TRUNCATION), Workspace(300))
    ids, _ = chain.apply(row)
    assert ids.tolist() == [7]


def test_a_closed_chain_is_freed_once_and_refuses_work():
    """SPEC L4: samplers are freed on close, and closing twice is fine."""
    chain = TruncationChain(Sampling(), Workspace(300))
    chain.close()
    chain.close()
    with pytest.raises(AssertionError, match="after close"):
        chain.apply(_row(0))


def test_a_forgotten_chain_is_freed_with_its_owner(monkeypatch):
    """SPEC L4: native memory goes when the choice goes, without a garbage collection."""
    freed = []
    free = llama_cpp.llama_sampler_free
    monkeypatch.setattr(llama_cpp, "llama_sampler_free", lambda chain: (freed.append(chain), free(chain)))
    gc.disable()
    try:
        chain = TruncationChain(Sampling(), Workspace(300))
        del chain
        assert len(freed) == 1
    finally:
        gc.enable()


@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.1, 0.3, 0.5, 0.6])
def test_xtc_excludes_what_llama_cpp_excludes(threshold):
    """SPEC D1: all tokens that reach the threshold go but the least likely of them."""
    sampling = Sampling(xtc_probability=1.0, xtc_threshold=threshold)
    for seed in range(10):
        row = _row(seed, 30)
        ids, logits = np.arange(30, dtype=np.int32), row
        if Xtc.can_act(sampling):
            ids, logits = Xtc(sampling).apply(ids, row, 0.999)
        native = _native(llama_cpp.llama_sampler_init_xtc(1.0, threshold, 0, 1), row)
        assert ids.tolist() == sorted(token for token, _, _ in native)
        np.testing.assert_array_equal(logits, row[ids])


def test_xtc_happens_as_often_as_its_probability_says():
    """SPEC D1: u below xtc_probability excludes, u from there on does not."""
    xtc = Xtc(Sampling(xtc_probability=0.3, xtc_threshold=0.1))
    ids, logits = np.arange(3, dtype=np.int32), np.array([2.0, 1.9, 1.0], np.float32)
    assert xtc.apply(ids, logits, 0.29)[0].tolist() == [2]
    assert xtc.apply(ids, logits, 0.3)[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 3.0, 5.0])
def test_mirostat_keeps_and_learns_as_llama_cpp_does(tau):
    """SPEC D1: both versions keep the same candidates and move mu by the same rule."""
    for version in (1, 2):
        mirostat = Mirostat(Sampling(mirostat=version, mirostat_tau=tau, mirostat_eta=0.2, temperature=1.0))
        for seed in range(8):
            row = _row(seed, 500, scale=1.0 + seed)
            mirostat.mu = 2.0 * tau
            chances = probabilities(row, 1.0)
            kept = mirostat._surprise_kept(chances) if version == 2 else mirostat._zipf_kept(chances)
            make = (
                llama_cpp.llama_sampler_init_mirostat_v2(1, tau, 0.2)
                if version == 2
                else llama_cpp.llama_sampler_init_mirostat(500, 1, tau, 0.2, 100)
            )
            native = _native(make, row)
            assert kept.tolist() == sorted(token for token, _, _ in native)
            token = mirostat.draw(row, 0.37)
            chance = {token: p for token, _, p in native}[token]
            assert mirostat.mu == pytest.approx(2 * tau - 0.2 * (-np.log2(chance) - tau), abs=1e-4)


def test_mirostat_steers_the_surprise_to_its_target():
    """SPEC D1: over many draws the mean surprise comes close to tau."""
    for version in (1, 2):
        mirostat = Mirostat(Sampling(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.1, temperature=1.0))
        rng = np.random.default_rng(0)
        surprises = []
        for seed in range(600):
            before = mirostat.mu
            mirostat.draw(_row(seed, 400, scale=2.0), rng.random())
            surprises.append(3.0 - (mirostat.mu - before) / 0.1)
        assert abs(np.mean(surprises[100:]) - 3.0) < 0.25


@pytest.mark.parametrize("mu", [-1e6, -3.0, 0.0, 4.0, 1e6])
@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_always_keeps_a_token(version, mu):
    """SPEC D1: a bound far out of range neither empties the candidates nor overflows."""
    mirostat = Mirostat(Sampling(mirostat=version, temperature=0.5))
    for row in (_row(0), np.zeros(300, np.float32), np.where(np.arange(300) == 5, 0.0, -np.inf)):
        mirostat.mu = mu
        assert 0 <= mirostat.draw(row.astype(np.float32), 0.5) < 300
        assert np.isfinite(mirostat.mu)


def test_the_zipf_fit_takes_its_limit_at_exponent_one():
    """SPEC D1: for p ~ 1/rank the formula reads 0/0 and its limit 2**mu / ln N is meant."""
    best = 1.0 / np.arange(1, 101)
    assert zipf_count(best / best.sum(), 8.0, 1000) == int(2**8 / np.log(1000))


class _Draws:
    """What the sampler's draw tests share."""

    workspace = Workspace(300)

    @classmethod
    def sampler(cls, edits=(), **settings):
        return Sampler(Sampling(**{"seed": 1} | settings), 0, edits, cls.workspace)


def test_temperature_zero_takes_the_best_token_lowest_id_first():
    """SPEC D1: greedy is the argmax, whatever truncation says."""
    row = _row(0)
    row[[40, 50]] = row.max() + 1.0
    for settings in ({}, {"top_k": 5, "xtc_probability": 1.0}, {"mirostat": 2}, {"seed": None}):
        assert _Draws.sampler(temperature=0.0, **settings).draw(row.copy()) == 40


def test_draws_follow_the_truncated_distribution():
    """SPEC D1: 6,000 draws at temperature 0.8 against the renormalised reference, chi-square at 99.9 %."""
    settings = {"temperature": 0.8, "top_k": 5, "top_p": 1.0, "min_p": 0.0}
    row = _row(3, scale=1.0)
    kept = _truncate_naively(row, Sampling(**settings))
    expected = 6000 * _softmax(row[kept] / 0.8)
    sampler = _Draws.sampler(**settings)
    counts = dict.fromkeys(kept.tolist(), 0)
    for _ in range(6000):
        token = sampler.draw(row)
        sampler.accept(token)
        counts[token] += 1
    assert ((np.array(list(counts.values())) - expected) ** 2 / expected).sum() < 18.5


def test_xtc_decides_independently_of_the_draw():
    """SPEC D1: each has its own uniform number; sharing one would give token 0 a tenth, not three tenths."""
    row = np.log(np.array([0.6, 0.4] + [1e-9] * 298)).astype(np.float32)
    sampler = _Draws.sampler(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.3)
    counts = np.zeros(300)
    for _ in range(2000):
        token = sampler.draw(row)
        sampler.accept(token)
        counts[token] += 1
    assert abs(counts[0] / 2000 - 0.3) < 0.04
    assert counts[:2].sum() == 2000


def test_the_same_token_index_draws_the_same_token():
    """SPEC D1: drawing again without accepting repeats the draw; nothing hidden advances."""
    sampler = _Draws.sampler(temperature=2.0, **NO_TRUNCATION)
    row = _row(4)
    first = [sampler.draw(row) for _ in range(3)]
    assert len(set(first)) == 1
    sampler.accept(first[0])
    again = _Draws.sampler(temperature=2.0, **NO_TRUNCATION)
    again.accept(0)
    assert sampler.draw(row) == again.draw(row)


def test_choices_of_one_request_draw_with_consecutive_seeds():
    """SPEC Q16: choice i uses seed + i."""
    row = _row(5)
    settings = Sampling(seed=10, temperature=3.0, **NO_TRUNCATION)
    second = Sampler(settings, 2, (), _Draws.workspace).draw(row)
    assert second == _Draws.sampler(seed=12, temperature=3.0, **NO_TRUNCATION).draw(row)


def test_sampling_without_a_seed_is_refused():
    """SPEC D1: a replay could not draw the same."""
    with pytest.raises(InvalidRequestError) as caught:
        _Draws.sampler(seed=None)
    assert caught.value.param == "seed"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bias", [100.0, 1e30, np.inf])
def test_a_large_bias_forces_a_token(temperature, bias):
    """SPEC D1: +100 and more is always that token, also where native samplers sort."""
    for settings in ({}, {"top_k": 200}, {"top_k": 0, "top_p": 0.9}, {"typical_p": 0.5}):
        sampler = _Draws.sampler([LogitBias({17: bias}, 300)], temperature=temperature, **settings)
        assert sampler.draw(_row(6)) == 17


@pytest.mark.parametrize("bias", [-100.0, -np.inf])
def test_a_large_negative_bias_forbids_a_token(bias):
    """SPEC D1: the best token at -100 is never drawn."""
    for seed in range(50):
        row = _row(7)
        best = int(row.argmax())
        sampler = _Draws.sampler([LogitBias({best: bias}, 300)], seed=seed, **NO_TRUNCATION)
        assert sampler.draw(row) != best


@pytest.mark.parametrize("token", [-1, 300])
def test_a_bias_outside_the_vocabulary_is_refused_with_the_numbers(token):
    """SPEC S3: a 400 that names the field, the token and the range."""
    with pytest.raises(InvalidRequestError, match=rf"token {token}, .* 0 to 299") as caught:
        LogitBias({5: 1.0, token: 1.0}, 300)
    assert caught.value.param == "logit_bias"


def test_ends_are_forbidden_until_enough_tokens_were_drawn():
    """SPEC I7: min_tokens."""
    ban = EarlyEndBan([2, 4], 2)
    for expected in ([-np.inf, -np.inf], [-np.inf, -np.inf], [0.0, 0.0]):
        row = np.zeros(6, np.float32)
        ban.apply(row)
        assert row[[2, 4]].tolist() == expected
        assert not row[[0, 1, 3, 5]].any()
        ban.accept(1)


class _EvenOnly:
    """A mask as a grammar would give one."""

    def apply(self, row):
        row[1::2] = -np.inf

    def accept(self, token):
        pass


def test_a_mask_comes_after_the_bias_and_wins():
    """SPEC D1: bias and penalties -> mask -> truncation, so no bias brings a forbidden token back."""
    for temperature in (0.0, 1.0):
        sampler = _Draws.sampler([LogitBias({11: 100.0}, 300), _EvenOnly()], temperature=temperature)
        assert sampler.draw(_row(8)) % 2 == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_fail_the_step(value, temperature):
    """SPEC Q12: a broken row is a typed error of this sequence, not a token."""
    row = _row(9)
    row[123] = value
    with pytest.raises(StepFailedError, match="largest is"):
        _Draws.sampler(temperature=temperature).draw(row)
    with pytest.raises(StepFailedError):
        _Draws.sampler(temperature=temperature).draw(np.full(300, -np.inf, np.float32))


def test_forbidding_every_token_is_the_callers_error():
    """SPEC S3: a request that leaves nothing to draw is a 400, not a crash."""
    everything = LogitBias(dict.fromkeys(range(300), -np.inf), 300)
    with pytest.raises(InvalidRequestError, match="no token is left"):
        _Draws.sampler([everything]).draw(_row(0))
