"""Tool calls out of text: what each family writes, what weak models write, and what is no call."""

from __future__ import annotations

import json

import pytest

from stoker.chat.answer import AnswerForm, AnswerReader, WholeAnswer, WholeCall
from stoker.chat.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    CallBroken,
    CallCut,
    CallEnded,
    CallEvent,
    Reasoning,
)
from stoker.chat.json_scan import MAX_DEPTH
from stoker.chat.reasoning import THINK
from stoker.chat.tools.calls import KnownTools, ToolCallParser, call_id
from stoker.chat.tools.formats.hermes import GENERIC, HERMES
from stoker.chat.tools.formats.llama import LLAMA3
from stoker.chat.tools.formats.mistral import MISTRAL, MISTRAL_ARGS
from stoker.chat.tools.formats.python import PYTHON
from stoker.chat.tools.syntax import ToolSyntax

F = '{"name": "f", "arguments": {"a": 1}}'


def _nested(depth: int) -> str:
    """An object of that many levels, as JSON."""
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


def read(syntax: ToolSyntax, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of each call, of a text that comes in one piece."""
    parser = ToolCallParser(
        syntax,
        KnownTools(
            (
                "f",
                "g",
            )
        ),
        "seed",
    )
    answer = WholeAnswer()
    answer.add([*parser.feed(text), *parser.finish()])
    assert len(answer.calls) == parser.num_calls
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


ONE = [("f", '{"a": 1}')]
FENCED = f"```json\n{F}\n```"


@pytest.mark.parametrize(
    ("syntax", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", ONE),
        (HERMES, f"<tool_call>{F}</tool_call>", "", ONE),
        (HERMES, f"Well.\n<tool_call>\n{F}\n</tool_call>\n", "Well.", ONE),
        (HERMES, f"<tool_call>\n{F}\n</tool_call>\nDone.", "\nDone.", ONE),
        (HERMES, f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{F}\n</tool_call>", "", ONE * 2),
        (HERMES, f"a <tool_call>{F}</tool_call> b <tool_call>{F}</tool_call> c", "a b c", ONE * 2),
        (GENERIC, f"<tool_call>\n{F}\n</tool_call>", "", ONE),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", ONE),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", ONE),
        (LLAMA3, f"{F}; {F}", "", ONE * 2),
        (LLAMA3, f"{F}\n{F}", "", ONE * 2),
        (MISTRAL, f"[TOOL_CALLS] [{F}]", "", ONE),
        (MISTRAL, f"[TOOL_CALLS][{F}, {F}]", "", ONE * 2),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "", ONE),
        (MISTRAL, f"[{F}]", "", ONE),
        (MISTRAL, f"[TOOL_CALLS]{F}", "", ONE),
        (HERMES, FENCED, "", ONE),
        (HERMES, f"{FENCED}\n{FENCED}\nDone.", "\nDone.", ONE * 2),
        (LLAMA3, f"```json\n[{F}, {F}]\n```", "", ONE * 2),
        (GENERIC, f"[{F},{F}] Done.", " Done.", ONE * 2),
        (GENERIC, f"[{F} , {F}\n] Done.", " Done.", ONE * 2),
        (HERMES, f"<tool_call>[{F}]</tool_call>", "", ONE),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}', "", ONE),
        (
            MISTRAL_ARGS,
            'So: [TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
            "So:",
            [*ONE, ("g", "{}")],
        ),
    ],
)
def test_each_family_is_read_as_it_is_written(
    syntax: ToolSyntax, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """SPEC D7: parsed per template family, parallel calls, text before, between and after."""
    assert read(syntax, text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', ONE),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ONE),
        ('{"name": "f", "parameters": {"a": 1}}', ONE),
        ('{"type": "function", "name": "f", "arguments": {"a": 1}}', ONE),
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "f", "arguments": null}', [("f", "{}")]),
        ('{"name": "f", "arguments": ""}', [("f", "{}")]),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', [("f", '{"a": "x\\ny"}')]),
        ('{"name": "f", "arguments": {"a": 1}', ONE),  # a brace too few
        (f'{{"name": "f", "arguments": {_nested(MAX_DEPTH)}}}', [("f", _nested(MAX_DEPTH))]),
        ('{"name": "f", "arguments": {"a": 1}}}', ONE),  # a brace too many
        ('{"name": "unknown", "arguments": {}}', [("unknown", "{}")]),  # the caller answers that
    ],
)
def test_what_weak_models_write_is_understood(text: str, calls: list[tuple[str, str]]) -> None:
    """SPEC D7: keys in any order, arguments as text or left out, raw line breaks, one brace off."""
    assert read(HERMES, f"<tool_call>\n{text}\n</tool_call>") == ("", calls)


@pytest.mark.parametrize("syntax", [HERMES, LLAMA3, GENERIC])
def test_a_call_without_its_tag_counts_where_it_stands_alone_and_names_a_tool(syntax: ToolSyntax) -> None:
    """SPEC D7: bare JSON; an answer that only looks like one is an answer."""
    assert read(syntax, f" \n{F}\n") == ("", ONE)
    for text in (
        '{"name": "Ada", "born": 1815}',
        '{"title": "f"}',
        f"Like {F}",
        '{"name": "other", "arguments": {}}',
    ):
        assert read(syntax, text) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nhello\n</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": "f", "name": "g"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "f", "argume',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\u00g0"}}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": {_nested(MAX_DEPTH + 1)}}}</tool_call>',
        "a <b> </tool_call> <tool",
        '```json\n{"name": "Ada", "born": 1815}\n```',
        '```json\n{"name": "other", "arguments": {}}\n```',
        "```js",
        "```json",
        "```python\nprint(1)\n```",
        f"For instance:\n{FENCED}",
        "[[1]]",
        "  \n",
    ],
)
def test_what_is_no_call_is_content_and_none_of_it_is_lost(text: str) -> None:
    """SPEC D7: malformed call text is delivered as content."""
    assert read(HERMES, text) == (text, [])


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (MISTRAL, "[TOOL_CALLS] none"),
        (MISTRAL, "[1, 2]"),
        (MISTRAL, "[TOOL"),
        (MISTRAL_ARGS, "[TOOL_CALLS][TOOL_CALLS]"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]7"),
        (LLAMA3, "<|python_tag|>print(1)"),
        (PYTHON, f"<|python_start|>[f(a={'[' * MAX_DEPTH}{']' * MAX_DEPTH})]"),
    ],
)
def test_what_is_no_call_in_other_families_is_content_too(syntax: ToolSyntax, text: str) -> None:
    """SPEC D7: malformed call text is delivered as content."""
    assert read(syntax, text) == (text, [])


def test_a_good_call_behind_a_bad_one_is_found() -> None:
    """SPEC D7: reading goes on right behind what was wrong."""
    assert read(HERMES, f'<tool_call>{{"name" oops <tool_call>{F}</tool_call>') == (
        '<tool_call>{"name" oops',
        ONE,
    )
    assert read(HERMES, f"<tool_call><tool_call>{F}</tool_call>") == ("<tool_call>", ONE)


def events_by_character(syntax: ToolSyntax, text: str) -> list[CallEvent]:
    """What comes of a text a character at a time, without the end."""
    parser = ToolCallParser(syntax, KnownTools(("f",)), "seed")
    return [event for char in text for event in parser.feed(char)]


def test_arguments_stream_as_they_come() -> None:
    """SPEC D7: the name once, then fragments, each at the character that makes it safe."""
    parser = ToolCallParser(HERMES, KnownTools(("f",)), "seed")
    assert parser.feed('<tool_call>\n{"name": "f", "arguments"') == []
    assert parser.feed(': {"ci') == [CallBegan(0, call_id("seed", 0, 0), "f"), CallArguments(0, '{"ci')]
    assert parser.feed('ty": "Bo') == [CallArguments(0, 'ty": "Bo')]
    assert parser.feed('nn"}}\n</tool') == [CallArguments(0, 'nn"}'), CallEnded(0)]
    assert parser.feed("_call>") == []
    assert parser.finish() == []


def test_text_that_may_begin_a_tag_is_held_and_flushed() -> None:
    """SPEC D7: held while partial, not a character more, and delivered at the end."""
    parser = ToolCallParser(HERMES, KnownTools(("f",)), "seed")
    assert parser.feed("a <tool") == ["a"]
    assert parser.feed("s> b") == [" <tools> b"]
    assert parser.feed(" <") == []
    assert parser.finish() == [" <"]


def test_plain_json_is_let_go_as_soon_as_it_cannot_be_a_call() -> None:
    """SPEC D7: an answer in JSON is held for its first key only."""
    events = events_by_character(LLAMA3, '{"title": "x')
    assert events[0] == '{"title"'
    assert "".join(event for event in events if isinstance(event, str)) == '{"title": "x'


def test_a_call_that_the_text_ends_within_is_said_to_be_cut() -> None:
    """SPEC D7: a stream has shown its beginning, and a whole answer shows no more and no less."""
    text = '<tool_call>{"name": "f", "arguments": {"a": '
    parser = ToolCallParser(HERMES, KnownTools(("f",)), "seed")
    assert [type(event) for event in parser.feed(text)] == [CallBegan, CallArguments]
    assert parser.finish() == [CallCut(0, text)]
    assert parser.num_calls == 0


def test_what_breaks_within_a_text_is_said_to_be_no_call() -> None:
    """SPEC D7: a whole answer shows its text as content."""
    text = '<tool_call>{"name": "f", "arguments": {"a": '
    parser = ToolCallParser(HERMES, KnownTools(("f",)), "seed")
    assert parser.feed(f"{text}]")[2:] == [CallBroken(0, text), "]"]


@pytest.mark.parametrize("end", ["", "}", "}\n", "}\n</tool"])
def test_a_text_that_ends_behind_whole_arguments_holds_a_whole_call(end: str) -> None:
    """SPEC D7: what would only have closed it is no matter."""
    assert read(HERMES, f'<tool_call>\n{{"name": "f", "arguments": {{"a": 1}}{end}') == ("", ONE)


def test_ids_depend_on_answer_choice_and_call_alone() -> None:
    """SPEC D7, L3: a replay makes the same ones."""
    one, other = (
        [
            event.id
            for event in events_by_character(HERMES, f"<tool_call>{F}</tool_call>" * 2)
            if isinstance(event, CallBegan)
        ]
        for _ in range(2)
    )
    assert one == other
    assert len({*one, call_id("seed", 1, 0), call_id("other", 0, 0)}) == 4
    assert all(own_id.startswith("call_") and len(own_id) == 29 for own_id in one)
    assert int(one[0].removeprefix("call_"), 16) >= 0


def test_an_answer_is_reasoning_then_content_then_calls() -> None:
    """SPEC D7: the three readers in a row; a tag inside the reasoning is no call."""
    text = f"<think>Shall I <tool_call>?</think>\n\nYes.\n<tool_call>\n{F}\n</tool_call>"
    reader = AnswerReader(AnswerForm(HERMES, ("f",), THINK), "seed", 2)
    events: list[AnswerEvent] = [event for char in text for event in reader.feed(char)]
    answer = WholeAnswer()
    answer.add([*events, *reader.finish()])
    call = WholeCall(call_id("seed", 2, 0), "f", '{"a": 1}')
    assert answer == WholeAnswer("Yes.", "Shall I <tool_call>?", [call])
    assert [type(event) for event in answer.events()] == [
        Reasoning,
        str,
        CallBegan,
        CallArguments,
        CallEnded,
    ]
    assert json.loads(call.arguments) == {"a": 1}


def test_without_tools_or_tags_text_passes_as_it_is() -> None:
    """SPEC D7: nothing is looked for, nothing is held."""
    reader = AnswerReader(AnswerForm(), "seed")
    assert reader.feed("<think>a<tool_call>") == ["<think>a<tool_call>"]
    assert reader.feed("") == reader.finish() == []
