"""The Messages API: what its bodies ask for, and what its official client reads of the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from stoker.chat.answer import AnswerForm
from stoker.chat.reasoning import THINK
from stoker.chat.tool_formats import HERMES
from stoker.errors import InvalidRequestError, NotReadyError, QueueFullError, UnsupportedError
from stoker.messages import Delta, Finished
from stoker.request import FinishReason
from stoker.server.schema.chat import ChatRequest
from stoker.server.schema.messages import MessagesRequest, error_answer
from stoker.server.writers.messages import MessageChunks, MessageHead, WholeMessage
from stoker.values import Timings, Usage

HEAD = MessageHead("msg_1", "m")
FORM = AnswerForm(HERMES, ("f",), THINK)
TEXT = '<think>Hm.</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>'


def body(**fields: Any) -> MessagesRequest:
    """A request as it comes over the wire."""
    given = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, **fields}
    return MessagesRequest.model_validate_json(json.dumps(given))


def deltas(text: str, reason: FinishReason = FinishReason.STOP, stop_text: str | None = None) -> list[Any]:
    """A stream of one character a delta, and its end."""
    events: list[Any] = [Delta(request_id="x", index=0, text=char, token_ids=[1]) for char in text]
    usage = Usage(prompt_tokens=7, completion_tokens=len(text), cached_tokens=2)
    last = Delta(request_id="x", index=0, finish_reason=reason, stop_text=stop_text)
    return [*events, last, Finished(request_id="x", usage=usage, timings=Timings())]


def objects(frames: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream; every frame says its type twice."""
    found = []
    for frame in frames.decode().split("\n\n")[:-1]:
        kind, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def streamed(text: str, *end: Any) -> list[dict[str, Any]]:
    """The events that a text becomes."""
    writer = MessageChunks(HEAD, FORM)
    return objects(b"".join(writer.write(0, event) for event in deltas(text, *end)) + writer.end())


def whole(text: str, *end: Any) -> dict[str, Any]:
    """The message that a text becomes."""
    writer = WholeMessage(HEAD, FORM)
    for event in deltas(text, *end):
        writer.add(0, event)
    message: dict[str, Any] = json.loads(writer.whole())
    return message


def test_a_body_becomes_a_chat_completion() -> None:
    """SPEC S1: system, limits, stops, tools and the choice, and this server's own fields."""
    chat = body(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        temperature=0.5,
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        service_tier="standard_only",
        metadata={"user_id": "x"},
        stream=True,
        top_k=3,
    ).to_chat()
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert chat == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 9,
        "stop": ["END"],
        "temperature": 0.5,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "top_k": 3,
    }
    ChatRequest.model_validate(chat)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_every_choice_has_its_counterpart(given: dict[str, Any], choice: Any) -> None:
    """SPEC D7: auto, any, tool, none."""
    assert body(tool_choice=given).to_chat()["tool_choice"] == choice


def test_blocks_become_turns() -> None:
    """SPEC D7: calls and results; a result stands before the text beside it; thoughts are not shown again."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and?"},
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
            ],
        },
    ]
    chat = body(messages=messages).to_chat()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert chat["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ]
    ChatRequest.model_validate(chat)


def turn(role: str, block: dict[str, Any]) -> dict[str, Any]:
    """A body's field with one block."""
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        (turn("assistant", {"type": "image"}), UnsupportedError, "messages.0.content.0"),
        (
            turn("assistant", {"type": "tool_use", "input": 7}),
            InvalidRequestError,
            "messages.0.content.0.input",
        ),
        (turn("user", {"type": "text"}), InvalidRequestError, "messages.0.content.0.text"),
        (
            turn("user", {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}),
            InvalidRequestError,
            "messages.0.content.0.content.0.source",
        ),
        ({"system": [{"type": "image"}]}, UnsupportedError, "system.0"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, UnsupportedError, "tools.0"),
        ({"tool_choice": {"type": "required"}}, InvalidRequestError, "tool_choice.type"),
        ({"n": 2}, UnsupportedError, "n"),
    ],
)
def test_what_is_not_served_is_refused_by_its_place(fields: dict[str, Any], error: Any, param: str) -> None:
    """SPEC S3: 400 naming the field."""
    with pytest.raises(error) as caught:
        body(**fields).to_chat()
    assert caught.value.param == param


def test_a_limit_is_needed_as_in_the_original() -> None:
    """SPEC S1: max_tokens is required there."""
    with pytest.raises(ValidationError):
        MessagesRequest.model_validate_json('{"messages": []}')


def test_a_stream_is_blocks_that_follow_one_another() -> None:
    """SPEC S1, D7: thinking, text and a call; each begun, filled and ended, then why it ended."""
    events = streamed(TEXT)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]
    pieces = [
        event["delta"].get("partial_json", "") for event in events if "index" in event and "delta" in event
    ]
    assert json.loads("".join(pieces)) == {"a": "\ud800"}
    last = events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["input_tokens"] == 5
    assert last["usage"]["cache_read_input_tokens"] == 2
    assert last["usage"]["output_tokens"] == len(TEXT)


def test_the_official_client_reads_the_stream() -> None:
    """SPEC S1: every event is one of the client's types, and a whole message too."""
    types = pytest.importorskip("anthropic.types")
    adapter: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
    for event in streamed(TEXT):
        adapter.validate_python(event)
    message = types.Message.model_validate(whole(TEXT))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]


def test_a_whole_message_holds_the_same() -> None:
    """SPEC S1: one object; the input of a call is JSON as the model wrote it."""
    message = whole(TEXT)
    assert message["content"][:2] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "So:"},
    ]
    assert message["content"][2]["input"] == {"a": "\ud800"}
    assert (message["stop_reason"], message["role"]) == ("tool_use", "assistant")
    assert message["usage"] == streamed(TEXT)[-2]["usage"]


@pytest.mark.parametrize(
    ("end", "fields"),
    [
        ((FinishReason.STOP,), ("end_turn", None)),
        ((FinishReason.STOP, "END"), ("stop_sequence", "END")),
        ((FinishReason.LENGTH,), ("max_tokens", None)),
        ((FinishReason.PREEMPTED,), ("pause_turn", None)),
    ],
)
def test_every_end_has_its_counterpart(end: Any, fields: tuple[str, str | None]) -> None:
    """SPEC D4: right on every path, streamed and not."""
    told = streamed("a", *end)[-2]["delta"]
    assert (told["stop_reason"], told["stop_sequence"]) == fields
    assert (whole("a", *end)["stop_reason"], whole("a", *end)["stop_sequence"]) == fields


def test_an_answer_cut_off_behind_a_call_was_cut_off() -> None:
    """SPEC D4: calls are the reason only where the model stopped by itself."""
    assert streamed(TEXT, FinishReason.LENGTH)[-2]["delta"]["stop_reason"] == "max_tokens"
    assert whole(TEXT, FinishReason.LENGTH)["stop_reason"] == "max_tokens"


def test_errors_have_that_apis_shape() -> None:
    """SPEC S2, S3: in a body and in the stream."""
    assert error_answer(QueueFullError("full").info())["error"]["type"] == "rate_limit_error"
    writer = MessageChunks(HEAD, FORM)
    (event,) = objects(writer.fail(NotReadyError("gone").info()))
    assert event == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "gone", "code": "not_ready"},
    }
