"""One choice from rows of logits to text, finish reason and replay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import InvalidRequestError, StepFailedError
from stoker.ipc.events import Delta
from stoker.ipc.request import FinishReason, GenerateRequest, Sampling
from stoker.sampling import Generation, Workspace

EMOJI = "🙂".encode()
PIECES = (
    [bytes([letter]) for letter in b"abcdefgh"]  # 0 to 7
    + [b"", b"</end>"]  # 8, 9: end the generation
    + [EMOJI[:1], EMOJI[1:3], EMOJI[3:], b"\xff"]  # 10 to 13: bytes of characters
    + [b" the", b" cat", "é".encode(), b"\n", b": ", b"ab", b"bc"]  # 14 to 20
)
END = 8
GREEDY = Sampling(temperature=0.0)


class _Vocabulary:
    """Bytes pieces with characters split over tokens, two end tokens and a longest-match tokenizer."""

    eog_tokens = (END, 9)

    def piece(self, token):
        return b"" if token in self.eog_tokens else PIECES[token]

    def special_piece(self, token):
        return b"<eos>" if token == END else PIECES[token]

    def is_eog(self, token):
        return token in self.eog_tokens

    def tokenize(self, text, *, add_special, parse_special):
        data, tokens = text.encode(), []
        while data:
            fits = [token for token, piece in enumerate(PIECES) if piece and data.startswith(piece)]
            best = max(fits, key=lambda token: len(PIECES[token]), default=13)
            tokens.append(best)
            data = data[len(PIECES[best]) :]
        return tokens


VOCABULARY = _Vocabulary()
WORKSPACE = Workspace(len(PIECES))


def _generation(prompt=(), index=0, **fields):
    request = GenerateRequest(prompt="", **{"sampling": GREEDY} | fields)
    return Generation(request, ("r", index), VOCABULARY, prompt, WORKSPACE)


def _delta(token, text="", **ending):
    return Delta(request_id="r", index=0, text=text, token_ids=[token], **ending)


def _row(token):
    row = np.zeros(len(PIECES), np.float32)
    row[token] = 5.0
    return row


def _force(generation, tokens):
    """Advance along `tokens` until the end; all that was drawn."""
    drawn = []
    for token in tokens:
        drawn.append(generation.advance(_row(token)))
        if drawn[-1].finish_reason is not None:
            break
    return drawn


def _text(drawn):
    return "".join(step.text for step in drawn)


def _spell(text):
    return VOCABULARY.tokenize(text, add_special=False, parse_special=False)


def test_a_step_reports_its_token_and_text():
    """SPEC D1: greedy takes the best token and delivers its text."""
    generation = _generation()
    assert generation.advance(_row(14)) == _delta(14, " the")
    assert generation.tokens == [14]


def test_an_end_token_stops_and_adds_no_text():
    """SPEC D4: end of sequence is `stop`; the token counts, its piece is not text."""
    generation = _generation()
    drawn = _force(generation, [0, 9])
    assert drawn[-1] == _delta(9, finish_reason=FinishReason.STOP)
    assert generation.tokens == [0, 9]
    assert _text(drawn) == "a"


def test_held_text_comes_out_at_the_end_of_sequence():
    """SPEC D3: the beginning of a stop string and half a character are flushed, in order."""
    drawn = _force(_generation(stop=("abc",)), [4, 19, END])
    assert [step.text for step in drawn] == ["e", "", "ab"]
    drawn = _force(_generation(), [0, 10, END])
    assert [step.text for step in drawn] == ["a", "", "\ufffd"]


def test_a_stop_string_ends_the_text_before_it():
    """SPEC D3, D4: `stop` with the string that matched; the token that completed it is reported."""
    drawn = _force(_generation(stop=("bcd", "zz")), [4, 0, 20, 3, 7])
    assert drawn[-1] == _delta(3, finish_reason=FinishReason.STOP, stop_text="bcd")
    assert _text(drawn) == "ea"


def test_overlapping_stop_beginnings_are_found_over_tokens():
    """SPEC D3: "aab" in "aaab"."""
    drawn = _force(_generation(stop=("aab",)), [0, 0, 0, 1])
    assert (_text(drawn), drawn[-1].stop_text) == ("a", "aab")


def test_text_behind_a_stop_string_in_its_token_is_dropped():
    """SPEC D3: the text ends before the match though the token goes on."""
    drawn = _force(_generation(stop=("t",)), [14])
    assert (_text(drawn), drawn[-1].stop_text) == (" ", "t")


def test_length_flushes_what_is_held():
    """SPEC D3, D4: at max_tokens the reason is `length` and held text is delivered."""
    drawn = _force(_generation(stop=("abc",), max_tokens=2), [4, 19])
    assert drawn[-1].finish_reason is FinishReason.LENGTH
    assert _text(drawn) == "eab"
    drawn = _force(_generation(max_tokens=2), [10, 11])
    assert [step.text for step in drawn] == ["", "\ufffd"]


@pytest.mark.parametrize(("token", "text"), [(14, " the"), (16, "é"), (10, "\ufffd")])
def test_max_tokens_one_gives_one_tokens_text(token, text):
    """SPEC D3: one token, its text, `length`."""
    (step,) = _force(_generation(max_tokens=1, stop=(" there",)), [token])
    assert (step.text, step.finish_reason) == (text, FinishReason.LENGTH)


def test_a_stop_at_the_last_token_is_a_stop():
    """SPEC D4: both reasons apply; `stop` says more."""
    (step,) = _force(_generation(max_tokens=1, stop=("the",)), [14])
    assert (step.text, step.finish_reason, step.stop_text) == (" ", FinishReason.STOP, "the")
    (step,) = _force(_generation(max_tokens=1), [END])
    assert (step.text, step.finish_reason) == ("", FinishReason.STOP)


def test_a_character_split_over_tokens_comes_out_whole():
    """SPEC D3: valid UTF-8 only, and a stop string may be made of split characters."""
    drawn = _force(_generation(), [10, 11, 12, 13, 0])
    assert [step.text for step in drawn] == ["", "", "🙂", "\ufffd", "a"]
    drawn = _force(_generation(stop=("🙂a",)), [1, 10, 11, 12, 0])
    assert (_text(drawn), drawn[-1].stop_text) == ("b", "🙂a")


def test_the_loop_may_end_a_choice_and_gets_what_is_held():
    """SPEC D3: context full or cancel; the held text comes once."""
    generation = _generation(stop=("abc",))
    _force(generation, [0, 10])
    assert generation.flush() == "a\ufffd"
    generation = _generation(stop=("abc",))
    assert _text(_force(generation, [4, 19])) == "e"
    assert generation.flush() == "ab"
    assert generation.flush() == ""


def test_ignore_eos_never_draws_an_end_token():
    """SPEC I7: the next best token is drawn instead, also against a bias for the end."""
    row = _row(END)
    row[9], row[2] = 4.0, 3.0
    generation = _generation(ignore_eos=True, sampling=Sampling(temperature=0.0, logit_bias={END: 100.0}))
    assert generation.advance(row).token_ids == [2]


def test_min_tokens_puts_off_end_tokens_and_stop_strings():
    """SPEC I7: until that many tokens are drawn text flows unmatched; after them stops count."""
    generation = _generation(min_tokens=3, stop=("ab",))
    row = _row(END)
    row[19] = 4.0
    drawn = [generation.advance(row.copy()) for _ in range(3)]
    assert [(step.token_ids, step.text, step.finish_reason) for step in drawn] == [([19], "ab", None)] * 3
    assert generation.advance(_row(19)).stop_text == "ab"
    generation = _generation(min_tokens=1)
    assert _force(generation, [0, END])[-1].finish_reason is FinishReason.STOP


def test_a_stop_string_does_not_reach_back_into_the_minimum():
    """SPEC I7: what was delivered below min_tokens cannot be taken back."""
    drawn = _force(_generation(min_tokens=1, stop=("ab",), max_tokens=3), [0, 1, 4])
    assert (_text(drawn), drawn[-1].finish_reason) == ("abe", FinishReason.LENGTH)


def test_logprobs_are_of_the_raw_logits():
    """SPEC D6: bias changes the draw, not the reported probabilities."""
    row = np.log(np.linspace(1, 2, len(PIECES))).astype(np.float32)
    exact = row - np.log(np.exp(row.astype(np.float64)).sum())
    bias = Sampling(temperature=0.0, logit_bias={3: 100.0, 20: -np.inf})
    drawn = _generation(sampling=bias, logprobs=2).advance(row.copy())
    assert drawn.token_ids == [3]
    assert drawn.logprobs[0].logprob == pytest.approx(exact[3], abs=1e-6)
    assert [(token, text) for token, text, _ in drawn.logprobs[0].top] == [(20, b"bc"), (19, b"ab")]
    assert drawn.logprobs[0].top[0][2] == pytest.approx(exact[20], abs=1e-6)
    assert _generation(logprobs=0).advance(_row(END)).logprobs[0].token_bytes == b"<eos>"
    assert _generation().advance(row).logprobs is None


def test_penalties_look_back_over_the_prompt_and_the_generation():
    """SPEC D1: a token of the prompt, then one just drawn, lose to the next best."""
    row = np.zeros(len(PIECES), np.float32)
    row[[4, 5, 6]] = [3.0, 2.9, 2.8]
    generation = _generation(prompt=[4], sampling=Sampling(temperature=0.0, presence_penalty=1.0))
    assert [generation.advance(row.copy()).token_ids[0] for _ in range(2)] == [5, 6]


def test_dry_breaks_a_repetition():
    """SPEC D1: after "a b c ... a b" the c is penalised, but not across a breaker."""
    sampling = Sampling(temperature=0.0, dry_multiplier=9.0, dry_sequence_breakers=("\n",))
    row = _row(2)
    assert _generation(prompt=[0, 1, 2, 5, 0, 1], sampling=sampling).advance(row.copy()).token_ids != [2]
    assert _generation(prompt=[0, 1, 2, 5, 0, 17, 1], sampling=sampling).advance(row.copy()).token_ids == [2]


def test_a_bias_outside_the_vocabulary_is_refused():
    """SPEC S3: found when the vocabulary is known, as a 400 that names the field."""
    with pytest.raises(InvalidRequestError) as caught:
        _generation(sampling=Sampling(logit_bias={len(PIECES): 1.0}, seed=1))
    assert caught.value.param == "logit_bias"


def test_a_broken_row_raises_and_draws_nothing():
    """SPEC Q12: the sequence fails alone; its tokens stay as they were."""
    generation = _generation(logprobs=1)
    row = _row(0)
    row[3] = np.nan
    with pytest.raises(StepFailedError):
        generation.advance(row)
    assert generation.tokens == []


def test_a_finished_generation_does_not_go_on():
    """SPEC L6: one end; drawing after it is a bug that says where."""
    generation = _generation()
    _force(generation, [END])
    with pytest.raises(AssertionError, match="after its end"):
        generation.advance(_row(0))


def test_choices_differ_and_each_is_the_run_with_its_own_seed():
    """SPEC Q16: choice i draws with seed + i."""
    texts = {}
    for seed, index in ((1, 0), (1, 1), (2, 0)):
        sampling = Sampling(seed=seed, temperature=5.0)
        generation = _generation(index=index, sampling=sampling, ignore_eos=True)
        for _ in range(20):
            generation.advance(np.zeros(len(PIECES), np.float32))
        texts[seed, index] = generation.tokens
    assert texts[1, 1] == texts[2, 0] != texts[1, 0]


def test_close_may_be_called_twice():
    """SPEC L4: freeing is idempotent."""
    generation = _generation(sampling=Sampling(seed=1))
    generation.close()
    generation.close()


_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    typical_p=st.sampled_from([0.5, 1.0]),
    mirostat=st.sampled_from([0, 0, 1, 2]),
    mirostat_tau=st.sampled_from([1.0, 3.0]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_allowed_length=st.integers(0, 2),
    dry_penalty_last_n=st.sampled_from([-1, 4]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    repeat_last_n=st.sampled_from([-1, 0, 3, 64]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    logit_bias=st.dictionaries(st.integers(0, len(PIECES) - 1), st.sampled_from([-1.0, 2.0]), max_size=3),
    seed=st.integers(-(2**63), 2**64 - 1),
)
_REQUESTS = st.builds(
    GenerateRequest,
    prompt=st.just(""),
    sampling=_SAMPLINGS,
    max_tokens=st.sampled_from([None, 1, 12]),
    min_tokens=st.sampled_from([0, 5]),
    stop=st.sampled_from([(), ("ab", "e f"), ("🙂", "cat the")]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 3]),
)


def _source(tokens):
    """Logits as a model gives them: a function of the token history."""
    rng = np.random.default_rng([len(tokens), *tokens[-3:]])
    return rng.normal(0, 2, len(PIECES)).astype(np.float32)


def _run(generation, num_steps):
    drawn = []
    while generation.finish_reason is None and len(drawn) < num_steps:
        drawn.append(generation.advance(_source(generation.tokens)))
    return drawn


@settings(deadline=None)
@given(
    _REQUESTS, st.lists(st.integers(0, len(PIECES) - 1), max_size=30), st.integers(0, 24), st.integers(0, 3)
)
def test_a_replayed_generation_goes_on_as_the_unbroken_one(request, prompt, cut, index):
    """SPEC D1, L3: after a crash every later step is identical: tokens, text, logprobs, end and mu."""
    whole = _run(Generation(request, ("r", index), VOCABULARY, prompt, WORKSPACE), 25)
    delivered = whole[: min(cut, len(whole) - 1)]
    resumed = Generation(request, ("r", index), VOCABULARY, prompt, WORKSPACE)
    resumed.replay(
        [step.token_ids[0] for step in delivered], delivered[-1].mirostat_mu if delivered else None
    )
    assert _run(resumed, 25 - len(delivered)) == whole[len(delivered) :]


@settings(deadline=None)
@given(_REQUESTS, st.integers(0, 3))
def test_delivered_text_is_the_decoded_tokens_up_to_the_stop(request, index):
    """SPEC D3: whatever was held and flushed, the text adds up and is valid UTF-8."""
    generation = Generation(request, ("r", index), VOCABULARY, [], WORKSPACE)
    text = _text(_run(generation, 25)) + generation.flush()
    data = b"".join(VOCABULARY.piece(token) for token in generation.tokens)
    full = data.decode(errors="replace")
    assert full.startswith(text) if generation.stop_text else full == text
    if generation.stop_text:
        assert full[len(text) :].startswith(generation.stop_text)
    text.encode()
