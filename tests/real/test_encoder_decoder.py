"""An encoder-decoder through llama.cpp, against numpy's: logits, text, and what interrupts it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from stoker import Runtime
from stoker.backends.llama.seq2seq import STEP_TOKENS, load
from stoker.backends.protocol.backend import BatchPlan, Conditioning, PlanItem
from stoker.errors import ContextLengthError, StepFailedError, UnsupportedError
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import Priority
from t5_reference import T5Reference
from tiny_models import write_t5

TEXTS = [
    "hello world.",
    "a",
    "x, y! 1234?",
    "the words of a longer text, so that distances share their buckets",
]
CLOSE = 1e-3


@pytest.fixture(scope="module")
def smoke_dir(tmp_path_factory):
    """Where the verdict of the one trial decode is kept."""
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture(scope="module")
def t5_path(tmp_path_factory):
    """A tiny model."""
    return write_t5(tmp_path_factory.mktemp("t5") / "tiny-t5.gguf")


def backend_of(path: Path, smoke_dir: Path, **fields):
    """It, loaded; close it."""
    spec = {"id": "t5", "path": str(path), "num_slots": 1, "num_threads": 1} | fields
    return load(ModelSpec(**spec), cache_dir=smoke_dir)


def source_of(backend, text):
    """A text as its encoder reads it."""
    return tuple(backend.vocabulary.tokenize(text, add_special=True, parse_special=True))


def rows_of(backend, source, tokens, size=1):
    """Logits after each token of an answer to `source`, computed `size` tokens a step."""
    backend.drop(0)
    backend.condition(0, Conditioning(source=source))
    parts = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        parts.append(backend.launch(BatchPlan((PlanItem(0, start, part, len(part)),))).rows().copy())
    return np.concatenate(parts)


@pytest.mark.parametrize(("is_gated", "is_tied"), [(True, False), (False, True)])
def test_logits_are_what_t5_gives(tmp_path, smoke_dir, is_gated, is_tied):
    """SPEC K3: gated or not, with an output matrix or scaled embeddings, near and far distances."""
    path = write_t5(tmp_path / "t5.gguf", is_gated=is_gated, is_tied=is_tied)
    reference = T5Reference(path)
    with backend_of(path, smoke_dir) as backend:
        start = backend.capabilities.decoder_start
        random = np.random.default_rng(1)
        for text, length in zip([*TEXTS, "far " * 50], (3, 9, 5, 150, 12), strict=True):
            source = source_of(backend, text)
            tokens = [start, *map(int, random.integers(3, backend.capabilities.n_vocab, length))]
            wanted = reference.logits(list(source), tokens)
            assert np.abs(rows_of(backend, source, tokens) - wanted).max() <= CLOSE * np.abs(wanted).max()


def test_a_source_ends_with_eos_and_an_answer_begins_with_the_start_token(t5_path, smoke_dir):
    """SPEC K3: the model's own keys say both."""
    with backend_of(t5_path, smoke_dir) as backend:
        assert backend.capabilities.decoder_start == 0
        assert source_of(backend, "hello")[-1] in backend.vocabulary.eog_tokens


def test_an_answer_computed_again_is_the_same_to_the_bit(t5_path, smoke_dir):
    """SPEC L3, Q4: in steps of many tokens, from a kept state, and after the encoder read something else."""
    with backend_of(t5_path, smoke_dir) as backend:
        source, other = source_of(backend, TEXTS[0]), source_of(backend, TEXTS[3])
        tokens = [0, *range(5, 60)]
        alone = rows_of(backend, source, tokens)
        assert np.array_equal(rows_of(backend, source, tokens, size=STEP_TOKENS), alone)
        rows_of(backend, source, tokens[:40])
        state = bytes(backend.export_state(0))
        between = rows_of(backend, other, tokens)
        assert not np.allclose(between, alone)
        backend.drop(0)
        backend.import_state(0, state)
        backend.condition(0, Conditioning(source=source))
        last = backend.launch(BatchPlan((PlanItem(0, 40, tokens[40:48], 8),))).rows()
        assert np.array_equal(last, alone[40:48])


def test_a_step_that_fails_changed_nothing(t5_path, smoke_dir):
    """SPEC Q12: a token that does not exist, a source that is too long or that is not there."""
    with backend_of(t5_path, smoke_dir) as backend:
        source = source_of(backend, TEXTS[0])
        first = rows_of(backend, source, [0, 7])
        for wrong in ((), tuple([5] * (backend.capabilities.n_ctx + 1))):
            backend.condition(0, Conditioning(source=wrong))
            with pytest.raises(StepFailedError, match="a source has 1 to 256 tokens"):
                backend.launch(BatchPlan((PlanItem(0, 2, (9,), 1),))).rows()
        backend.condition(0, Conditioning(source=source))
        with pytest.raises(StepFailedError):
            backend.launch(BatchPlan((PlanItem(0, 2, (9, 10_000), 1),))).rows()
        assert backend.length(0) == 2
        backend.trim(0, 1)
        assert np.array_equal(backend.launch(BatchPlan((PlanItem(0, 1, (7,), 1),))).rows()[0], first[1])


def test_what_it_cannot_be_loaded_with_is_refused(t5_path, smoke_dir):
    """SPEC K3: more than one slot, and cells that its attention does not read."""
    with pytest.raises(UnsupportedError, match=r"takes 1 slot, not 4, because"):
        backend_of(t5_path, smoke_dir, num_slots=4)
    with pytest.raises(UnsupportedError, match="cells of type 'q8_0'"):
        backend_of(t5_path, smoke_dir, kv_type="q8_0")


# ---------------------------------------------------------------- through a runtime


@pytest_asyncio.fixture
async def runtime(t5_path, smoke_dir, tmp_path):
    """A runtime that nobody told how many slots there are."""
    folders = {"cache_dir": smoke_dir, "run_dir": tmp_path / "run"}
    async with Runtime(str(t5_path), threads=1, isolation="thread", **folders) as runtime:
        yield runtime


async def answer(runtime, prompt, **fields):
    """Token ids, text, usage and finish reason of an answer."""
    wanted = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}
    deltas = [delta async for delta in runtime.generate(prompt, **wanted)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, "".join(delta.text for delta in deltas), deltas[-1]


@pytest.mark.long
async def test_greedy_text_is_the_reference_s(runtime, t5_path):
    """SPEC K3: the prompt is the source; input tokens are the source's, and no part of the answer."""
    reference = T5Reference(t5_path)
    found = set()
    for text in TEXTS:
        source, _ = await runtime.tokenize(text)
        tokens, said, last = await answer(runtime, text)
        assert tokens == reference.greedy(source, 0, -1, 24)
        assert said == await runtime.detokenize([token for token in tokens if token > 2])
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(source), 24)
        assert last.usage.cached_tokens == 0
        found.add(tuple(tokens))
    assert len(found) > 1


async def test_the_default_of_slots_becomes_one(runtime):
    """SPEC K3: and is shown so."""
    (info,) = runtime.models
    assert (info.model_class, info.num_slots) == ("encoder-decoder", 1)


async def test_choices_of_one_source_are_those_of_their_seeds(runtime):
    """SPEC Q16: they run one after the other; each is what it would be alone."""
    tokens = {0: [], 1: [], 2: []}
    fields = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    async for delta in runtime.generate(TEXTS[0], n=3, seed=7, **fields):
        tokens[delta.index] += delta.token_ids
    for index, found in tokens.items():
        alone, _, _ = await answer(runtime, TEXTS[0], seed=7 + index, **fields)
        assert found == alone


async def test_an_answer_that_gives_way_goes_on_as_if_nothing_had_been(runtime):
    """SPEC Q3, Q4: a person's request takes the one slot; the background's text is the same."""
    background = {"max_tokens": 150, "temperature": 1.5, "seed": 3, "priority": Priority.BACKGROUND}
    alone, _, _ = await answer(runtime, TEXTS[3], **background)
    begun = asyncio.Event()
    got = []

    async def disturbed():
        stream = runtime.generate(TEXTS[3], ignore_eos=True, **background)
        async for delta in stream:
            got.extend(delta.token_ids)
            last = delta
            if len(got) >= 5:
                begun.set()
        return last

    task = asyncio.create_task(disturbed())
    await begun.wait()
    between, _, _ = await answer(runtime, TEXTS[0])
    last = await task
    assert got == alone
    assert last.timings.num_preemptions >= 1
    assert between == (await answer(runtime, TEXTS[0]))[0]


@pytest.mark.long
async def test_a_killed_engine_does_not_show_in_the_text(t5_path, smoke_dir, tmp_path):
    """SPEC L3: the next engine reads the source again and goes on from the tokens that were delivered."""
    fields = {"max_tokens": 250, "temperature": 1.5, "seed": 11, "ignore_eos": True}
    async with Runtime(str(t5_path), threads=1, cache_dir=smoke_dir, run_dir=tmp_path) as runtime:
        alone, _, _ = await answer(runtime, TEXTS[3], **fields)
        first = (await runtime.status()).pid
        got, is_killed = [], False
        async for delta in runtime.generate(TEXTS[3], **fields):
            got += delta.token_ids
            if len(got) >= 20 and not is_killed:
                os.kill(first, signal.SIGKILL)
                is_killed = True
        assert got == alone
        assert (await runtime.status()).pid != first


async def test_a_source_as_long_as_the_context_is_read_and_no_longer_one(runtime):
    """SPEC K3: context_length_exceeded with both numbers."""
    tokens, _, last = await answer(runtime, [5] * 256, max_tokens=3)
    assert len(tokens) == 3
    assert last.usage.prompt_tokens == 256
    with pytest.raises(ContextLengthError) as caught:
        await answer(runtime, [5] * 257)
    assert (caught.value.details["num_tokens"], caught.value.details["n_ctx"]) == (257, 256)


async def test_an_answer_ends_where_its_context_does(runtime):
    """SPEC D4: the start token takes one of the places."""
    tokens, _, last = await answer(runtime, TEXTS[1], max_tokens=None)
    assert last.finish_reason == "length"
    assert len(tokens) == 255


async def test_constraints_stops_and_echo_are_those_of_any_model(runtime):
    """SPEC D2, D3: they are about the answer; an echo is the source."""
    _, text, last = await answer(runtime, TEXTS[0], regex="( abc| xyz)", ignore_eos=False)
    assert text in {" abc", " xyz"}
    assert last.finish_reason == "stop"
    _, whole, _ = await answer(runtime, TEXTS[0], temperature=1.5, seed=5)
    _, begun, last = await answer(runtime, TEXTS[0], temperature=1.5, seed=5, stop=[whole[6:8]])
    assert begun == whole[: whole.index(whole[6:8])]
    assert last.finish_reason == "stop"
    _, echoed, _ = await answer(runtime, TEXTS[0], echo=True, max_tokens=1)
    assert echoed.startswith(TEXTS[0])


async def test_what_only_a_continued_prompt_gives_is_refused(runtime):
    """SPEC K3: each with the reason."""
    cases = [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"context_shift": True}, "context_shift"),
        ({"state_output": "embed", "max_tokens": 0}, "model"),
    ]
    for fields, param in cases:
        with pytest.raises(UnsupportedError, match="tiny-t5 is an encoder-decoder") as caught:
            await answer(runtime, TEXTS[0], **fields)
        assert caught.value.param == param


async def test_slots_that_are_asked_for_are_refused(runtime, t5_path):
    """SPEC K3: in a load and at the start, with the reason."""
    with pytest.raises(UnsupportedError, match="takes 1 slot, not 4"):
        await runtime.load_model("tiny-t5", slots=4)
    assert (await runtime.load_model("tiny-t5", slots=1)).num_slots == 1
    with pytest.raises(UnsupportedError, match="takes 1 slot, not 4"):
        await Runtime(str(t5_path), slots=4).start()
