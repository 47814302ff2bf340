"""The streams of the two typed APIs, each event held against what the official client declares."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest
import stand_in
from pydantic import TypeAdapter
from stand_in import FINISHED, INFO, delta

from stoker.errors import NotReadyError
from stoker.ipc.request import FinishReason

TEMPLATE = "{{ tools }}<tool_call></tool_call></think>"
TEXT = (
    '<think>Hm.</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
)
BROKEN = 'So: <tool_call>\n{"name": "f", "arguments": {"a": 1'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
RESPONSE = {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "stream": True}
MESSAGE = {
    "max_tokens": 99,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "stream": True,
}
TEXTS = [
    (TEXT, FinishReason.STOP),
    (TEXT, FinishReason.LENGTH),
    (BROKEN, FinishReason.LENGTH),
    ("", FinishReason.STOP),
]


@pytest.fixture(autouse=True)
def _reasoning_model(monkeypatch):
    """The stand-in's model has a template that knows tools and reasoning."""
    monkeypatch.setattr(stand_in, "INFO", msgspec.structs.replace(INFO, chat_template=TEMPLATE))


def events_of(scripted, http, route, body, steps):
    """(name of the frame, its data) of a stream that plays `steps`."""
    scripted.call(lambda: scripted.runtime.scripts.append(steps))
    with http.stream("POST", route, json={"model": "default", **body}) as answer:
        assert answer.status_code == 200
        frames = [frame for frame in answer.read().decode().split("\n\n") if frame and frame[0] != ":"]
    if route == "/v1/responses":  # Open Responses wants it, whatever the end is
        assert frames.pop() == "data: [DONE]"
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def characters(text, reason):
    """A script that says `text`, a character a delta."""
    return [*(delta(char) for char in text), delta("", finish_reason=reason), FINISHED]


@pytest.mark.parametrize(("text", "reason"), TEXTS)
def test_every_event_of_a_response_is_as_its_client_declares_it(
    scripted, scripted_http, text, reason, recwarn
):
    """S1: validated, not merely parsed; numbers count up, names agree, the last says how it went."""
    from openai.types.responses import ResponseStreamEvent  # noqa: PLC0415 - takes a second

    adapter = TypeAdapter(ResponseStreamEvent)
    recwarn.clear()  # what the client's own types warn of
    events = events_of(scripted, scripted_http, "/v1/responses", RESPONSE, characters(text, reason))
    for number, (name, data) in enumerate(events):
        event = adapter.validate_python(data)
        assert (event.type, event.sequence_number) == (name, number)
    is_whole = reason is FinishReason.STOP
    assert events[-1][0] == ("response.completed" if is_whole else "response.incomplete")
    assert events[-1][1]["response"]["timings"]["predicted_n"] == FINISHED.usage.completion_tokens
    closed = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert closed == events[-1][1]["response"]["output"]
    written = {}
    for name, data in events:
        if name == "response.function_call_arguments.delta":
            written[data["item_id"]] = written.get(data["item_id"], "") + data["delta"]
    assert written == {item["id"]: item["arguments"] for item in closed if item["type"] == "function_call"}


@pytest.mark.parametrize(("text", "reason"), TEXTS)
def test_every_event_of_a_message_is_as_its_client_declares_it(scripted, scripted_http, text, reason):
    """S1: validated; blocks open and close in turn, and no call is left with arguments that are no JSON."""
    from anthropic.types import RawMessageStreamEvent  # noqa: PLC0415 - takes a second

    adapter = TypeAdapter(RawMessageStreamEvent)
    events = events_of(scripted, scripted_http, "/v1/messages", MESSAGE, characters(text, reason))
    opened: list[int] = []
    for name, data in events:
        assert adapter.validate_python(data).type == name
        if name == "content_block_start":
            opened.append(data["index"])
        elif name == "content_block_stop":
            assert opened[-1] == data["index"]
    assert opened == list(range(len(opened)))
    assert [name for name, _ in events][-2:] == ["message_delta", "message_stop"]
    assert events[-2][1]["timings"]["predicted_n"] == FINISHED.usage.completion_tokens
    stop = events[-2][1]["delta"]["stop_reason"]
    calls = text.count("</tool_call>")
    assert stop == ("max_tokens" if reason is FinishReason.LENGTH else "tool_use" if calls else "end_turn")


def test_a_call_that_the_limit_cuts_is_said_to_be_cut_by_every_api(scripted, scripted_http):
    """D4: whole and streamed; who reads the reason knows that the call is not to be run."""
    script = characters(BROKEN, FinishReason.LENGTH)
    events = events_of(scripted, scripted_http, "/v1/responses", RESPONSE, script)
    streamed = events[-1][1]["response"]
    chat = {"messages": MESSAGE["messages"], "tools": [{"type": "function", "function": {"name": "f"}}]}
    answers = []
    for route, body in (
        ("/v1/responses", {**RESPONSE, "stream": False}),
        ("/v1/messages", {**MESSAGE, "stream": False}),
        ("/v1/chat/completions", chat),
    ):
        scripted.call(lambda: scripted.runtime.scripts.append(script))
        answers.append(scripted_http.post(route, json={"model": "default", **body}).json())
    whole, message, completion = answers
    for response in (streamed, whole):
        assert (response["status"], response["incomplete_details"]["reason"]) == (
            "incomplete",
            "max_output_tokens",
        )
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
        assert response["output"][-1]["arguments"] == '{"a": 1'
    assert message["stop_reason"] == "max_tokens"
    assert completion["choices"][0]["finish_reason"] == "length"
    frames = events_of(scripted, scripted_http, "/v1/messages", MESSAGE, script)
    assert frames[-2][1]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("headers", "name"),
    [({}, "response.reasoning_text"), ({"OpenResponses-Version": "latest"}, "response.reasoning")],
)
def test_events_of_reasoning_have_the_names_that_their_reader_knows(scripted, scripted_http, headers, name):
    """W10: OpenAI's, or with the specification's header those of the specification; nothing else differs."""
    script = characters("<think>Hm.</think>Yes.", FinishReason.STOP)
    with httpx.Client(base_url=scripted_http.base_url, headers=headers) as reader:
        events = events_of(scripted, reader, "/v1/responses", RESPONSE, script)
    told = [data for kind, data in events if kind == f"{name}.delta"]
    assert "".join(data["delta"] for data in told) == "Hm."
    assert [data["text"] for kind, data in events if kind == f"{name}.done"] == ["Hm."]
    assert {kind for kind, _ in events if "reasoning" in kind} == {f"{name}.delta", f"{name}.done"}
    assert events[-1][1]["response"]["output"][0]["content"][0]["type"] == "reasoning_text"


def test_a_failure_within_a_stream_is_an_event_of_its_api(scripted, scripted_http):
    """S2: the response's events stay valid to the end; the message's last one is an error."""
    from openai.types.responses import ResponseStreamEvent  # noqa: PLC0415 - takes a second

    steps = [delta("So: "), NotReadyError("gone")]
    events = events_of(scripted, scripted_http, "/v1/responses", RESPONSE, steps)
    assert TypeAdapter(ResponseStreamEvent).validate_python(events[-1][1]).type == "response.failed"
    events = events_of(scripted, scripted_http, "/v1/messages", MESSAGE, steps)
    assert (events[-1][0], events[-1][1]["error"]["message"]) == ("error", "gone")
