"""Tool calls, reasoning, responses and messages through the official clients."""

from __future__ import annotations

import json

import anthropic
import msgspec
import openai
import pytest
import stand_in
from stand_in import FINISHED, INFO, delta

from stoker.errors import NotReadyError
from stoker.ipc.request import FinishReason
from stoker.server.openai.conversation import ChatRequest

QWEN = "{{ tools }}<tool_call></tool_call></think>"
CALLS = (
    '<think>Hm.</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
FLAT = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def reasoning_model(monkeypatch):
    """The stand-in's model has a template that knows tools and reasoning."""
    monkeypatch.setattr(stand_in, "INFO", msgspec.structs.replace(INFO, chat_template=QWEN))


def script(scripted, text, reason=FinishReason.STOP):
    """The next answer, a character a delta."""
    steps = [*(delta(char) for char in text), delta("", finish_reason=reason), FINISHED]
    scripted.call(lambda: scripted.runtime.scripts.append(steps))


@pytest.fixture
def loaded(scripted, reasoning_model):
    """A server whose next answer reasons, speaks and calls twice."""
    script(scripted, CALLS)
    return scripted


def test_calls_stream_with_index_and_id(loaded, scripted_client):
    """D7: the name once, arguments as fragments, reasoning_content beside content."""
    stream = scripted_client.chat.completions.create(
        model="default", messages=HELLO, tools=TOOLS, stream=True
    )
    calls, content, reasoning, reason = {}, "", "", None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or []:
                if piece.id:
                    calls[piece.index] = [piece.id, piece.function.name, ""]
                calls[piece.index][2] += piece.function.arguments
    assert (content, reasoning, reason) == ("So:", "Hm.", "tool_calls")
    assert [(call[1], json.loads(call[2])) for call in calls.values()] == [("f", {"a": 1}), ("f", {"a": 2})]


def test_a_whole_answer_has_all_three_parts(loaded, scripted_client):
    """D7: content, reasoning_content and every call in one message."""
    answer = scripted_client.chat.completions.create(model="default", messages=HELLO, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"a": 1}, {"a": 2}]
    assert choice.message.reasoning_content == "Hm."
    assert loaded.runtime.requests[0].constraint is None


def spoken(client, **given):
    """Content and calls of an answer that is streamed."""
    content, calls, reason = "", [], None
    for chunk in client.chat.completions.create(model="default", messages=HELLO, stream=True, **given):
        (choice,) = chunk.choices
        assert not (choice.finish_reason and choice.delta.to_dict())
        content, reason = content + (choice.delta.content or ""), choice.finish_reason or reason
        for piece in choice.delta.tool_calls or []:
            if piece.id:
                calls.append([piece.id, piece.function.name, ""])
            calls[piece.index][2] += piece.function.arguments
    return content, calls, reason


@pytest.mark.long
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_an_answer_that_is_cut_says_the_same_streamed_and_whole(
    scripted, reasoning_model, scripted_client, reason
):
    """D7: wherever it is cut, within a call as well; the ids are each answer's own."""
    for end in range(CALLS.index("So:"), len(CALLS) + 1):
        for _ in range(2):
            script(scripted, CALLS[:end], reason)
        content, calls, why = spoken(scripted_client, tools=TOOLS)
        answer = scripted_client.chat.completions.create(model="default", messages=HELLO, tools=TOOLS)
        (choice,) = answer.choices
        whole = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert (choice.message.content or "", whole) == (content, [tuple(call[1:]) for call in calls])
        assert choice.finish_reason == why
    assert len(calls) == 2


FUNCTIONS = [{"name": "f", "parameters": {"type": "object", "properties": {}}}]


def test_functions_are_tools_in_their_old_form(loaded, scripted_client):
    """S1: one `function_call`, and a reason of that name."""
    answer = scripted_client.chat.completions.create(model="default", messages=HELLO, functions=FUNCTIONS)
    (choice,) = answer.choices
    assert choice.finish_reason == "function_call"
    assert (choice.message.function_call.name, choice.message.tool_calls) == ("f", None)
    assert json.loads(choice.message.function_call.arguments) == {"a": 1}


def test_functions_stream_in_their_old_form(loaded, scripted_client):
    """S2: the name once, then the arguments in pieces; no second call."""
    stream = scripted_client.chat.completions.create(
        model="default", messages=HELLO, functions=FUNCTIONS, stream=True
    )
    choices = [chunk.choices[0] for chunk in stream]
    pieces = [choice.delta.function_call for choice in choices if choice.delta.function_call]
    assert [piece.name for piece in pieces if piece.name] == ["f"]
    assert json.loads("".join(piece.arguments for piece in pieces)) == {"a": 1}
    assert not any(choice.delta.tool_calls for choice in choices)
    assert choices[-1].finish_reason == "function_call"


@pytest.mark.parametrize(
    ("choice", "told"),  # whether it is forced, and whether it is offered
    [
        (None, (False, True)),
        ("auto", (False, True)),
        ("none", (False, False)),
        ({"name": "f"}, (True, True)),
    ],
)
def test_function_call_is_the_choice(scripted, reasoning_model, scripted_http, choice, told):
    """S1, D2: a named one is forced."""
    body = {"messages": HELLO, "functions": FUNCTIONS, "function_call": choice}
    assert scripted_http.post("/v1/chat/completions", json=body).status_code == 200
    request = scripted.runtime.requests[0]
    assert (request.constraint is not None, "'name': 'f'" in request.prompt) == told


def test_a_history_of_functions_is_one_of_tools():
    """S1: calls and results are linked by the function's name."""
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "rain"},
    ]
    _, call, result = ChatRequest.model_validate({"messages": history}).turns("m")
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert (result["role"], result["content"]) == ("tool", "rain")
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"functions": [{"name": "bad name"}]}, "functions.0.name"),
        ({"functions": FUNCTIONS, "function_call": {"name": "x"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": 3}, "function_call"),
    ],
)
def test_malformed_functions_are_refused_by_their_own_names(scripted_http, reasoning_model, given, param):
    """S3: not by those of tools."""
    answer = scripted_http.post("/v1/chat/completions", json={"messages": HELLO, **given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "tool" not in answer.json()["error"]["message"].replace("tools cannot", "").replace("of tools", "")


def test_a_required_call_is_constrained(loaded, scripted_client):
    """D7, D2: the constraint waits for the end of the reasoning."""
    scripted_client.chat.completions.create(
        model="default", messages=HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    constraint = loaded.runtime.requests[0].constraint
    assert (constraint.kind, constraint.reasoning_end) == ("lark", "</think>")


def test_a_choice_that_names_no_tool_is_refused(scripted_client, reasoning_model):
    """S3: 400 naming tool_choice."""
    with pytest.raises(openai.BadRequestError) as caught:
        scripted_client.chat.completions.create(
            model="default",
            messages=HELLO,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "x"}},
        )
    assert caught.value.param == "tool_choice"


def test_a_response_comes_whole(loaded, scripted_client):
    """S1: one response with an item for each part."""
    response = scripted_client.responses.create(model="default", input="Hi", tools=FLAT)
    assert response.output_text == "So:"
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]


def test_a_response_comes_as_events(loaded, scripted_client):
    """S1: the client's own stream puts it together."""
    with scripted_client.responses.stream(model="default", input="Hi", tools=FLAT) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "So:"


def test_a_response_fails_within_its_stream(scripted, scripted_client):
    """S2: in band, as an event of that API."""
    scripted.call(lambda: scripted.runtime.scripts.append([delta("a"), NotReadyError("gone")]))
    events = list(scripted_client.responses.create(model="default", input="Hi", stream=True))
    assert events[-1].type == "response.failed"


@pytest.fixture
def claude(scripted):
    """The official client of the Messages API."""
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as found:
        yield found


ASK = {
    "model": "default",
    "max_tokens": 99,
    "messages": HELLO,
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
}


def test_a_message_comes_whole(loaded, claude):
    """S1: one message with a block for each part."""
    message = claude.messages.create(**ASK)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"


def test_a_message_comes_as_events(loaded, claude):
    """S1: the client's own stream puts it together."""
    with claude.messages.stream(**ASK) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[3].input == {"a": 2}
    assert message.usage.input_tokens == 2


def test_errors_reach_the_client_of_the_messages_api(scripted, claude):
    """S2, S3: as errors of the client, before and within the stream."""
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**{**ASK, "tools": [{"name": "bad name", "input_schema": {}}]})
    scripted.call(lambda: scripted.runtime.scripts.append([delta("a"), NotReadyError("gone")]))
    with pytest.raises(anthropic.APIStatusError, match="gone"), claude.messages.stream(**ASK) as stream:
        stream.get_final_message()


XML = """So:
<tool_call>
<function=f>
<parameter=text>
a {"b"}
</parameter>
<parameter=n>
2
</parameter>
</function>
</tool_call>"""
TYPED = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
TYPED_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": TYPED}}]


def test_a_request_names_the_format_of_its_calls(scripted, reasoning_model, scripted_client):
    """D12: in place of the template's; streamed and whole, and by the other two APIs."""
    for _ in range(3):
        script(scripted, XML)
    given = {"tools": TYPED_TOOLS, "extra_body": {"tool_format": "qwen-xml"}}
    content, calls, why = spoken(scripted_client, **given)
    (choice,) = scripted_client.chat.completions.create(model="default", messages=HELLO, **given).choices
    (whole,) = choice.message.tool_calls
    assert (content, why) == ("So:", "tool_calls")
    assert [call[1:] for call in calls] == [[whole.function.name, whole.function.arguments]]
    assert json.loads(whole.function.arguments) == {"text": 'a {"b"}', "n": 2}
    flat = [{"type": "function", "name": "f", "parameters": TYPED}]
    response = scripted_client.responses.create(
        model="default", input="Hi", tools=flat, extra_body={"tool_format": "qwen-xml"}
    )
    (call,) = (item for item in response.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"text": 'a {"b"}', "n": 2}


def test_a_format_that_is_none_is_refused_by_its_name(scripted, reasoning_model, scripted_client):
    """D12: 400 with the names that there are."""
    with pytest.raises(openai.BadRequestError, match="harmony, hermes") as caught:
        scripted_client.chat.completions.create(
            model="default", messages=HELLO, extra_body={"tool_format": "morse"}
        )
    assert caught.value.param == "tool_format"
