"""The Responses API as clients use it: a coding agent's first request, counts, tiers, progress, places."""

from __future__ import annotations

import json

import msgspec
import openai
import pydantic
import pytest
import stand_in
from openai.types.responses import Response
from stand_in import FINISHED, INFO, delta

from stoker.ipc.events import Admitted, PrefillProgress
from stoker.ipc.request import FinishReason

STOP = delta("", finish_reason=FinishReason.STOP)
TOOL_MODEL = "{{ tools }}<tool_call></tool_call>"
SCHEMA = {"type": "object", "properties": {"target": {"type": "string"}}, "additionalProperties": False}


def says(scripted, *steps):
    """The next answer."""
    scripted.call(lambda: scripted.runtime.scripts.append(list(steps)))


@pytest.fixture
def tool_model(monkeypatch):
    """The stand-in's model has a template that knows tools."""
    monkeypatch.setattr(stand_in, "INFO", msgspec.structs.replace(INFO, chat_template=TOOL_MODEL))


CALLABLE = {"type": "function", "name": "f"}
CALLED = ("exec_command", "multi_agent_v1.close_agent")


def part(text):
    """A content part of an input message."""
    return {"type": "input_text", "text": text}


def function(name):
    """A tool as a coding agent declares it."""
    return {"type": "function", "name": name, "description": "d", "strict": False, "parameters": SCHEMA}


# The shape of the first request of a coding agent (Codex CLI 0.169): three kinds of tools, several developer
# messages with ids, fields that concern its vendor alone.
AGENT = {
    "model": "default",
    "stream": True,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [part("You are an agent.")]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": [part("Skills."), part("Rules.")]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [part("<environment/>")]},
        {"type": "message", "id": "msg_4", "role": "user", "content": [part("Say hi")]},
    ],
    "tools": [
        function("exec_command"),
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Tools for sub-agents.",
            "tools": [function("close_agent"), function("resume_agent")],
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
        {"type": "local_shell"},
        {"type": "mcp", "server_label": "x"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "key",
    "extra_body": {"client_metadata": {"session_id": "s"}},
}


def test_a_coding_agents_first_request_is_taken(scripted, scripted_client, tool_model):
    """S1: functions of namespaces are called by both names; what cannot be served is named, not fatal."""
    call = '<tool_call>\n{"name": "multi_agent_v1.close_agent", "arguments": {"target": "a"}}\n</tool_call>'
    says(scripted, Admitted("x"), *(delta(char) for char in call), STOP, FINISHED)
    with scripted_client.responses.with_streaming_response.create(**AGENT) as answer:
        assert answer.headers["X-Stoker-Ignored"] == (
            "tools.2 (web_search), tools.3 (custom), tools.4 (local_shell), tools.5 (mcp), client_metadata"
        )
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    last = json.loads(lines[-1])
    assert last["type"] == "response.completed"
    response = Response.model_validate(last["response"])
    (item,) = response.output
    assert (item.namespace, item.name, item.arguments) == (
        "multi_agent_v1",
        "close_agent",
        '{"target": "a"}',
    )
    assert item.call_id.startswith("call_")
    assert item.id.startswith("fc_")
    assert response.id.startswith("resp_")
    assert response.metadata == {
        "stoker_ignored_tools": "tools.2 (web_search), tools.3 (custom), tools.4 (local_shell), tools.5 (mcp)"
    }
    assert [tool.type for tool in response.tools] == ["function", "namespace"]
    prompt = scripted.runtime.requests[-1].prompt
    assert "apply_patch" not in prompt


def test_an_agents_next_request_repeats_what_was_called(scripted, scripted_client, tool_model):
    """S1, D7: with the reasoning, the call and its output as items."""
    turns = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "close_agent",
            "namespace": "multi_agent_v1",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "closed"},
    ]
    says(scripted, delta("Done."), STOP, FINISHED)
    asked = {**AGENT, "input": [*AGENT["input"], *turns], "stream": False}
    assert scripted_client.responses.create(**asked).output_text == "Done."
    assert "closed" in scripted.runtime.requests[-1].prompt


ALLOWED = {
    "type": "allowed_tools",
    "mode": "auto",
    "tools": [{"type": "function", "name": "exec_command"}, {"type": "web_search"}],
}


def test_tools_that_may_not_be_called_stay_in_the_prompt_and_are_not_called(
    scripted, scripted_client, tool_model
):
    """D7: the prompt is that of all tools, so the cache holds; a call of another tool is text."""
    texts = [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in CALLED]
    given = {**AGENT, "stream": False, "tools": AGENT["tools"][:3]}
    for text in [*texts, "Hi"]:
        says(scripted, *(delta(char) for char in text), STOP, FINISHED)
    chosen = {**given, "tool_choice": ALLOWED}
    taken, other = [scripted_client.responses.create(**chosen) for _ in CALLED]
    scripted_client.responses.create(**given)
    assert [(item.type, item.name) for item in taken.output] == [("function_call", "exec_command")]
    assert other.output_text == texts[1]
    assert taken.tool_choice.model_dump() == ALLOWED
    prompts = {request.prompt for request in scripted.runtime.requests[-3:]}
    assert len(prompts) == 1
    assert "close_agent" in prompts.pop()


def test_a_required_call_is_one_of_the_tools_that_are_allowed(scripted, scripted_client, tool_model):
    """D7: the grammar knows no other; chat completions say it in their own form."""
    says(scripted, delta("x"), STOP, FINISHED)
    says(scripted, delta("x"), STOP, FINISHED)
    scripted_client.responses.create(
        **{**AGENT, "stream": False, "tool_choice": {**ALLOWED, "mode": "required"}}
    )
    tools = [{"type": "function", "function": {"name": name}} for name in CALLED]
    allowed = {"mode": "required", "tools": tools[1:]}
    scripted_client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Hi"}],
        tools=tools,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )
    first, second = (request.constraint.source for request in scripted.runtime.requests[-2:])
    assert ("exec_command" in first, "close_agent" in first) == (True, False)
    assert ("exec_command" in second, "close_agent" in second) == (False, True)


@pytest.mark.parametrize("tool_choice", [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}])
def test_a_tool_that_is_not_served_cannot_be_forced(scripted_client, tool_choice):
    """S3: 400 naming the choice."""
    with pytest.raises(openai.BadRequestError) as caught:
        scripted_client.responses.create(**{**AGENT, "tool_choice": tool_choice})
    assert caught.value.param == "tool_choice"
    assert tool_choice["type"] in caught.value.message


def test_chat_leaves_the_same_tools_out(scripted, scripted_http, tool_model):
    """S1: by the same rule, in the same header."""
    tools = [{"type": "web_search_preview"}, {"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    answer = scripted_http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["X-Stoker-Ignored"] == "tools.0 (web_search_preview)"
    strange = [{"type": "x\r\nA: b\u00fc"}] * 20
    answer = scripted_http.post("/v1/chat/completions", json={**body, "tools": strange})
    assert answer.headers["X-Stoker-Ignored"].startswith("tools.0 (x??A:?b?), tools.1")
    assert answer.headers["X-Stoker-Ignored"].endswith("12 more")


def test_a_prompt_is_counted_as_it_would_be_computed(scripted, scripted_client, tool_model):
    """S1: with its instructions and tools; nothing is generated."""
    asked = {"model": "default", "input": "Hi", "instructions": "Be brief.", "tools": AGENT["tools"]}
    counted = scripted_client.responses.input_tokens.count(**asked)
    scripted_client.responses.create(**asked)
    counting, generating = scripted.runtime.requests
    assert counting.prompt == generating.prompt
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", len(generating.prompt))
    assert scripted_client.responses.input_tokens.count(instructions="Be brief.").input_tokens > 0


@pytest.mark.parametrize("server", ["fake"], indirect=True)
@pytest.mark.parametrize("text", ["Hi", "a longer text, with \U0001f642"])
def test_counts_are_those_of_the_usage(http, text):
    """S1: of both APIs, by the engine's own tokens."""
    counted = http.post("/v1/responses/input_tokens", json={"input": text}).json()["input_tokens"]
    answer = http.post("/v1/responses", json={"input": text, "max_output_tokens": 2}).json()
    assert counted == answer["usage"]["input_tokens"]
    turns = [{"role": "user", "content": text}]
    counted = http.post("/v1/messages/count_tokens", json={"messages": turns}).json()["input_tokens"]
    usage = http.post("/v1/messages", json={"messages": turns, "max_tokens": 2}).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    body = {"messages": turns, "max_tokens": 2, "stream": True}
    first = http.post("/v1/messages", json=body).text.split("\n\n")[0]
    usage = json.loads(first.split("data: ")[1])["message"]["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


class Person(pydantic.BaseModel):
    """What is to be read."""

    name: str
    age: int


def test_a_parsed_response_is_of_its_type(scripted, scripted_client):
    """D2: `responses.parse`; the answer is held to the schema."""
    says(scripted, delta('{"name": "Ada", "age": 36}'), STOP, FINISHED)
    response = scripted_client.responses.parse(model="default", input="Hi", text_format=Person)
    assert response.output_parsed == Person(name="Ada", age=36)
    constraint = scripted.runtime.requests[-1].constraint
    assert set(json.loads(constraint.source)["properties"]) == {"name", "age"}


@pytest.mark.parametrize(
    ("headers", "fields", "tier"),
    [
        ({}, {}, "default"),
        ({}, {"service_tier": "auto"}, "default"),
        ({}, {"service_tier": "flex"}, "flex"),
        ({"X-Stoker-Priority": "background"}, {}, "flex"),
    ],
)
def test_the_tier_is_told(scripted_client, headers, fields, tier):
    """Q1: that in which the request ran."""
    response = scripted_client.responses.create(model="default", input="Hi", extra_headers=headers, **fields)
    assert response.service_tier == tier


@pytest.mark.parametrize("word", ["1", "true", "On", "yes"])
def test_progress_of_the_prompt_is_sent_where_it_is_asked_for(scripted, scripted_client, word):
    """S2: an event of our own, which the official client hands on and passes over."""
    progress = PrefillProgress(request_id="x", total=9, cached=0, processed=5, time_ms=1.0)
    says(scripted, Admitted("x", 0, None, 9), progress, delta("So."), STOP, FINISHED)
    headers = {"X-Stoker-Progress": word}
    with scripted_client.responses.stream(model="default", input="Hi", extra_headers=headers) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "So."
    assert scripted.runtime.requests[-1].return_progress
    assert kinds[2] == "stoker:prefill_progress"


def test_the_official_client_gets_the_times_of_a_response(scripted, scripted_client):
    """O2: in the object at its end, streamed, whole or read again; not before. As in chat completions."""
    says(scripted, delta("So."), STOP, FINISHED)
    whole = scripted_client.responses.create(model="default", input="Hi", store=True)
    says(scripted, delta("So."), STOP, FINISHED)
    with scripted_client.responses.stream(model="default", input="Hi") as stream:
        first = next(iter(stream))
        last = stream.get_final_response()
    times = whole.timings
    assert (times["queue_ms"], times["prompt_ms"], times["predicted_ms"]) == (500.0, 250.0, 125.0)
    assert (times["cache_n"], times["prompt_n"], times["predicted_n"]) == (1, 2, 2)
    assert (last.timings, hasattr(first.response, "timings")) == (times, False)
    assert scripted_client.responses.retrieve(whole.id).timings == times


@pytest.mark.parametrize(("word", "status"), [("0", 200), ("off", 200), ("maybe", 400)])
def test_progress_is_on_or_off(scripted, scripted_http, word, status):
    """S3: anything else is a 400 that names the header."""
    answer = scripted_http.post("/v1/responses", json={"input": "Hi"}, headers={"X-Stoker-Progress": word})
    assert answer.status_code == status
    if status == 200:
        assert not scripted.runtime.requests[-1].return_progress
    else:
        assert answer.json()["error"]["param"] == "X-Stoker-Progress"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"instructions": "i", "input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"instructions": "i", "input": [{"role": "user", "content": [{"type": "x"}]}]}, "input.0.content.0"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"temperature": 9}, "temperature"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"top_p": 2}, "top_p"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "input.0.encrypted_content"),
        ({"truncation": "yes"}, "truncation"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": ["f"]}}, "tool_choice.tools.0"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [CALLABLE]}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [CALLABLE]}}, "tool_choice"),
    ],
)
def test_an_error_names_the_field_that_was_sent(scripted_http, fields, param):
    """S3: not the place in the chat completion that it becomes; the message says the same."""
    answer = scripted_http.post("/v1/responses", json={"input": "Hi", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
