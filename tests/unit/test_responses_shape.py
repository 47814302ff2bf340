"""The Responses API: what its bodies ask for, and what the official client reads of its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from stoker.chat.answer import AnswerForm
from stoker.chat.reasoning import THINK
from stoker.chat.tool_formats import HERMES
from stoker.errors import InvalidRequestError, NotReadyError, UnsupportedError
from stoker.messages import Delta, Finished
from stoker.request import FinishReason
from stoker.server.schema.chat import ChatRequest
from stoker.server.schema.responses import ResponsesRequest
from stoker.server.writers.responses import ResponseChunks, ResponseHead, WholeResponse
from stoker.values import Timings, Usage

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HEAD = ResponseHead("resp_1", "m", 17, ResponsesRequest(input="Hi", instructions="Be brief.").echo())
FORM = AnswerForm(HERMES, ("f",), THINK)
TEXT = '<think>Hm.</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def body(**fields: Any) -> ResponsesRequest:
    """A request as it comes over the wire."""
    return ResponsesRequest.model_validate_json(json.dumps({"input": "Hi", **fields}))


def deltas(text: str, reason: FinishReason = FinishReason.STOP) -> list[Any]:
    """A stream of one character a delta, and its end."""
    events: list[Any] = [Delta(request_id="x", index=0, text=char, token_ids=[1]) for char in text]
    usage = Usage(prompt_tokens=7, completion_tokens=len(text), cached_tokens=2)
    last = Delta(request_id="x", index=0, finish_reason=reason)
    return [*events, last, Finished(request_id="x", usage=usage, timings=Timings())]


def parsed(frames: bytes) -> list[Any]:
    """The events of a stream, as the client's types; every frame says its type twice."""
    events = []
    for frame in frames.decode().split("\n\n")[:-1]:
        kind, data = frame.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "))
        assert kind == f"event: {event.type}"
        events.append(event)
    return events


def streamed(text: str, reason: FinishReason = FinishReason.STOP) -> list[Any]:
    """The events that a text becomes."""
    writer = ResponseChunks(HEAD, FORM)
    return parsed(b"".join(writer.write(0, event) for event in deltas(text, reason)) + writer.end())


def whole(text: str, reason: FinishReason = FinishReason.STOP) -> Response:
    """The response that a text becomes."""
    writer = WholeResponse(HEAD, FORM)
    for event in deltas(text, reason):
        writer.add(0, event)
    return Response.model_validate_json(writer.whole())


def test_an_input_text_is_one_user_turn() -> None:
    """SPEC S1: string input, instructions, limits, tools in their flat form, and this server's own fields."""
    chat = body(
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.5,
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {}}},
        truncation="auto",
        service_tier="flex",
        stream=True,
        top_k=3,
    ).to_chat()
    assert chat == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "context_shift": True,
        "service_tier": "flex",
        "stream": True,
        "top_k": 3,
    }


def test_items_become_turns_and_calls_one_turn() -> None:
    """SPEC S1, D7: a loop of calls and results; reasoning is not shown again."""
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "o"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "p"}]},
    ]
    chat = body(input=items).to_chat()
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat["messages"] == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}],
            "tool_calls": [{"id": "c1", **call}, {"id": "c2", **call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "o"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "p"}]},
    ]
    ChatRequest.model_validate(chat)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"previous_response_id": "resp_0"}, UnsupportedError, "previous_response_id"),
        ({"background": True}, UnsupportedError, "background"),
        ({"n": 2}, UnsupportedError, "n"),
        ({"top_logprobs": 2}, UnsupportedError, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, UnsupportedError, "tools.0"),
        ({"input": []}, InvalidRequestError, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, UnsupportedError, "input.0"),
        ({"input": [{"content": "x"}]}, InvalidRequestError, "input.0.role"),
        ({"input": [{"role": "user", "content": 7}]}, InvalidRequestError, "input.0.content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, InvalidRequestError, "input.0.arguments"),
    ],
)
def test_what_is_not_served_is_refused_by_its_place(fields: dict[str, Any], error: Any, param: str) -> None:
    """SPEC S3: 400 naming the field."""
    with pytest.raises(error) as caught:
        body(**fields).to_chat()
    assert caught.value.param == param


def test_a_stream_is_events_that_the_official_client_reads() -> None:
    """SPEC S1, D7: reasoning, text and a call, each an item; numbers in order; the last one has all."""
    events = streamed(TEXT)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta"),
        *("output_text.done", "function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert (told, "".join(arguments)) == ("So:", '{"a": 1}')
    assert len(arguments) > 1
    final = events[-1].response
    assert final.status == "completed"
    assert final.output_text == "So:"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert {item.status for item in final.output} == {"completed"}
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in final.output]


def test_a_whole_response_is_the_streams_last_event() -> None:
    """SPEC S1: one object, the same in both ways; usage in that API's words."""
    response = whole(TEXT)
    assert response == streamed(TEXT)[-1].response
    assert response.instructions == "Be brief."
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert (response.usage.input_tokens, response.usage.total_tokens) == (7, 7 + len(TEXT))
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < len(TEXT)


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    """SPEC D4: the reason is said; a call that was cut is no whole call, streamed or not."""
    events = streamed("So", FinishReason.LENGTH)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.output[0].status == "incomplete"
    cut = '<tool_call>{"name": "f", "arguments": {"a'
    assert streamed(cut, FinishReason.LENGTH)[-1].response.output[0].status == "incomplete"
    assert whole(cut, FinishReason.LENGTH) == streamed(cut, FinishReason.LENGTH)[-1].response


def test_a_failure_within_the_stream_is_an_event() -> None:
    """SPEC S2: in band, with what was said so far."""
    writer = ResponseChunks(HEAD, FORM)
    frames = writer.write(0, Delta(request_id="x", index=0, text="So it"))
    events = parsed(frames + writer.fail(NotReadyError("gone").info()))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "gone"
    assert events[-1].response.output_text == "So it"
