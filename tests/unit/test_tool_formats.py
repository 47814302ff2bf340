"""Which family's way of calling tools a template speaks, and what conversations look like in each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.chat.answer import AnswerReader, WholeAnswer
from stoker.chat.answer_events import CallArguments, CallBegan, CallEnded
from stoker.chat.conversation import NO_TOOLS, ToolOffer, prepared_turn
from stoker.chat.template import ChatTemplate
from stoker.chat.tools.calls import KnownTools, ToolCallParser
from stoker.chat.tools.constraints import forced_calls
from stoker.chat.tools.formats.hermes import GENERIC_FORMAT, HERMES_FORMAT
from stoker.chat.tools.formats.llama import LLAMA3_FORMAT
from stoker.chat.tools.formats.mistral import MISTRAL_ARGS_FORMAT, MISTRAL_FORMAT
from stoker.chat.tools.formats.python import LFM2_FORMAT
from stoker.chat.tools.formats.qwen import QWEN_XML_FORMAT
from stoker.chat.tools.formats.table import format_of
from stoker.chat.tools.history import template_input
from stoker.chat.tools.tools import (
    MAX_NAME_CHARS,
    MAX_SCHEMA_CHARS,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMAS_CHARS,
    MAX_TOOLS,
    ChoiceMode,
    LeftOut,
    Tool,
    ToolChoice,
    checked_choice,
    checked_toolset,
)
from stoker.chat.turn_ends import TURN_ENDS
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.models.chat_templates import CHATML
from stoker.tasks.chat import offer_of, offer_of_functions

# The parts of published templates that differ between families, at their size.
QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}"
    "{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}"
    "{{ '\\n\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}"
    "{{ '\\n</tools>\\nwithin <tool_call></tool_call> XML tags: "
    '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\' }}'
    "{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{%- if message.content %}{{ '\\n' + message.content }}{% endif %}"
    "{%- for tool_call in message.tool_calls %}{%- set tool_call = tool_call.function %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + tool_call.name + \'", "arguments": \' }}'
    "{{ tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- if tools is not none %}"
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name}.\' }}'
    "{%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}{%- if not message.tool_calls|length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set tool_call = message.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n{\"name\": \"' + tool_call.name + '\", ' }}"
    "{{ '\"parameters\": ' }}{{ tool_call.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
)
MISTRAL_V3 = (
    "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- if tools is defined and tools is not none and loop.last %}"
    "{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}"
    "{%- for tool_call in message.tool_calls %}{%- if not tool_call.id|length == 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{ tool_call.function | tojson }}{{ ', \"id\": \"' + tool_call.id + '\"' }}{%- endfor %}{{ ']' }}"
    "{%- elif message.role == 'tool' %}{%- if not message.tool_call_id|length == 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{ '[TOOL_RESULTS] ' + message.content + message.tool_call_id + '[/TOOL_RESULTS]' }}"
    "{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{{ '<start>' + message.role + '\\n' + message.content }}{% endfor %}"
)

WEATHER = Tool(
    "weather",
    "Tells the weather.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
CLOCK = Tool("clock")
USER = {"role": "user", "content": "Hi"}


def checked_tools(given: Any) -> tuple[Tool, ...]:
    """The tools of a request, all of them functions."""
    found = checked_toolset(given)
    found.require_all()
    return found.tools


def asked(own_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a history."""
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLED = {"tool_calls": [asked("call_1", "weather", '{"city": "Bonn"}')]}
TWO_CALLS = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [asked("call_1", "weather", '{"city": "Bonn"}'), asked("call_2", "clock", "")],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]


def rendered(template: str | None, messages: list[dict[str, Any]]) -> str:
    """The prompt of a conversation with both tools."""
    turn = prepared_turn(messages, template, ToolOffer((WEATHER, CLOCK)))
    return ChatTemplate(template, "<s>", "</s>").render(turn.messages, tools=turn.tools)


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (QWEN, HERMES_FORMAT),
        (LLAMA, LLAMA3_FORMAT),
        (MISTRAL_V3, MISTRAL_FORMAT),
        (MISTRAL_V3.replace("[TOOL_CALLS] [", "[TOOL_CALLS]' ~ name ~ '[ARGS]"), MISTRAL_ARGS_FORMAT),
        (CHATML, GENERIC_FORMAT),
        (None, GENERIC_FORMAT),
        ("", GENERIC_FORMAT),
        (GEMMA, GENERIC_FORMAT),
        (QWEN.replace('{"name": <function-name>', "<function=name><parameter=x>"), QWEN_XML_FORMAT),
        ("{{ messages }}<tool_call> without the variable", GENERIC_FORMAT),
        ("{{ tools }} written in a way of its own", GENERIC_FORMAT),
        ("{{ tools }}<|tool_list_start|>", LFM2_FORMAT),
        ("{{ tools }}List of tools: [<|im_start|>", LFM2_FORMAT),
        ('{{ tools }}<tool_call><invoke name="f">', GENERIC_FORMAT),
    ],
)
def test_the_template_tells_the_family(template: str | None, syntax: object) -> None:
    """SPEC D7: templates' tool formats; what is unknown gets the generic one."""
    assert format_of(template) is syntax


def test_a_hermes_template_gets_the_tools_and_arguments_as_objects() -> None:
    """SPEC D7: history with calls and results, several at once."""
    prompt = rendered(QWEN, TWO_CALLS)
    assert '"name": "weather", "description": "Tells the weather."' in prompt
    assert (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    ) in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


def test_llama_3_gets_one_call_a_turn_with_its_result_behind_it() -> None:
    """SPEC D7: its template refuses several calls in one turn."""
    prompt = rendered(LLAMA, [*TWO_CALLS, {"role": "user", "content": "Thanks"}])
    order = [
        '{"name": "weather", "parameters": {"city": "Bonn"}}',
        "sunny",
        '{"name": "clock"',
        "noon",
        "Thanks",
    ]
    places = [prompt.index(text) for text in order]
    assert places == sorted(places)
    assert prompt.count("sunny") == prompt.count("noon") == 1


def test_results_are_told_the_names_of_their_functions() -> None:
    """SPEC D7: some templates print them; a name that is given stays."""
    turns = [*TWO_CALLS[:-1], {**TWO_CALLS[-1], "name": "watch"}]
    given = prepared_turn(turns, QWEN, ToolOffer((WEATHER, CLOCK))).messages
    assert [turn["name"] for turn in given if turn["role"] == "tool"] == ["weather", "watch"]


def test_mistral_gets_ids_of_nine_characters() -> None:
    """SPEC D7: its template refuses others; a result keeps the id of its call, and a short id stays."""
    prompt = rendered(MISTRAL_V3, TWO_CALLS)
    turns = template_input(TWO_CALLS, [WEATHER], MISTRAL_FORMAT).messages
    short = [call["id"] for call in turns[1]["tool_calls"]]
    assert [turns[2]["tool_call_id"], turns[3]["tool_call_id"]] == short
    assert len(set(short)) == 2
    assert f"sunny{short[0]}" in prompt
    kept = [{"role": "assistant", "content": "", "tool_calls": [asked("abc123XYZ", "clock", "{}")]}]
    assert template_input(kept, [], MISTRAL_FORMAT).messages[0]["tool_calls"][0]["id"] == "abc123XYZ"


def test_a_template_without_tools_is_told_of_them_in_the_system_turn() -> None:
    """SPEC D7: the generic fallback, in the first family's way."""
    with_system = [{"role": "system", "content": "Be brief."}, *TWO_CALLS]
    prompt = rendered(CHATML, with_system)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '{"type": "function", "function": {"name": "clock"' in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>' in prompt
    assert (
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        "<tool_response>\nnoon\n</tool_response><|im_end|>"
    ) in prompt
    assert rendered(CHATML, [USER]).startswith("<|im_start|>system\n# Tools\n")


def test_results_and_what_the_user_says_behind_them_are_one_turn() -> None:
    """SPEC D7: templates refuse two turns of one side; an answer of the model's ends the turn."""
    both = template_input([*TWO_CALLS, {"role": "user", "content": "Thanks"}], [], GENERIC_FORMAT).messages
    assert [turn["role"] for turn in both] == ["user", "assistant", "user"]
    assert both[2]["content"].endswith("noon\n</tool_response>\nThanks")
    told = template_input(
        [*TWO_CALLS, {"role": "assistant", "content": "Noon."}], [], GENERIC_FORMAT
    ).messages
    assert [turn["role"] for turn in told] == ["user", "assistant", "user", "assistant"]
    assert told[2]["content"].endswith("noon\n</tool_response>")


def test_a_template_without_a_system_turn_is_told_in_the_users() -> None:
    """SPEC D7: the fallback works where the template refuses a system turn."""
    prompt = rendered(GEMMA, [USER])
    assert prompt.startswith("<start>user\n# Tools")
    assert prompt.endswith("\n\nHi")


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (
            "{{ tools }}<|tool_list_start|>" + CHATML,
            (
                '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Bonn"}}, '
                '{"name": "clock", "arguments": {}}]<|tool_call_end|>'
            ),
        ),
        (
            "<start_of_turn>" + CHATML,
            '{"name": "weather", "parameters": {"city": "Bonn"}}\n{"name": "clock", "parameters": {}}',
        ),
        (
            CHATML,
            (
                '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
                '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
            ),
        ),
    ],
)
def test_old_calls_that_a_template_does_not_write_have_the_form_of_new_ones(
    template: str, written: str
) -> None:
    """SPEC D12: the history shows the model the form that its answer is to have, and reads back."""
    turn = prepared_turn(TWO_CALLS, template, ToolOffer((WEATHER, CLOCK)))
    contents = [message["content"] for message in turn.messages if message["role"] == "assistant"]
    assert contents == [written]
    answer = WholeAnswer()
    reader = AnswerReader(turn.form(""), "seed")
    answer.add([*reader.feed(written), *reader.finish()])
    assert [(call.name, call.arguments) for call in answer.calls] == [
        ("weather", '{"city": "Bonn"}'),
        ("clock", "{}"),
    ]


def test_arguments_between_tags_are_written_as_they_are_read() -> None:
    """SPEC D12: a format named by the caller writes old calls in its tags, texts that hold tags wrapped."""
    arguments = {"path": "a", "text": "<b>\n</param>", "lines": [1]}
    turns = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [asked("c", "write", json.dumps(arguments))]},
    ]
    turn = prepared_turn(turns, CHATML, ToolOffer((Tool("write"),), tool_format="minicpm"))
    assert turn.messages[-1]["content"] == (
        '<function name="write"><param name="path">a</param>\n'
        '<param name="text"><![CDATA[<b>\n</param>]]></param>\n<param name="lines">[1]</param>\n</function>'
    )


def test_gpt_oss_gets_text_and_reasoning_of_a_call_as_one() -> None:
    """SPEC D12: its template refuses a turn that has calls, reasoning and text."""
    called = {"role": "assistant", "content": "I look.", "reasoning_content": "Look.", **CALLED}
    turn = prepared_turn([USER, called], "{{ tools }}tool_calls<|channel|><|message|>", ToolOffer((WEATHER,)))
    assert (turn.messages[1]["thinking"], turn.messages[1]["content"]) == ("Look.\n\nI look.", "")


def test_without_tools_nothing_is_added() -> None:
    """SPEC D7: a plain conversation stays as it is."""
    turn = prepared_turn([USER], CHATML)
    assert (turn.messages, turn.tools, turn.constraint, turn.prefill) == ([USER], None, None, "")
    assert turn.form("").syntax is None


def test_a_choice_of_none_hides_the_tools() -> None:
    """SPEC D7: tool_choice none; calls in the history are still laid out."""
    turn = prepared_turn(TWO_CALLS, QWEN, ToolOffer((WEATHER,), ToolChoice(ChoiceMode.NONE)))
    assert turn.tools is None
    assert turn.form("").syntax is None
    assert turn.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn"}


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ([asked("a", "f", "[1]")], '{"name": "f", "arguments": [1]}'),
        ([asked("a", "f", '{"a":')], '{"name": "f", "arguments": {"a":}'),
        ([{"id": "a", "function": {}}], "{}"),
        (["x"], "x"),
        ("x", "x"),
        ([asked("a", "f", "{}"), None], "null"),
        ([asked("a", "f", "{}")] * 129, '{"name": "f", "arguments": {}}'),
    ],
)
@pytest.mark.parametrize("syntax", [HERMES_FORMAT, GENERIC_FORMAT])
def test_a_malformed_call_in_the_history_is_shown_as_text_with_its_results(calls, text, syntax) -> None:
    """SPEC W2: whatever a model wrote, the conversation goes on; well-formed calls stay calls."""
    history = [
        USER,
        {"role": "assistant", "content": "So:", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "no such thing"},
        {"role": "user", "content": "Again"},
        *TWO_CALLS[1:],
    ]
    given = template_input(history, [], syntax)
    assert given.num_spelled == 1
    _, spoilt, answered, *rest = given.messages
    assert "tool_calls" not in spoilt
    assert spoilt["content"].startswith("So:\n<tool_call>\n")
    assert f"<tool_call>\n{text}\n</tool_call>" in spoilt["content"]
    assert answered == {
        "role": "user",
        "content": "<tool_response>\nno such thing\n</tool_response>\nAgain",
    }
    assert ("tool_calls" in rest[0]) == syntax.is_native


# ------------------------------------------------------------ tools and tool_choice


def declared(**function: Any) -> dict[str, Any]:
    """A tool as a caller writes it."""
    return {"type": "function", "function": {"name": "f", **function}}


def test_tools_are_taken_as_openais_client_sends_them() -> None:
    """SPEC D7: parameters may be missing; unknown fields are no matter."""
    schema = {"properties": {"a": {"type": "integer"}}}
    tools = checked_tools(
        [declared(parameters=schema, strict=True), declared(name="g-2.x", description=None)]
    )
    assert tools == (
        Tool("f", "", {"type": "object", **schema}),
        Tool("g-2.x", "", {"type": "object", "properties": {}}),
    )
    assert checked_tools(None) == checked_tools([]) == ()


def nested(depth: int) -> dict[str, Any]:
    """A schema of that many levels."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth - 1):
        schema = {"type": "object", "x": schema}
    return schema


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ({}, "tools"),
        ([declared(name=f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
        (["f"], "tools.0"),
        ([{"type": "function"}], "tools.0"),
        ([{"function": {"name": "f"}}], "tools.0"),
        ([{"type": "web_search"}], "tools.0.type"),
        ([declared(name="")], "tools.0.function.name"),
        ([declared(name="a b")], "tools.0.function.name"),
        ([declared(name="a" * (MAX_NAME_CHARS + 1))], "tools.0.function.name"),
        ([declared(), declared()], "tools.1.function.name"),
        ([declared(description=1)], "tools.0.function.description"),
        ([declared(parameters=[])], "tools.0.function.parameters"),
        ([declared(parameters={"type": "string"})], "tools.0.function.parameters"),
        ([declared(parameters=nested(MAX_SCHEMA_DEPTH + 1))], "tools.0.function.parameters"),
        ([declared(parameters={"title": "x" * MAX_SCHEMA_CHARS})], "tools.0.function.parameters"),
        (
            [
                declared(name=f"f{i}", parameters={"title": "x" * (MAX_SCHEMA_CHARS - 100)})
                for i in range(MAX_SCHEMAS_CHARS // MAX_SCHEMA_CHARS + 1)
            ],
            "tools",
        ),
    ],
)
def test_malformed_tools_are_refused_by_their_place(tools: Any, param: str) -> None:
    """SPEC S3, S4: 400 naming the field, with bounds on number, size and depth."""
    with pytest.raises((InvalidRequestError, UnsupportedError)) as caught:
        checked_tools(tools)
    assert caught.value.param == param


HOSTED = [{"type": "web_search"}, declared(), {"type": "custom", "name": "patch"}, {"type": "mcp", "name": 7}]


def test_tools_that_are_no_functions_can_be_left_out() -> None:
    """SPEC D7: each with its place and kind; a library's caller hears of the first."""
    found = checked_toolset(HOSTED)
    assert [tool.name for tool in found.tools] == ["f"]
    assert found.left_out == (
        LeftOut("tools.0", "web_search"),
        LeftOut("tools.2", "custom", "patch"),
        LeftOut("tools.3", "mcp"),
    )
    assert offer_of_functions(HOSTED).left_out == found.left_out
    with pytest.raises(UnsupportedError, match=r"tools\.0.*web_search"):
        offer_of(HOSTED)
    with pytest.raises(InvalidRequestError) as caught:
        checked_toolset([{"type": "web_search"}, declared(), declared()])
    assert caught.value.param == "tools.2.function.name"


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "function", "function": {"name": "patch"}}, "custom"),
        ({"type": "custom", "custom": {"name": "patch"}}, "custom"),
        ({"type": "web_search"}, "web_search"),
    ],
)
def test_a_tool_that_is_left_out_cannot_be_forced(choice: Any, told: str) -> None:
    """SPEC S3: 400 naming the choice and the kind."""
    with pytest.raises(UnsupportedError, match=told) as caught:
        offer_of_functions(HOSTED, choice)
    assert caught.value.param == "tool_choice"


def test_a_call_cannot_be_required_where_every_tool_is_left_out() -> None:
    """SPEC S3: and the message says why there is none."""
    with pytest.raises(InvalidRequestError, match="custom, mcp"):
        offer_of_functions(HOSTED[2:], "required")
    assert offer_of_functions(HOSTED[2:], "none").left_out == ()


def allowing(mode: str, *names: Any) -> dict[str, Any]:
    """A choice that allows tools of these names; what is no text stands there by itself."""
    tools = [
        {"type": "function", "function": {"name": name}} if isinstance(name, str) else name for name in names
    ]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_a_schema_at_its_bounds_is_taken() -> None:
    """SPEC S4: the bound itself is allowed."""
    assert checked_tools([declared(name="a" * MAX_NAME_CHARS)])
    assert checked_tools([declared(parameters=nested(MAX_SCHEMA_DEPTH))])
    assert len(checked_tools([declared(name=f"f{i}") for i in range(MAX_TOOLS)])) == MAX_TOOLS


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(ChoiceMode.NONE)),
        ("required", ToolChoice(ChoiceMode.REQUIRED)),
        ({"type": "function", "function": {"name": "clock"}}, ToolChoice(ChoiceMode.NAMED, "clock")),
        (allowing("auto", "clock"), ToolChoice(allowed=("clock",))),
        (allowing("required", "clock", "clock"), ToolChoice(ChoiceMode.REQUIRED, allowed=("clock",))),
        (allowing("none", "clock"), ToolChoice(ChoiceMode.NONE, allowed=("clock",))),
    ],
)
def test_every_form_of_the_choice_is_read(given: Any, choice: ToolChoice) -> None:
    """SPEC D7: auto, none, required, named, and each of the first three for some of the tools."""
    assert checked_choice(given, [WEATHER, CLOCK]) == choice


@pytest.mark.parametrize(
    "given",
    [
        "any",
        "named",
        7,
        [],
        {"type": "function"},
        {"type": "function", "function": {"name": "other"}},
        {"type": "function", "function": {"name": 7}},
        {"type": "other"},
    ],
)
def test_a_choice_that_cannot_be_is_refused(given: Any) -> None:
    """SPEC S3: an unknown name is a 400 naming tool_choice."""
    with pytest.raises((InvalidRequestError, UnsupportedError)) as caught:
        checked_choice(given, [WEATHER, CLOCK])
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("given", "param", "told"),
    [
        ({"type": "allowed_tools", "tools": []}, "", "is not an object"),
        (allowing("auto"), ".tools", f"1 to {MAX_TOOLS} tools"),
        (allowing("auto", *(["clock"] * (MAX_TOOLS + 1))), ".tools", f"1 to {MAX_TOOLS} tools"),
        (allowing("any", "clock"), ".mode", "auto, none, required"),
        (allowing("auto", "clock", "other"), "", "'other', which is none of the tools"),
        (allowing("auto", "clock", 7), ".tools.1", "is not of the form"),
        (allowing("auto", 7), ".tools.0", "is not of the form"),
    ],
)
def test_tools_that_cannot_be_allowed_are_refused(given: Any, param: str, told: str) -> None:
    """SPEC S3: each names its place."""
    with pytest.raises(InvalidRequestError, match=told) as caught:
        checked_choice(given, [WEATHER, CLOCK])
    assert caught.value.param == f"tool_choice.allowed_tools{param}"


def test_allowing_a_tool_that_is_left_out_allows_nothing() -> None:
    """SPEC S3: the model is not told of it; beside a function it is passed over, alone it is refused."""
    search = {"type": "mcp"}
    one, alone = allowing("auto", "exec"), allowing("auto")
    for choice in (one, alone):
        choice["allowed_tools"]["tools"].append(search)
    left_out = offer_of_functions(HOSTED).left_out
    assert checked_choice(one, [Tool("exec")], left_out).allowed == ("exec",)
    with pytest.raises(UnsupportedError, match="holds no function"):
        checked_choice(alone, [Tool("exec")], left_out)


def test_a_call_cannot_be_required_without_tools() -> None:
    """SPEC S3: 400 naming tool_choice; auto and none need none."""
    with pytest.raises(InvalidRequestError) as caught:
        checked_choice("required", [])
    assert caught.value.param == "tool_choice"
    assert checked_choice("none", []).mode is ChoiceMode.NONE


# ------------------------------------------------------------ forced calls

REQUIRED = ToolChoice(ChoiceMode.REQUIRED)
CITY = '{"city": "Bonn"}'
FORCED = {
    HERMES_FORMAT.name: '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
    GENERIC_FORMAT.name: '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
    LLAMA3_FORMAT.name: '{"name": "weather", "parameters": {"city": "Bonn"}}',
    MISTRAL_FORMAT.name: '[{"name": "weather", "arguments": {"city": "Bonn"}}]',
    MISTRAL_ARGS_FORMAT.name: '[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}',
}
FORCED_TWICE = {
    HERMES_FORMAT.name: FORCED["hermes"] + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    GENERIC_FORMAT.name: FORCED["hermes"] + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    LLAMA3_FORMAT.name: FORCED["llama3"] + '; {"name": "clock", "parameters": {}}',
    MISTRAL_FORMAT.name: FORCED["mistral"][:-1] + ', {"name": "clock", "arguments": {}}]',
    MISTRAL_ARGS_FORMAT.name: FORCED["mistral-args"] + "[TOOL_CALLS]clock[ARGS]{}",
}
every_syntax = pytest.mark.parametrize(
    "syntax",
    [HERMES_FORMAT, LLAMA3_FORMAT, MISTRAL_FORMAT, MISTRAL_ARGS_FORMAT, GENERIC_FORMAT],
    ids=lambda syntax: syntax.name,
)


def follows(source: str, text: str) -> tuple[bool, bool]:
    """Whether a grammar takes the whole text, and whether the text may end there."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(source))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()


@every_syntax
def test_a_forced_answer_is_calls_that_the_parser_reads_back(syntax: Any) -> None:
    """SPEC D7: required is one call or more; each is whole and of a declared tool."""
    kind, source = forced_calls(syntax, [WEATHER, CLOCK], REQUIRED)
    assert kind == "lark"
    for text, names in (
        (FORCED[syntax.name], ["weather"]),
        (FORCED_TWICE[syntax.name], ["weather", "clock"]),
    ):
        assert follows(source, text) == (True, True)
        parser = ToolCallParser(
            syntax.syntax,
            KnownTools(
                (
                    "weather",
                    "clock",
                )
            ),
            "seed",
        )
        events = parser.feed(text) + parser.finish()
        assert [event.name for event in events if isinstance(event, CallBegan)] == names
        assert sum(isinstance(event, CallEnded) for event in events) == len(names)
        given = [event.fragment for event in events if isinstance(event, CallArguments)]
        assert [json.loads(text) for text in given] == [{"city": "Bonn"}, {}][: len(names)]


@every_syntax
def test_a_forced_answer_is_nothing_else(syntax: Any) -> None:
    """SPEC D7: no text, no unknown tool, no arguments beside the schema's."""
    _, source = forced_calls(syntax, [WEATHER, CLOCK], REQUIRED)
    text = FORCED[syntax.name]
    for wrong in (
        "Hello",
        text.replace("weather", "other"),
        text.replace('"Bonn"', "7"),
        text.replace('{"city": "Bonn"}', "{}"),
        text.replace('"city"', '"\\u0063ity"'),
        text.replace('"Bonn"}', '"Bonn", "x": 1}'),
        text + "!",
    ):
        assert not follows(source, wrong)[0], wrong


@every_syntax
@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_of_a_tool_that_is_not_allowed_is_text(syntax: Any, size: int) -> None:
    """SPEC D7: a model that calls it nevertheless has said something; calls before it stay calls."""
    for text, refused, names in (
        (FORCED[syntax.name], "weather", []),
        (FORCED_TWICE[syntax.name], "clock", ["weather"]),
    ):
        allowed = [name for name in ("weather", "clock") if name != refused]
        parser = ToolCallParser(syntax.syntax, KnownTools(tuple(allowed), (refused,)), "seed")
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        events += parser.finish()
        assert [event.name for event in events if isinstance(event, CallBegan)] == names
        assert parser.num_calls == len(names)
        assert refused in "".join(event for event in events if isinstance(event, str))


def test_the_prompt_is_the_same_whichever_tools_are_allowed() -> None:
    """SPEC D7: so that what was computed of it holds for the next choice; a forced call is of those alone."""
    turns = [
        prepared_turn([USER], QWEN, ToolOffer((WEATHER, CLOCK), ToolChoice(mode, allowed=allowed)))
        for mode, allowed in (
            (ChoiceMode.AUTO, ()),
            (ChoiceMode.AUTO, ("clock",)),
            (ChoiceMode.REQUIRED, ("clock",)),
        )
    ]
    assert len({str((turn.messages, turn.tools)) for turn in turns}) == 1
    forms = [turn.form("") for turn in turns]
    assert [form.names for form in forms] == [("weather", "clock"), ("clock",), ("clock",)]
    assert [form.refused for form in forms] == [(), ("weather",), ("weather",)]
    assert turns[0].constraint is turns[1].constraint is None
    assert turns[2].constraint == forced_calls(HERMES_FORMAT, [CLOCK], REQUIRED)


@every_syntax
def test_one_call_is_exactly_one(syntax: Any) -> None:
    """SPEC D7: parallel_tool_calls false, and a named tool."""
    _, single = forced_calls(syntax, [WEATHER, CLOCK], REQUIRED, max_calls=1)
    _, named = forced_calls(syntax, [WEATHER, CLOCK], ToolChoice(ChoiceMode.NAMED, "weather"))
    for source in (single, named):
        assert follows(source, FORCED[syntax.name]) == (True, True)
        assert not follows(source, FORCED_TWICE[syntax.name])[0]
        assert not follows(source, FORCED_TWICE[syntax.name].replace("clock", "weather").replace("{}", CITY))[
            0
        ]
    assert "clock" not in named
    _, several = forced_calls(syntax, [WEATHER], REQUIRED)
    assert follows(several, FORCED_TWICE[syntax.name].replace("clock", "weather").replace("{}", CITY))[0]


def test_references_inside_a_schema_keep_their_root() -> None:
    """SPEC D2, D7: a schema with definitions of its own is not moved."""
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
    }
    _, source = forced_calls(LLAMA3_FORMAT, [Tool("f", "", schema)], REQUIRED)
    assert follows(source, '{"name": "f", "parameters": {"a": 7}}') == (True, True)
    assert not follows(source, '{"name": "f", "parameters": {"a": "x"}}')[0]


def test_too_many_words_for_a_grammar_are_refused() -> None:
    """SPEC S4: tools that may be offered but are too much to force."""
    tools = [Tool(f"f{i}", "", {"type": "object", "title": "x" * 60_000}) for i in range(3)]
    with pytest.raises(InvalidRequestError, match="at most 131072") as caught:
        forced_calls(HERMES_FORMAT, tools, REQUIRED)
    assert caught.value.param == "tools"
    assert forced_calls(HERMES_FORMAT, tools, ToolChoice(ChoiceMode.NAMED, "f0"))


def test_a_forced_turn_carries_constraint_and_prefill() -> None:
    """SPEC D7: the prompt of a family with a control token ends with it, so that the grammar needs none."""
    turn = prepared_turn([USER], MISTRAL_V3, ToolOffer((CLOCK,), REQUIRED, max_calls=1))
    assert turn.prefill == "[TOOL_CALLS]"
    assert turn.constraint == forced_calls(MISTRAL_FORMAT, [CLOCK], REQUIRED, 1)
    assert turn.control_tokens == ("[TOOL_CALLS]",)
    thinking = prepared_turn([USER], MISTRAL_V3 + "[/THINK]", ToolOffer((CLOCK,), REQUIRED))
    assert thinking.prefill == ""
    assert prepared_turn([USER], QWEN, NO_TOOLS).constraint is None


def test_one_call_at_most_ends_the_answer_behind_it() -> None:
    """SPEC D7: parallel_tool_calls false without force; the parser needs no closing tag."""
    offer = ToolOffer((WEATHER,), max_calls=1)
    (stop,) = set(prepared_turn([USER], QWEN, offer).stops) - TURN_ENDS
    text = FORCED["hermes"].partition(stop)[0]
    parser = ToolCallParser(HERMES_FORMAT.syntax, KnownTools(("weather",)), "seed")
    assert isinstance((parser.feed(text) + parser.finish())[-1], CallEnded)
    for template, given in ((QWEN, ToolOffer((WEATHER,))), (LLAMA, offer)):
        assert set(prepared_turn([USER], template, given).stops) <= TURN_ENDS


def test_a_schema_with_too_long_a_text_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D7: encoding 32 MiB would hold the front up for a fifth of a second."""
    monkeypatch.setattr("stoker.chat.tools.tools.json.dumps", lambda *_, **__: pytest.fail("it was encoded"))
    properties = {"a": {"enum": ["x" * MAX_SCHEMA_CHARS]}}
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_SCHEMA_CHARS} are taken"):
        checked_tools([declared(parameters={"properties": properties})])
