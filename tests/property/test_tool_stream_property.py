"""Tool calls and reasoning read from a stream: how the text is cut into pieces changes nothing."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.chat.answer_events import CallArguments, CallEnded, Reasoning
from stoker.chat.json_scan import JsonScanner, Step
from stoker.chat.reasoning import THINK, ReasoningSplitter
from stoker.chat.tools.calls import KnownTools, ToolCallParser
from stoker.chat.tools.formats.hermes import GENERIC, HERMES
from stoker.chat.tools.formats.llama import LLAMA3
from stoker.chat.tools.formats.mistral import MISTRAL, MISTRAL_ARGS

SYNTAXES = [HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, GENERIC]
_PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", ","),
    *(";", ":", '"', "\\", "<", "</", "[TOOL", "\n", " ", "a", "é", "0", "-1.5e3", "tru", "null", "f", "g"),
    *('{"name": "f", "arguments": {"a": [1, "x\\n"]}}', '{"name":"g","parameters":{}}', '"arguments": "{}"'),
    *('{"arguments": {"b": null}, "name": "f"}', '{"name": "f"', '"arguments": {', '[{"name": "f"}'),
    *("f[ARGS]{}", "name", "[CALL_ID]", "```json", "```", '[{"name": "f"}, {"name": "g"}]'),
]
_TAGS = ["<think>", "</think>", "<", "</", "th", "\n", " ", "a", "b"]
_TEXT = st.lists(st.sampled_from(_PIECES), max_size=14).map("".join)
_CUTS = st.lists(st.integers(0, 10_000), max_size=30)


def _cut(text, cuts):
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def _merged(events):
    """The same events with neighbouring pieces of one thing joined."""
    merged = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, str) and isinstance(last, str):
            merged[-1] = last + event
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            merged[-1] = CallArguments(event.index, last.fragment + event.fragment)
        else:
            merged.append(event)
    return merged


def _read(syntax, pieces):
    parser = ToolCallParser(syntax, KnownTools(("f",)), "seed")
    events = [event for piece in pieces for event in parser.feed(piece)]
    return _merged([*events, *parser.finish()])


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
@given(text=_TEXT, cuts=_CUTS)
@example(text='[TOOL_CALLS][{"name": "f"}]', cuts=[1])
@example(text='```json\n{"name": "f"}\n```', cuts=[2, 5, 23])
def test_the_same_calls_come_of_a_text_however_it_is_cut(syntax, text, cuts):
    """SPEC D7: calls span tokens; the concatenation of events is a function of the text alone."""
    assert _read(syntax, _cut(text, cuts)) == _read(syntax, [text])


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
@given(text=_TEXT, cuts=_CUTS)
def test_every_call_that_is_whole_has_arguments_that_are_an_object(syntax, text, cuts):
    """SPEC D7: whatever a model writes, a client can read the arguments of what is called a call."""
    events = _read(syntax, _cut(text, cuts))
    for event in events:
        if isinstance(event, CallEnded):
            parts = [e.fragment for e in events if isinstance(e, CallArguments) and e.index == event.index]
            assert isinstance(json.loads("".join(parts)), dict)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
@given(text=_TEXT, cuts=_CUTS)
def test_a_text_without_a_whole_call_is_content_to_the_last_character(syntax, text, cuts):
    """SPEC D7: malformed call text is delivered as content, never lost."""
    events = _read(syntax, _cut(text, cuts))
    if any(isinstance(event, CallEnded) for event in events):
        return
    shown = [event if isinstance(event, str) else getattr(event, "source", "") for event in events]
    assert "".join(shown) == text


@given(text=st.lists(st.sampled_from(_TAGS), max_size=14).map("".join), cuts=_CUTS, is_open=st.booleans())
def test_reasoning_ends_at_the_same_place_however_the_text_is_cut(text, cuts, is_open):
    """SPEC D7: tags are held while partial."""

    def read(pieces):
        splitter = ReasoningSplitter(THINK, is_open=is_open)
        events = [event for piece in pieces for event in splitter.feed(piece)] + splitter.finish()
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        return reasoning, "".join(event for event in events if isinstance(event, str))

    assert read(_cut(text, cuts)) == read([text])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.long
@given(_JSON, st.sampled_from([None, 1]))
def test_the_scanner_takes_all_json_and_knows_its_end(value, indent):
    """SPEC D7: arguments pass as they are written, to the last brace and not a character further."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    scanner = JsonScanner()
    steps = [scanner.push(char) for char in text]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    assert set(steps[:-1]) <= {Step.MORE}
    assert steps[-1] is (Step.MORE if is_number else Step.LAST)


@given(st.text(alphabet='{}[]",:\\0123.eE+-truefalsn u', max_size=12))
def test_the_scanner_takes_nothing_but_json(text):
    """SPEC D7: what it calls a value, json.loads reads."""
    scanner = JsonScanner()
    for at, char in enumerate(text):
        step = scanner.push(char)
        if step in {Step.LAST, Step.PAST}:
            json.loads(text[: at + (step is Step.LAST)])
        if step is not Step.MORE:
            break
