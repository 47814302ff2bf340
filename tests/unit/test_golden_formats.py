"""Transcripts of every format of tool calls (tests/golden), whole and in pieces; forced calls read back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stoker.chat.answer import AnswerReader, WholeAnswer
from stoker.chat.answer_events import AnswerEvent, CallArguments, CallEnded
from stoker.chat.conversation import ToolOffer, prepared_turn
from stoker.chat.reasoning import reasoning_tags_of
from stoker.chat.tools.constraints import forced_calls
from stoker.chat.tools.formats.table import FORMATS, format_named, format_of
from stoker.chat.tools.tools import ChoiceMode, Tool, ToolChoice

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
REQUIRED = ToolChoice(ChoiceMode.REQUIRED)
TEXT = {"type": "string"}
TOOLS = (
    Tool(
        "weather",
        "",
        {"type": "object", "properties": {"city": TEXT, "days": {"type": "integer"}}, "required": ["city"]},
    ),
    Tool("clock"),
    Tool(
        "write",
        "",
        {
            "type": "object",
            "properties": {
                "path": TEXT,
                "text": {"$ref": "#/$defs/text"},
                "lines": {"type": "array"},
                "force": {"type": "boolean"},
                "mode": {"enum": ["644", "755", "true"]},
                "owner": {"anyOf": [TEXT, {"type": "null"}]},
            },
            "$defs": {"text": TEXT},
        },
    ),
)
FILES = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(GOLDEN.glob("*.toml"))]
CASES = [
    pytest.param(file["format"], file["template"], case, id=f"{file['format']}-{index}")
    for file in FILES
    for index, case in enumerate(file["transcript"])
]
every_format = pytest.mark.parametrize("name", [one.name for one in FORMATS])


def with_nulls(value: Any) -> Any:
    """What a transcript expects, with null, which its notation has not."""
    match value:
        case dict():
            return {key: with_nulls(one) for key, one in value.items()}
        case list():
            return [with_nulls(one) for one in value]
        case _:
            return None if value == "NULL" else value


def reader(template: str, tool_format: str | None = None) -> AnswerReader:
    """Of an answer to a turn with the tools."""
    offer = ToolOffer(TOOLS, tool_format=tool_format)
    turn = prepared_turn([{"role": "user", "content": "Hi"}], template, offer)
    return AnswerReader(turn.form(""), "seed")


def read(template: str, text: str, size: int, tool_format: str | None = None) -> WholeAnswer:
    """The answer that a text is which comes in pieces of that many characters."""
    own = reader(template, tool_format)
    answer = WholeAnswer()
    for at in range(0, len(text), size):
        answer.add(own.feed(text[at : at + size]))
    answer.add(own.finish())
    assert own.num_calls == sum(not call.is_cut for call in answer.calls)
    return answer


@pytest.mark.parametrize("size", [1, 3, 7, 1_000_000])
@pytest.mark.parametrize(("name", "template", "case"), CASES)
def test_a_transcript_is_read_the_same_however_it_is_cut(
    name: str, template: str, case: dict[str, Any], size: int
) -> None:
    """SPEC D12: the template's own text tells the format; calls, reasoning and text, in pieces too."""
    assert format_of(template).name == name
    answer = read(template, case["text"], size)
    calls = [[call.name, json.loads(call.arguments)] for call in answer.calls]
    expected = (case.get("reasoning", ""), case.get("content", ""), with_nulls(case.get("calls", [])))
    assert (answer.reasoning, answer.content, calls) == expected


@pytest.mark.parametrize("size", [1, 1_000_000])
@pytest.mark.parametrize(("name", "template", "case"), CASES)
def test_a_call_of_a_tool_that_is_not_allowed_is_text_in_every_format(
    name: str, template: str, case: dict[str, Any], size: int
) -> None:
    """SPEC D7: whatever the form, no client is asked to run it, and what the model wrote is shown."""
    offer = ToolOffer(TOOLS, ToolChoice(allowed=("another",)))
    own = AnswerReader(prepared_turn([{"role": "user", "content": "Hi"}], template, offer).form(""), "seed")
    answer = WholeAnswer()
    for at in range(0, len(case["text"]), size):
        answer.add(own.feed(case["text"][at : at + size]))
    answer.add(own.finish())
    assert (answer.calls, own.num_calls, answer.reasoning) == ([], 0, case.get("reasoning", "")), name
    assert answer.content.strip() or not (case.get("calls") or case.get("content"))


def test_every_format_has_a_transcript_with_a_call() -> None:
    """SPEC D12: nothing in the table is left untried."""
    tried = {file["format"] for file in FILES if any(case.get("calls") for case in file["transcript"])}
    assert tried == {one.name for one in FORMATS}
    assert len({one.name for one in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize(("name", "template", "case"), CASES)
def test_arguments_stream_as_they_come(name: str, template: str, case: dict[str, Any]) -> None:
    """SPEC D12: of a call with texts most of the arguments are out before the call has ended."""
    own = reader(template)
    events: list[AnswerEvent] = [event for char in case["text"] for event in own.feed(char)]
    ends = [at for at, event in enumerate(events) if isinstance(event, CallEnded)]
    for end in ends:
        index = events[end].index  # type: ignore[union-attr]
        pieces = [event for event in events if isinstance(event, CallArguments)]
        parts = [event.fragment for event in pieces if event.index == index]
        assert len(parts) > 2 or "".join(parts) == "{}", (name, parts)


@pytest.mark.parametrize(("name", "template", "case"), CASES)
def test_a_transcript_that_ends_anywhere_raises_nothing_and_loses_no_text(
    name: str, template: str, case: dict[str, Any]
) -> None:
    """SPEC D12: a broken call is text or a cut call, never an exception, and reads the same in pieces."""
    text = case["text"]
    for end in range(len(text)):
        assert read(template, text[:end], 1) == read(template, text[:end], 1_000_000), (name, text[:end])


def follows(source: str, text: str) -> bool:
    """Whether a grammar takes the text, and it may end there."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(source))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def written(name: str) -> str:
    """A forced answer of two calls, as the format declares it."""
    style = format_named(name)
    form, tags = style.forced, style.syntax.tags
    arguments = '{"city": "Bonn", "days": 2}'
    if tags is not None:
        line, kinds = "\n" if tags.is_padded else "", tags.kinds or ("", "")
        arguments = "".join(
            f"{tags.key[0]}{key}{kind}{tags.key[1]}{tags.value[0]}{line}{value}{line}{tags.value[1]}\n"
            for key, kind, value in (("city", kinds[0], "Bonn"), ("days", kinds[1], "2"))
        )
    empty = "{}" if tags is None else ""
    calls = [("weather", arguments), ("clock", empty)]
    each = [form.head.replace("$name", tool) + given + form.tail for tool, given in calls]
    return form.before + form.between.join(each) + form.after


@every_format
def test_a_forced_answer_is_what_the_reader_reads_back(name: str) -> None:
    """SPEC D12: required is enforced in the format's own form, and nothing else is let through."""
    _, source = forced_calls(format_named(name), TOOLS, REQUIRED)
    text = written(name)
    assert follows(source, text)
    for wrong in (
        text.replace("weather", "other"),
        text.replace("days", "dais"),
        f"Hello {text}",
        text + "!",
    ):
        assert not follows(source, wrong), wrong
    answer = read("{{ tools }}", text, 1, name)
    assert (answer.content, answer.reasoning) == ("", "")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        ("weather", {"city": "Bonn", "days": 2}),
        ("clock", {}),
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file["format"])
def test_what_a_format_looks_for_is_spelled_out(file: dict[str, Any]) -> None:
    """SPEC D12: control tokens of the format and of its reasoning are part of the text."""
    turn = prepared_turn([{"role": "user", "content": "Hi"}], file["template"], ToolOffer(TOOLS))
    tags = reasoning_tags_of(file["template"])
    assert set(tags.spelled if tags else ()) <= set(turn.control_tokens)
    assert set(format_named(file["format"]).control_tokens) <= set(turn.control_tokens)
