"""The Responses API: what its bodies ask for, and what the official client reads of its answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from stoker.chat.answer import AnswerForm
from stoker.chat.reasoning import THINK
from stoker.chat.tools.formats.hermes import HERMES
from stoker.errors import InvalidRequestError, NotReadyError, UnsupportedError
from stoker.ipc.events import Admitted, Delta, Finished, PrefillProgress
from stoker.ipc.request import FinishReason, GenerateRequest, Priority, Sampling
from stoker.ipc.usage import Timings, Usage
from stoker.server.openai.conversation import ChatRequest
from stoker.server.openai.responses.body import (
    MAX_ECHO_CHARS,
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_METADATA_KEY_CHARS,
    ResponsesRequest,
)
from stoker.server.openai.responses.writer import (
    BROKEN_CALL,
    ResponseChunks,
    ResponseEvents,
    ResponseHead,
    WholeResponse,
)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED = GenerateRequest(prompt="Hi", sampling=Sampling(temperature=0.25, presence_penalty=0.5))
HEAD = ResponseHead("resp_1", "m", 17, ResponsesRequest(input="Hi", instructions="Be brief.").echo(ASKED))
# Whatever the vendor's and the Open Responses schemas require of a response object.
WHOLE = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "output"),
    *("previous_response_id", "instructions", "error", "tools", "tool_choice", "truncation", "text"),
    *("parallel_tool_calls", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "metadata"),
    *("temperature", "reasoning", "usage", "max_output_tokens", "max_tool_calls", "store", "background"),
    *("service_tier", "safety_identifier", "prompt_cache_key", "user"),
}
NEVER_NULL = {
    *("id", "status", "model", "output", "tools", "tool_choice", "truncation", "text", "metadata", "store"),
    *("parallel_tool_calls", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs"),
    *("temperature", "background", "service_tier"),
}
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
    writer = ResponseChunks(ResponseEvents(HEAD, FORM, clock=lambda: 19.5))
    return parsed(b"".join(writer.write(0, event) for event in deltas(text, reason)) + writer.end())


def whole(text: str, reason: FinishReason = FinishReason.STOP) -> Response:
    """The response that a text becomes."""
    writer = WholeResponse(ResponseEvents(HEAD, FORM, clock=lambda: 19.5))
    for event in deltas(text, reason):
        writer.add(0, event)
    return Response.model_validate_json(writer.whole())


def test_an_input_text_is_one_user_turn() -> None:
    """SPEC S1: string input, instructions, limits, tools in their flat form, and this server's own fields."""
    chat = (
        body(
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
        )
        .to_chat()
        .body
    )
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


def test_reasoning_belongs_to_the_turn_behind_it() -> None:
    """SPEC D7: what was thought, else its summary; a template decides what is shown of it."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "u"},
        thought,
        {"role": "assistant", "content": "a"},
        summed,
        call,
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        call,
        thought,
        {"role": "user", "content": "v"},
    ]
    chat = body(input=items).to_chat().body
    assert [turn["role"] for turn in chat["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
    assert [turn.get("reasoning_content") for turn in chat["messages"]] == [None, "t\ns", None, None, None]
    ChatRequest.model_validate(chat)
    with pytest.raises(InvalidRequestError) as caught:
        body(input=[{"type": "reasoning", "content": 7}]).to_chat()
    assert caught.value.param == "input.0.content"


def test_items_become_turns_and_calls_one_turn() -> None:
    """SPEC S1, D7: a loop of calls and results; reasoning that is empty is none."""
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
    chat = body(input=items).to_chat().body
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
        ({"conversation": "conv_0"}, UnsupportedError, "conversation"),
        ({"background": True}, UnsupportedError, "background"),
        ({"n": 2}, UnsupportedError, "n"),
        ({"top_logprobs": 2}, UnsupportedError, "top_logprobs"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, InvalidRequestError, "tools.0.tools"),
        ({"tools": [{"type": "namespace", "tools": []}]}, InvalidRequestError, "tools.0.name"),
        (
            {"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}},
            InvalidRequestError,
            "response_format",
        ),
        ({"input": []}, InvalidRequestError, "input"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, UnsupportedError, "input.0"),
        ({"input": [{"content": "x"}]}, InvalidRequestError, "input.0.role"),
        ({"input": [{"role": "user", "content": 7}]}, InvalidRequestError, "input.0.content"),
        (
            {"input": [{"role": "user", "content": [{"type": []}]}]},
            InvalidRequestError,
            "input.0.content.0.type",
        ),
        ({"input": [{"role": "user", "content": [{}]}]}, InvalidRequestError, "input.0.content.0.type"),
    ],
)
def test_what_is_not_served_is_refused_by_its_place(fields: dict[str, Any], error: Any, param: str) -> None:
    """SPEC S3: 400 naming the field."""
    with pytest.raises(error) as caught:
        body(**fields).to_chat()
    assert caught.value.param == param


def raw_objects(frames: bytes) -> list[dict[str, Any]]:
    """Every response object in a stream's events, as it is written."""
    data = [frame.split("\n")[1] for frame in frames.decode().split("\n\n")[:-1]]
    events = [json.loads(line.removeprefix("data: ")) for line in data]
    return [event["response"] for event in events if "response" in event]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (FinishReason.STOP, "completed"),
        (FinishReason.LENGTH, "incomplete"),
        (NotReadyError("gone"), "failed"),
    ],
)
def test_every_response_object_is_whole(end: Any, status: str) -> None:
    """SPEC S1: created, in progress and at each end: every field, and no null where a value is due."""
    writer = ResponseChunks(ResponseEvents(HEAD, FORM, clock=lambda: 19.5))
    if isinstance(end, FinishReason):
        frames = b"".join(writer.write(0, event) for event in deltas(TEXT, end)) + writer.end()
    else:
        frames = writer.write(0, Delta(request_id="x", index=0, text="So")) + writer.ending.fail(end.info())
    objects = raw_objects(frames)
    assert [found["status"] for found in objects] == ["in_progress", "in_progress", status]
    for found in objects:
        assert found.keys() >= WHOLE
        assert not [name for name in NEVER_NULL if found[name] is None]
    assert [found["completed_at"] for found in objects] == [None, None, 19 if status == "completed" else None]


@pytest.mark.parametrize("field", ["metadata", "user", "text", "reasoning"])
def test_what_a_response_would_repeat_is_bounded(field: str) -> None:
    """S4: each stream repeats it three times, on the event loop; instructions are a part of the prompt."""
    text = "x" * (MAX_ECHO_CHARS + 1)
    given = {"metadata": {"a": text}, "user": text, "text": {"a": text}, "reasoning": {"summary": text}}
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_ECHO_CHARS} are taken"):
        body(**{field: given[field]}).echo(ASKED)
    assert body(instructions=text).echo(ASKED)["instructions"] == text


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({str(number): "" for number in range(MAX_METADATA)}, None),
        ({str(number): "" for number in range(MAX_METADATA + 1)}, "metadata"),
        ({"k" * MAX_METADATA_KEY_CHARS: "v" * MAX_METADATA_CHARS}, None),
        ({"k" * (MAX_METADATA_KEY_CHARS + 1): ""}, "metadata"),
        ({"k": "v" * (MAX_METADATA_CHARS + 1)}, "metadata.k"),
    ],
)
def test_metadata_has_the_bounds_of_its_api(metadata: dict[str, str], param: str | None) -> None:
    """W10: 16 pairs, 64 characters a key, 512 a value; an error names the pair."""
    asked = body(metadata=metadata)
    if param is None:
        assert asked.to_chat().body["messages"]
        return
    with pytest.raises(InvalidRequestError) as refused:
        asked.to_chat()
    assert refused.value.param == param


def test_a_response_repeats_what_was_asked_and_tells_what_was_used() -> None:
    """SPEC S1: values that were not given are those of the sampling; a tool and a format have every field."""
    asked = body(
        tools=[{"type": "function", "name": "f"}],
        text={"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
        store=True,
        include=["reasoning.encrypted_content"],
        metadata={"a": "b"},
        max_tool_calls=3,
        prompt_cache_key="k",
        safety_identifier="s",
        user="u",
        service_tier="auto",
        truncation="disabled",
        parallel_tool_calls=False,
        reasoning={"summary": "auto"},
    )
    asked.to_chat()
    echo = asked.echo(ASKED, "tools.1 (web_search)")
    assert (echo["temperature"], echo["presence_penalty"], echo["top_p"]) == (0.25, 0.5, 0.95)
    assert echo["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}
    ]
    assert echo["text"] == {
        "format": {"type": "json_schema", "name": "n", "description": None, "schema": {}, "strict": False},
        "verbosity": "low",
    }
    assert echo["metadata"] == {"a": "b", "stoker_ignored_tools": "tools.1 (web_search)"}
    assert [echo[name] for name in ("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")] == [
        3,
        "k",
        "s",
        "u",
    ]
    assert (echo["store"], echo["service_tier"], echo["parallel_tool_calls"]) == (True, "default", False)
    assert echo["reasoning"] == {"effort": None, "summary": "auto"}
    assert body().echo(ASKED)["metadata"] == {}


@pytest.mark.parametrize(
    ("asked", "priority", "tier"),
    [
        (None, Priority.INTERACTIVE, "default"),
        ("priority", Priority.INTERACTIVE, "default"),
        ("flex", Priority.BACKGROUND, "flex"),
        ("default", Priority.BACKGROUND, "flex"),
    ],
)
def test_the_tier_is_the_class_that_the_request_ran_in(
    asked: str | None, priority: Priority, tier: str
) -> None:
    """SPEC Q1: a header may have changed it."""
    asks = body() if asked is None else body(service_tier=asked)
    assert asks.echo(GenerateRequest(prompt="", priority=priority))["service_tier"] == tier


NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [{"type": "function", "name": "close", "strict": False}, {"type": "custom", "name": "patch"}],
}


def test_functions_of_namespaces_are_offered_and_called_by_both_names() -> None:
    """SPEC S1: the model knows `agents.close`; the caller reads namespace and name, and sends them back."""
    item = {
        "type": "function_call",
        "call_id": "c",
        "name": "close",
        "namespace": "agents",
        "arguments": "{}",
    }
    tools = [{"type": "function", "name": "close"}, NAMESPACE, {"type": "web_search"}]
    choice = {"type": "function", "name": "close", "namespace": "agents"}
    asked = body(tools=tools, input=[{"role": "user", "content": "u"}, item], tool_choice=choice)
    chat = asked.to_chat().body
    assert [tool["function"]["name"] for tool in chat["tools"] if tool["type"] == "function"] == [
        "close",
        "agents.close",
    ]
    assert chat["messages"][1]["tool_calls"][0]["function"]["name"] == "agents.close"
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "agents.close"}}
    offer = ChatRequest.model_validate(chat).offer()
    assert [one.kind for one in offer.left_out] == ["custom", "web_search"]
    echoed = asked.echo(ASKED)["tools"]
    assert [tool["type"] for tool in echoed] == ["function", "namespace"]
    assert [inner["name"] for inner in echoed[1]["tools"]] == ["close"]
    head = ResponseHead("resp_1", "m", 17, asked.echo(ASKED), asked.namespaces())
    writer = WholeResponse(ResponseEvents(head, AnswerForm(HERMES, ("close", "agents.close"))))
    call = '<tool_call>\n{"name": "agents.close", "arguments": {}}\n</tool_call>'
    for event in deltas(call):
        writer.add(0, event)
    (written,) = Response.model_validate_json(writer.whole()).output
    assert written.type == "function_call"
    assert (written.namespace, written.name) == ("agents", "close")


@pytest.mark.parametrize(
    ("fields", "path", "own"),
    [
        ({"instructions": "i"}, "messages.0.content", "instructions"),
        ({"instructions": "i"}, "messages.1.content", "input"),
        (
            {"instructions": "i", "input": [{"role": "user", "content": "a"}]},
            "messages.1.role",
            "input.0.role",
        ),
        ({}, "prompt", "input"),
        ({}, "max_tokens", "max_output_tokens"),
        ({}, "temperature", "temperature"),
        ({"tools": [{"type": "function"}]}, "tools.0.function.name", "tools.0.name"),
        ({"tools": [{"type": "x"}, NAMESPACE]}, "tools.1.function.name", "tools.1.tools.0.name"),
        (
            {"text": {"format": {"type": "json_schema"}}},
            "response_format.json_schema.schema",
            "text.format.schema",
        ),
        (
            {
                "input": [
                    {"type": "reasoning"},
                    {"type": "function_call_output", "call_id": "c", "output": "o"},
                ]
            },
            "messages.0.content.0",
            "input.1.output.0",
        ),
    ],
)
def test_places_of_the_chat_completion_lead_back_to_the_input(
    fields: dict[str, Any], path: str, own: str
) -> None:
    """SPEC S3: an error names what the caller wrote."""
    assert body(**fields).to_chat().origins.of(path) == own


def test_calls_past_the_most_that_were_asked_for_are_in_no_event() -> None:
    """W10: `max_tool_calls`; the numbers go on, and what is said behind a call that is left out stays."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": %d}}\n</tool_call>\n'
    text = call % 1 + call % 2 + call % 3 + "Done."
    head = replace(HEAD, max_calls=2)
    stream = ResponseChunks(ResponseEvents(head, FORM))
    events = parsed(b"".join(stream.write(0, event) for event in deltas(text)) + stream.end())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    collected = WholeResponse(ResponseEvents(head, FORM))
    for event in deltas(text):
        collected.add(0, event)
    for response in (events[-1].response, Response.model_validate_json(collected.whole())):
        calls = [item.arguments for item in response.output if item.type == "function_call"]
        assert calls == ['{"a": 1}', '{"a": 2}']
        assert response.output_text.strip() == "Done."
    assert sum(event.type == "response.output_item.added" for event in events) == 3


def test_progress_of_the_prompt_is_a_numbered_event() -> None:
    """SPEC S2: only where it was asked for; the numbers go on."""
    writer = ResponseChunks(ResponseEvents(HEAD, FORM))
    event = PrefillProgress(request_id="x", total=9, cached=2, processed=5, time_ms=1.5)
    frames = (writer.write(0, Admitted("x", 2, None, 9)) + writer.write(0, event)).decode()
    kinds = [line.removeprefix("event: ") for line in frames.split("\n") if line.startswith("event: ")]
    assert kinds == ["response.created", "response.in_progress", "stoker:prefill_progress"]
    data = json.loads(frames.split("data: ")[-1])
    assert data["sequence_number"] == 2
    assert data["prompt_progress"] == {"total": 9, "cache": 2, "processed": 5, "time_ms": 1.5}


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


@pytest.mark.parametrize(
    ("text", "reason", "why"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a', FinishReason.LENGTH, "max_output_tokens"),
        ('<tool_call>{"name": "f", "arguments": {"a', FinishReason.STOP, BROKEN_CALL),
        ('<tool_call>{"name": "f", "arguments": {"a": 1]}', FinishReason.STOP, BROKEN_CALL),
    ],
)
def test_a_response_is_not_complete_whose_call_is_not(text: str, reason: FinishReason, why: str) -> None:
    """SPEC D4: item and response agree, and the reason is the limit only where it was the limit."""
    kept: list[dict[str, Any]] = []
    events = ResponseEvents(HEAD, FORM, kept.append)
    for event in deltas(text, reason):
        events.of(event)
    last = events.end()[-1]
    assert last["type"] == "response.incomplete"
    (stored,) = kept
    assert stored == last["response"]
    assert (stored["status"], stored["incomplete_details"]) == ("incomplete", {"reason": why})
    assert stored["completed_at"] is None
    assert stored["output"][0]["status"] == "incomplete"


def test_a_failure_within_the_stream_is_an_event() -> None:
    """SPEC S2: in band, with what was said so far."""
    writer = ResponseChunks(ResponseEvents(HEAD, FORM))
    frames = writer.write(0, Delta(request_id="x", index=0, text="So it"))
    events = parsed(frames + writer.ending.fail(NotReadyError("gone").info()))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "gone"
    assert events[-1].response.output_text == "So it"
