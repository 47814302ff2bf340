"""Whole answers by the library: one call, one value, with its request's id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

import stoker.sync
from stoker import Answer, FinishReason, Runtime, TextDelta
from stoker.client.requests.stream import ToolCall
from stoker.errors import InvalidRequestError, ModelNotFoundError, RequestNotFoundError
from stoker.ipc.events import Admitted, PrefillProgress, Queued

FAKE = "fake:eog_period=0"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "additionalProperties": False}},
    }
]
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """A runtime on the fake backend."""
    async with Runtime(FAKE, isolation="thread", ctx_size=8192, slots=4, drain_s=0.0) as started:
        yield started


async def text_of(deltas: AsyncIterator[TextDelta]) -> str:
    """All of it."""
    return "".join([delta.text async for delta in deltas])


async def test_an_answer_is_what_the_stream_would_have_said(runtime: Runtime):
    """FOUND library: text, figures, reason, model and id in one value."""
    answer = await runtime.ask(HELLO, max_tokens=7, seed=3)
    assert answer.text == await text_of(runtime.chat(HELLO, max_tokens=7, seed=3)) != ""
    assert (answer.finish_reason, answer.usage.completion_tokens) == (FinishReason.LENGTH, 7)
    assert len(answer.token_ids) == 7
    assert (answer.model, answer.reasoning, answer.tool_calls) == (runtime.models[0].id, "", ())
    assert answer.request_id.startswith("req-")
    assert answer.logprobs is None
    told = await runtime.ask(HELLO, max_tokens=3, logprobs=0)
    assert [one.token_id for one in told.logprobs or ()] == list(told.token_ids)


async def test_a_text_is_a_turn_unless_it_is_raw(runtime: Runtime):
    """`chat("hi")` and `ask("hi")` are one user turn; token ids and `raw` are continued as they are (D17)."""
    how: dict[str, Any] = {"max_tokens": 9, "seed": 3}
    turn = (await runtime.ask(HELLO, **how)).text
    assert (await runtime.ask("hi", **how)).text == await text_of(runtime.chat("hi", **how)) == turn
    raw = await text_of(runtime.generate("hi", **how))
    assert raw != turn
    assert (await runtime.ask("hi", raw=True, **how)).text == raw
    tokens, _ = await runtime.tokenize("hi")
    assert (await runtime.ask(tokens, **how)).usage.prompt_tokens == len(tokens)


async def test_calls_are_part_of_the_answer(runtime: Runtime):
    """D7: whole, with the reason that goes with them."""
    answer = await runtime.ask(
        "hi", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1, max_tokens=300
    )
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    assert all(isinstance(call, ToolCall) and call.name == "look" for call in answer.tool_calls)
    assert answer.tool_calls


async def test_one_call_is_told_without_empty_deltas(runtime: Runtime):
    """FOUND library: 33 empty deltas for one call; its tokens come with it, and none is lost."""
    chat = runtime.chat(
        "hi", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1, max_tokens=300
    )
    *before, last = [delta async for delta in chat]
    assert all(delta.text or delta.reasoning or delta.tool_calls for delta in before)
    assert last.usage is not None
    assert sum(len(delta.token_ids) for delta in [*before, last]) == last.usage.completion_tokens
    with pytest.warns(DeprecationWarning, match="tool_calls"):
        assert last.calls == last.tool_calls


async def test_every_call_takes_an_id_and_its_deltas_carry_it(runtime: Runtime):
    """FOUND library: what `cancel` works on."""
    deltas = []
    async for delta in runtime.chat("hi", max_tokens=4000, request_id="mine"):
        deltas.append(delta)
        if len(deltas) == 3:
            await runtime.cancel("mine")
    assert {delta.request_id for delta in deltas} == {"mine"}
    assert deltas[-1].finish_reason is FinishReason.CANCELLED
    (only,) = [delta async for delta in runtime.generate("hi", max_tokens=1, request_id="other")]
    assert only.request_id == "other"
    with pytest.raises(RequestNotFoundError):
        await runtime.cancel("mine")


@pytest.mark.parametrize("is_chat", [True, False])
async def test_place_and_progress_are_told_beside_the_text(is_chat):
    """FOUND library, S2: who reads deltas hears of the queue and of the prompt too.

    Steps take their time here: a reader that comes late is told of the last one alone.
    """
    told: list[Any] = []
    slow = f"{FAKE},step_delay_s=0.1"
    async with Runtime(slow, isolation="thread", ctx_size=8192, slots=4, drain_s=0.0) as runtime:
        call = runtime.chat if is_chat else runtime.generate
        text = await text_of(call("hi " * 700, max_tokens=2, return_progress=True, on_notice=told.append))
    assert len(text) == 2
    kinds = [type(notice) for notice in told]
    assert kinds[0] is Queued
    assert kinds.count(Admitted) == 1
    progress = [notice.processed for notice in told if isinstance(notice, PrefillProgress)]
    assert progress == sorted(progress)
    assert len(progress) > 1
    assert progress[-1] >= len("hi " * 700)


async def test_an_answer_that_is_cancelled_has_the_text_that_there_was(runtime: Runtime):
    """L6: it is no error of its caller's, who sees the reason."""
    asked: asyncio.Task[Answer] | None = None
    async with aclosing(runtime.events()) as events:
        async for event in events:
            asked = asked or asyncio.create_task(runtime.ask("hi", max_tokens=4000, request_id="mine"))
            if event.fields.get("what") == "admitted":
                break
    await runtime.cancel("mine")
    assert asked is not None
    answer = await asked
    assert (answer.finish_reason, answer.request_id) == (FinishReason.CANCELLED, "mine")
    assert len(answer.token_ids) < 4000


@pytest.mark.parametrize(
    ("call", "text", "param"),
    [
        (lambda rt: rt.ask(None), "prompt is text or token ids, got NoneType", "prompt"),
        (lambda rt: rt.ask("hi", n=2), "one answer", "n"),
        (
            lambda rt: rt.ask("hi", temprature=1),
            "did you mean 'temperature'",
            "temprature",
        ),
        (lambda rt: rt.ask("hi", max_tokens="5"), "max_tokens: expected `int", "max_tokens"),
        (lambda rt: rt.ask("hi", temperature="hot"), "temperature: expected `float`", "temperature"),
        (lambda rt: rt.ask([]), "there are no messages and no tokens", "prompt"),
        (lambda rt: rt.ask("hi", request_id=5), "request_id is a text, got 5", "request_id"),
        (lambda rt: rt.ask("hi", request_id=""), "request_id is a text", "request_id"),
        (lambda rt: rt.ask("hi", stop=5), "stop: a list of several texts is taken, not int", "stop"),
        (lambda rt: rt.ask("hi", schema=3), "schema is a class or a JSON Schema, got int", "schema"),
        (lambda rt: rt.ask([{"content": "x"}]), "messages.0 has no role", "messages.0"),
        (lambda rt: rt.ask([{"role": "user"}]), "messages.0 has no content", "messages.0"),
        (lambda rt: anext(rt.generate(None)), "got NoneType", "prompt"),
        (lambda rt: anext(rt.generate(HELLO)), "a conversation is answered by chat or ask", "prompt"),
        (lambda rt: anext(rt.generate(["a", "b"])), "a list of other things", "prompt"),
        (lambda rt: anext(rt.chat(None)), "messages is of type NoneType", "messages"),
        (lambda rt: anext(rt.chat(["hi"])), "messages.0 is a str", "messages.0"),
        (lambda rt: rt.prepare_chat(7), "messages is of type int", "messages"),
    ],
)
async def test_what_is_no_request_is_refused_in_words(runtime: Runtime, call: Any, text: str, param: str):
    """A typed error that says what is taken, and names the field (D17, D27)."""
    with pytest.raises(InvalidRequestError) as caught:
        await call(runtime)
    assert text in caught.value.message
    assert caught.value.param == param


async def test_an_unknown_model_is_refused_before_anything_runs(runtime: Runtime):
    """S3: by its own error."""
    with pytest.raises(ModelNotFoundError):
        await runtime.ask("hi", model="x")


def test_scripts_ask_without_an_event_loop():
    """I9: the same value."""
    with stoker.sync.Runtime(FAKE, isolation="thread", drain_s=0.0) as runtime:
        answer = runtime.ask("hi", max_tokens=3)
    assert isinstance(answer, Answer)
    assert answer.usage.completion_tokens == 3
