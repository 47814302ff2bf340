"""Vectors of texts, in front of a runtime that plays an encoder."""

from __future__ import annotations

import asyncio
import struct
from functools import partial

import msgspec
import numpy as np
import pytest

from encoding_runtime import ENCODER_INFO, EncodingRuntime
from stoker.backends.fake.encoder import N_EMBD, vector_of
from stoker.client.client import resolved
from stoker.errors import InvalidRequestError, QueueFullError, RequestTimeoutError, UnsupportedError
from stoker.ipc.request import GenerateRequest, Priority, StateOutput
from stoker.tasks.backpressure import MAX_IN_FLIGHT
from stoker.tasks.embed import embed_texts, require_embedding


@pytest.fixture
def runtime():
    """A runtime with one encoder."""
    return EncodingRuntime()


@pytest.fixture
def embeddings(runtime):
    """What is tested."""
    return partial(embed_texts, runtime)


def raw(text):
    """What the encoder makes of a text."""
    return vector_of(EncodingRuntime.tokens(text))


async def test_vectors_come_in_order_and_have_length_one(embeddings, runtime):
    """SPEC K2: one a text, normalised, with the tokens of all of them counted."""
    texts = [f"text {at}" for at in range(10)]
    found = await embeddings(texts, priority=Priority.BACKGROUND)
    assert found.model == "encoder"
    assert found.usage.prompt_tokens == sum(len(EncodingRuntime.tokens(text)) for text in texts)
    for text, vector in zip(texts, found.floats(), strict=True):
        assert np.allclose(vector, raw(text) / np.linalg.norm(raw(text)), atol=1e-6)
    assert {request.priority for request in runtime.requests} == {Priority.BACKGROUND}
    assert {request.state_output for request in runtime.requests} == {StateOutput.EMBED}


async def test_a_text_or_token_ids_alone_are_one_input(embeddings):
    """SPEC I9: text, token ids, or a sequence of either."""
    tokens = EncodingRuntime.tokens("one")
    single = (await embeddings("one")).vectors
    assert (await embeddings(tokens)).vectors == single
    assert (await embeddings([tuple(tokens), "one"])).vectors == single * 2
    assert (await embeddings([])).vectors == []


@pytest.mark.parametrize("texts", [3, None, [None], ["a", 3], b"a"])
async def test_what_is_no_text_is_refused_by_a_typed_error(embeddings, texts):
    """Not by a TypeError of ours (D17)."""
    with pytest.raises(InvalidRequestError, match="prompt is"):
        await embeddings(texts)


async def test_normalising_can_be_left_out_and_zeros_stay(embeddings, runtime):
    """SPEC K2: on request only; a vector of zeros has no length to be scaled to."""
    (vector,) = (await embeddings("x", normalize=False)).vectors
    assert vector == raw("x").astype("<f4").tobytes()
    runtime.vector = bytes(4 * N_EMBD)
    assert (await embeddings("x")).floats() == [[0.0] * N_EMBD]


async def test_fewer_dimensions_are_cut_before_scaling(embeddings):
    """OpenAI's `dimensions`: the first so many, of length 1 again; more than there are is refused."""
    ((first, second),) = (await embeddings("x", dimensions=2)).floats()
    assert np.isclose(first**2 + second**2, 1.0)
    assert np.isclose(first / second, raw("x")[0] / raw("x")[1], rtol=1e-5)
    for dimensions in (0, N_EMBD + 1):
        with pytest.raises(InvalidRequestError) as refused:
            await embeddings("x", dimensions=dimensions)
        assert refused.value.param == "dimensions"


async def test_only_so_many_texts_are_under_way_at_once(embeddings, runtime):
    """SPEC Q11: a long list does not fill the line; it comes all the same."""
    found = await embeddings([f"{at}" for at in range(3 * MAX_IN_FLIGHT)])
    assert len(found.vectors) == 3 * MAX_IN_FLIGHT
    assert runtime.most_live == MAX_IN_FLIGHT


async def test_a_short_line_is_used_as_far_as_it_goes(embeddings, runtime):
    """SPEC Q11: where the line is at its bound the list goes on in smaller portions."""
    runtime.max_live = 3
    texts = [f"{at}" for at in range(50)]
    found = await embeddings(texts)
    assert found.vectors == (await embed_texts(EncodingRuntime(), texts)).vectors
    assert runtime.most_live == 3


async def test_a_line_full_of_others_refuses_the_list(embeddings, runtime):
    """SPEC Q11: with nothing of its own under way there is nothing to wait for."""
    runtime.max_live = 0
    with pytest.raises(QueueFullError):
        await embeddings(["a", "b", "c"])
    assert runtime.num_live == 0


async def test_one_that_fails_ends_the_others(embeddings, runtime):
    """SPEC S5: the error is the text's own, and nothing is left running."""
    runtime.bad_text = "bad"
    with pytest.raises(InvalidRequestError, match="bad text"):
        await embeddings([*[f"{at}" for at in range(100)], "bad"])
    assert runtime.num_live == 0
    assert len(runtime.requests) <= 101


async def test_a_timeout_is_for_the_whole_list(embeddings, runtime, monkeypatch):
    """SPEC Q6: later texts have less time left; none is asked for when it is over."""
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    runtime.before = lambda: set_now(now + 1.0)

    def set_now(value):
        nonlocal now
        now = value

    with pytest.raises(RequestTimeoutError):
        await embeddings([f"{at}" for at in range(2 * MAX_IN_FLIGHT)], timeout_s=20.0)
    left = [request.timeout_s for request in runtime.requests]
    assert left == sorted(set(left), reverse=True)
    assert left[0] == 20.0
    assert min(left) > 0


async def test_a_model_that_gives_no_vector_of_texts_is_refused(embeddings, runtime):
    """SPEC K2, K3: by its class before it is asked, by its answer where the class was not known."""
    for fields, word in (
        ({"model_class": "decoder"}, "no encoder"),
        ({"model_class": "encoder-decoder"}, "its decoder"),
        ({"pooling": "rank"}, "reranker"),
    ):
        runtime.info = msgspec.structs.replace(ENCODER_INFO, **fields)
        with pytest.raises(UnsupportedError, match=word):
            await embeddings("x")
    assert runtime.requests == []
    runtime.info = msgspec.structs.replace(ENCODER_INFO, model_class="", n_embd=0)
    runtime.tensor_name = "hidden"
    with pytest.raises(UnsupportedError, match="no encoder"):
        await embeddings("x")


def test_an_encoder_is_asked_for_no_text():
    """SPEC K2: refused by what is known of the model, before it is loaded."""
    vector = GenerateRequest(prompt="x", max_tokens=0, state_output=StateOutput.EMBED)
    decoder = msgspec.structs.replace(ENCODER_INFO, model_class="decoder")
    require_embedding(ENCODER_INFO)
    assert resolved(vector, ENCODER_INFO, None).state_output is StateOutput.EMBED
    assert resolved(GenerateRequest(prompt="x"), decoder, 7).max_tokens == 7
    with pytest.raises(UnsupportedError, match="generates none"):
        resolved(GenerateRequest(prompt="x"), ENCODER_INFO, None)


async def test_bytes_are_little_endian_floats(embeddings):
    """The layout of `vectors` is one that other programs read."""
    found = await embeddings("x", normalize=False)
    assert list(struct.unpack(f"<{N_EMBD}f", found.vectors[0])) == found.floats()[0]
