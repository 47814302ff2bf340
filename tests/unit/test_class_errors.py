"""What models of each class refuse: always a typed error of the caller's, naming the model and the reason."""

from __future__ import annotations

import pytest
import pytest_asyncio

from every_class import DECODER, ENCODER, RECURRENT, RERANKER, SEQ2SEQ, runtime_of
from stoker.errors import UnsupportedError
from stoker.ipc.request import IMAGE_MARKER, GenerateRequest, Picture

NO_ENCODER = "no encoder: this model does not support embeddings"
UNREADABLE = "for its decoder to read"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(tmp_path_factory):
    """A model of every class."""
    async with runtime_of(tmp_path_factory.mktemp("classes")) as runtime:
        yield runtime


async def text(runtime, model):
    """Continue a prompt."""
    return [delta async for delta in runtime.generate("hello", model=model, max_tokens=2)]


async def vector(runtime, model):
    """A text's vector."""
    return await runtime.embed("hello", model=model)


async def ranking(runtime, model):
    """Score documents."""
    return await runtime.rerank("hello", ["world"], model=model)


async def state_embedding(runtime, model):
    """The state that a prompt leaves."""
    return await runtime.states.embed("hello", model=model)


async def saved_state(runtime, model):
    """Keep a state."""
    return await runtime.states.save("hello", model=model)


async def begun_text(runtime, model):
    """Continue a prompt from a state."""
    return [delta async for delta in runtime.generate("hello", model=model, state=b"0" * 64)]


async def choice(runtime, model):
    """Choose between texts."""
    return await runtime.choose("hello", ["a", "b"], model=model)


async def reading(runtime, model):
    """Show it a picture."""
    picture = Picture(width=8, height=8, rgb=bytes(192))
    request = GenerateRequest(prompt=f"{IMAGE_MARKER}hi", pictures=(picture,), model=model, max_tokens=2)
    return [event async for event in runtime.stream(request)]


async def four_slots(runtime, model):
    """Load it with four slots."""
    return await runtime.load_model(model, slots=4)


async def prompt_logprobs(runtime, model):
    """How likely the prompt was."""
    return [delta async for delta in runtime.generate("hello", model=model, prompt_logprobs=1)]


REFUSED = [
    (text, ENCODER, "it embeds texts and generates none"),
    (text, RERANKER, "it embeds texts and generates none"),
    (vector, SEQ2SEQ, UNREADABLE),
    (vector, DECODER, NO_ENCODER),
    (vector, RECURRENT, NO_ENCODER),
    (vector, RERANKER, "it scores, it gives no vectors"),
    (ranking, DECODER, "scored by an encoder"),
    (ranking, RECURRENT, "scored by an encoder"),
    (ranking, SEQ2SEQ, "scored by an encoder"),
    (ranking, ENCODER, "without a classifier"),
    (four_slots, SEQ2SEQ, "takes 1 slot, not 4"),
    (begun_text, DECODER, "no recurrent state"),
    (begun_text, ENCODER, "no recurrent state"),
    (begun_text, SEQ2SEQ, "no recurrent state"),
    (saved_state, DECODER, "no recurrent state"),
    (saved_state, SEQ2SEQ, "no recurrent state"),
    (saved_state, RERANKER, "no recurrent state"),
    (state_embedding, SEQ2SEQ, UNREADABLE),
    (state_embedding, ENCODER, "leaves no state"),
    (state_embedding, RERANKER, "leaves no state"),
    (choice, ENCODER, "continues no prompt"),
    (choice, RERANKER, "continues no prompt"),
    (choice, SEQ2SEQ, "continues no prompt"),
    (reading, DECODER, "takes no pictures"),
    (reading, SEQ2SEQ, "takes no pictures"),
    (reading, ENCODER, "generates none"),
    (reading, RECURRENT, "takes no pictures"),
    (prompt_logprobs, SEQ2SEQ, "gives no probabilities"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("asked", "model", "why"), REFUSED, ids=lambda part: getattr(part, "__name__", None) or str(part)[:20]
)
async def test_what_a_class_cannot_do_is_refused_with_the_reason(runtime, asked, model, why):
    """SPEC K2, K3, K4, K5, V2: a 400 of code `unsupported` that names the model."""
    with pytest.raises(UnsupportedError) as caught:
        await asked(runtime, model)
    assert caught.value.http_status == 400
    assert model in caught.value.message
    assert why in caught.value.message


@pytest.mark.asyncio(loop_scope="module")
async def test_what_each_class_is_for_works_beside_the_others(runtime):
    """SPEC K1: one runtime serves all of them, and a refusal has harmed none."""
    for model in (DECODER, SEQ2SEQ, RECURRENT):
        assert (await text(runtime, model))[-1].finish_reason is not None
    assert (await vector(runtime, ENCODER)).vectors
    assert (await ranking(runtime, RERANKER)).results
    assert (await saved_state(runtime, RECURRENT)).id
    assert (await state_embedding(runtime, DECODER)).shape
