"""Every format of tool calls in a stream: how the text is cut changes nothing, and no text is an error."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.chat.answer import AnswerForm, AnswerReader, WholeAnswer
from stoker.chat.tools.formats.table import FORMATS
from stoker.chat.tools.syntax import CallBody

_COMMON = [
    "f",
    "g",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "a",
    "b",
    '"',
    "'",
    ":",
    ",",
    "=",
    "\\",
    "\n",
    " ",
    "<",
    "</",
]
_COMMON += [
    "1",
    "-2.5",
    "true",
    "None",
    '{"a": 1}',
    '{"name": "f", "arguments": {"a": "x"}}',
    "f(a='x\\n')",
    "é",
]
_CUTS = st.lists(st.integers(0, 10_000), max_size=30)
_TEXTS = {"f": {"a": (), "b": ("null", "object")}}
every_format = pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.name)


def _pieces(style):
    """What the format's calls are made of, whole and in halves."""
    syntax, tags = style.syntax, style.syntax.tags
    marks = [
        *syntax.openers,
        *style.control_tokens,
        syntax.closer,
        syntax.call_closer,
        syntax.marker,
        syntax.quote,
    ]
    if tags is not None:
        marks += [tags.name_end, *tags.key, *tags.value, tags.end, *tags.kinds]
    if style.tags is not None:
        marks += [*style.tags.spelled, style.tags.final, "analysis", "commentary", " to=functions.f", "final"]
    form = style.forced
    call = form.head.replace("$name", "f") + ("" if tags else '{"a": 1}') + form.tail
    marks += [form.before + call + form.after, call, form.head.replace("$name", "g")]
    marks = [mark for mark in marks if mark]
    return [*_COMMON, *marks, *(mark[: len(mark) // 2] for mark in marks if len(mark) > 1)]


def _texts(style):
    return st.lists(st.sampled_from(_pieces(style)), max_size=16).map("".join)


def _read(style, text, cuts):
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    reader = AnswerReader(AnswerForm(style.syntax, ("f",), style.tags, texts=_TEXTS), "seed")
    answer = WholeAnswer()
    for start, end in pairwise(edges):
        answer.add(reader.feed(text[start:end]))
    answer.add(reader.finish())
    return answer


@every_format
@given(data=st.data(), cuts=_CUTS)
def test_the_same_answer_comes_of_a_text_however_it_is_cut(style, data, cuts):
    """SPEC D12: whole and streamed are equal; arguments of a whole call are one JSON object."""
    text = data.draw(_texts(style))
    answer = _read(style, text, cuts)
    assert answer == _read(style, text, [])
    for call in answer.calls:
        assert call.is_cut or isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    "style",
    [one for one in FORMATS if one.syntax.body is not CallBody.CHANNELS],
    ids=lambda style: style.name,
)
@given(data=st.data())
def test_a_text_without_a_call_is_content_to_the_last_character(style, data):
    """SPEC D12: what is no call after all is text, never lost."""
    text = data.draw(_texts(style))
    answer = _read(style, text, [])
    if not answer.calls:
        assert answer.content == text
