"""The Messages API: what its bodies ask for, and what its official client reads of the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter, ValidationError

from stoker.chat.answer import AnswerForm
from stoker.chat.reasoning import THINK
from stoker.chat.tools.formats.hermes import HERMES
from stoker.errors import InvalidRequestError, NotReadyError, QueueFullError, UnsupportedError
from stoker.ipc.events import Admitted, Delta, Finished, PrefillProgress
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Timings, Usage
from stoker.server.anthropic.messages import CountTokensRequest, MessagesRequest
from stoker.server.anthropic.writer import PING, MessageChunks, MessageHead, WholeMessage
from stoker.server.errors import messages_error
from stoker.server.inbound.gate import is_messages_path
from stoker.server.openai.conversation import ChatRequest

HEAD = MessageHead("msg_1", "m", "req-1")
FORM = AnswerForm(HERMES, ("f",), THINK)
TEXT = '<think>Hm.</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>'


def body(**fields: Any) -> MessagesRequest:
    """A request as it comes over the wire."""
    given = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, **fields}
    return MessagesRequest.model_validate_json(json.dumps(given))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


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


def streamed_calls(text: str) -> list[dict[str, Any]]:
    """The beginnings of the calls in a stream."""
    blocks = [event["content_block"] for event in streamed(text) if event["type"] == "content_block_start"]
    return [block for block in blocks if block["type"] == "tool_use"]


def whole(text: str, *end: Any) -> dict[str, Any]:
    """The message that a text becomes."""
    writer = WholeMessage(HEAD, FORM)
    for event in deltas(text, *end):
        writer.add(0, event)
    message: dict[str, Any] = json.loads(writer.whole())
    return message


def test_a_body_becomes_a_chat_completion() -> None:
    """SPEC S1: system, limits, stops, tools and the choice, and this server's own fields."""
    chat = (
        body(
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
        )
        .to_chat()
        .body
    )
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
    assert body(tool_choice=given).to_chat().body["tool_choice"] == choice


def test_blocks_become_turns() -> None:
    """SPEC D7: calls and results; a result stands before the text beside it; thoughts go with their turn."""
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
    chat = body(messages=messages).to_chat().body
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    assert chat["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "a", "tool_calls": [call], "reasoning_content": "t"},
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
        (turn("user", {"type": "text"}), InvalidRequestError, "messages.0.content.0.text"),
        (
            turn("user", {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}),
            InvalidRequestError,
            "messages.0.content.0.content.0.source",
        ),
        ({"system": [{"type": "image"}]}, UnsupportedError, "system.0"),
        ({"temperature": 1.5}, InvalidRequestError, "temperature"),
        ({"output_config": {"format": {"type": "text"}}}, InvalidRequestError, "output_config.format.type"),
        ({"output_format": {"type": "x"}}, InvalidRequestError, "output_format.type"),
        (
            {"output_config": {"format": FORMAT}, "output_format": FORMAT},
            InvalidRequestError,
            "output_format",
        ),
        ({"tool_choice": {"type": "required"}}, InvalidRequestError, "tool_choice.type"),
        ({"tool_choice": {"type": ["auto"]}}, InvalidRequestError, "tool_choice.type"),
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
    thought = [event["delta"]["type"] for event in events if event.get("index") == 0 and "delta" in event]
    assert (thought[0], thought[-1]) == ("thinking_delta", "signature_delta"), "clients keep a signed block"
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
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in streamed(TEXT):
        adapter.validate_python(event)
    message = AnthropicMessage.model_validate(whole(TEXT))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]


def test_a_whole_message_holds_the_same() -> None:
    """SPEC S1: one object; the input of a call is JSON as the model wrote it."""
    message = whole(TEXT)
    assert message["content"][:2] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "So:"},  # no null citations: Vercel's client refuses them
    ]
    assert message["content"][2]["input"] == {"a": "\ud800"}
    assert (message["stop_reason"], message["role"]) == ("tool_use", "assistant")
    assert message["usage"] == {**streamed(TEXT)[-2]["usage"], "service_tier": "standard"}
    assert message["content"][2]["id"].startswith("toolu_")
    assert message["content"][2]["id"] == streamed_calls(TEXT)[0]["id"]


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
    info = QueueFullError("full").info()
    assert messages_error(info, "req-1")["error"]["type"] == "rate_limit_error"
    writer = MessageChunks(HEAD, FORM)
    (event,) = objects(writer.fail(NotReadyError("gone").info()))
    assert event == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "gone", "code": "not_ready", "param": None},
        "request_id": "req-1",
    }


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches/1", "/messages"]
)
def test_errors_below_the_apis_root_have_its_shape(path: str) -> None:
    """SPEC S3: on routes that are not there too."""
    assert is_messages_path(path)


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v1/chat/completions", "/x/v1/messages", "/"])
def test_errors_elsewhere_have_the_usual_shape(path: str) -> None:
    """SPEC S3: OpenAI's."""
    assert not is_messages_path(path)


def test_a_message_begins_with_what_its_prompt_cost() -> None:
    """SPEC S1: from the moment that it has a slot; before that there is nothing but pings."""
    writer = MessageChunks(HEAD, FORM)
    (start,) = objects(writer.write(0, Admitted("x", 2, None, 7)))
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (5, 2, 0)
    progress = PrefillProgress(request_id="x", total=7, cached=2, processed=5, time_ms=1.5)
    (event,) = objects(writer.write(0, progress))
    assert event == {
        "type": "ping",
        "prompt_progress": {"total": 7, "cache": 2, "processed": 5, "time_ms": 1.5},
    }
    kinds = [event["type"] for event in objects(writer.write(0, Delta(request_id="x", index=0, text="a")))]
    assert kinds == ["content_block_start", "content_block_delta"]
    assert objects(PING) == [{"type": "ping"}]


@pytest.mark.parametrize(
    "fields", [{"output_config": {"effort": "low", "format": FORMAT}}, {"output_format": FORMAT}]
)
def test_a_format_is_that_of_a_chat_completion(fields: dict[str, Any]) -> None:
    """SPEC D2: by the newer name and the older one; errors name the one that was used."""
    asked = body(**fields).to_chat()
    constraint = ChatRequest.model_validate(asked.body).constraint()
    assert constraint is not None
    assert json.loads(constraint.source) == SCHEMA
    own = "output_config.format" if "output_config" in fields else "output_format"
    assert asked.origins.of("response_format.json_schema.schema") == f"{own}.schema"


def test_tools_of_the_vendors_own_kinds_are_left_out() -> None:
    """SPEC S1: they run elsewhere, or have a schema that is nowhere told; 400 only where one is forced."""
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"name": "f", "input_schema": {"type": "object"}},
        {"type": "bash_20250124", "name": "bash"},
    ]
    offer = ChatRequest.model_validate(body(tools=tools).to_chat().body).offer()
    assert [tool.name for tool in offer.tools] == ["f"]
    assert [(one.where, one.kind) for one in offer.left_out] == [
        ("tools.0", "web_search_20250305"),
        ("tools.2", "bash_20250124"),
    ]
    forced = body(tools=tools, tool_choice={"type": "tool", "name": "bash"}).to_chat().body
    with pytest.raises(UnsupportedError, match="bash_20250124") as caught:
        ChatRequest.model_validate(forced).offer()
    assert caught.value.param == "tool_choice"
    alone = body(tools=tools[:1], tool_choice={"type": "any"}).to_chat().body
    with pytest.raises(InvalidRequestError, match="web_search_20250305"):
        ChatRequest.model_validate(alone).offer()


def picture(data: str = "x") -> dict[str, Any]:
    """A block that shows something."""
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


TURNS = [
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t"},
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "and?"},
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "content": [{"type": "text", "text": "r"}, picture()],
            },
            picture(),
        ],
    },
]


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("messages.0.content", "system"),
        ("messages.1.content", "messages.0.content"),
        ("messages.2.content.0", "messages.1.content.1"),
        ("messages.3.content.1.image_url", "messages.2.content.1.content.1.source"),
        ("messages.4.content.0", "messages.2.content.0"),
        ("messages.4.content.1.image_url", "messages.2.content.2.source"),
        ("max_completion_tokens", "max_tokens"),
        ("stop", "stop_sequences"),
        ("prompt", "messages"),
        ("tools.0.function.parameters", "tools.0.input_schema"),
    ],
)
def test_places_of_the_chat_completion_lead_back_to_the_blocks(path: str, own: str) -> None:
    """SPEC S3: an error names what the caller wrote."""
    asked = body(system="s", messages=TURNS, tools=[{"name": "f", "input_schema": {}}]).to_chat()
    assert asked.origins.of(path) == own


def test_a_prompt_that_is_counted_needs_no_limit() -> None:
    """SPEC S1: the rest of the body is the same."""
    counted = CountTokensRequest.model_validate_json('{"messages": [{"role": "user", "content": "u"}]}')
    assert counted.to_chat().body == {"messages": [{"role": "user", "content": "u"}]}
