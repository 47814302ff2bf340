"""Markdown that is cut into blocks as it comes: nothing is lost, and what is printed stays as it is."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stoker.cli.markdown import THEME, AnswerMarkdown, Block, LineStream, MarkdownStream, lines_of

TEXT = """\
# Title

Some *text* with `code`, a <b>tag</b>, ![an image](x.png) and [a link](http://a.b).
Roses are red
violets are blue

1. one
2. two
   - nested

```python
def f(x):
    return x
```

| a | b |
|---|---|
| 1 | 2 |

> quote

[ref]: http://c.d
The end. 日本語
"""
PIECES = [
    "# a",
    "\n",
    "\n\n",
    "- x",
    "1. y",
    "```",
    "py\n",
    "    code",
    "| a | b |\n|---|---|\n",
    "> q",
    "é日",
    "**b",
    "<i>",
]


def shown(source, width=40):
    """The lines that a terminal of that width shows."""
    console = Console(file=io.StringIO(), width=width, theme=THEME, color_system=None)
    return ["".join(part.text for part in line) for line in lines_of(AnswerMarkdown(source), console)]


def test_a_block_is_complete_when_the_next_one_has_begun():
    """I16: complete blocks are printed for good; the last may still change."""
    stream = MarkdownStream()
    assert stream.feed("para") == []
    assert stream.feed("graph\nof it\n") == []
    assert stream.open == Block("paragraph\nof it\n")
    assert stream.feed("\n- item\n") == [Block("paragraph\nof it\n\n")]
    assert stream.finish() == [Block("- item\n")]
    assert stream.finish() == []


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.booleans())
def test_the_blocks_are_the_text_however_it_is_cut(pieces, is_lines):
    """I16: nothing is lost and nothing is doubled."""
    stream = LineStream() if is_lines else MarkdownStream()
    blocks = [block for piece in pieces for block in stream.feed(piece)] + stream.finish()
    text = "".join(pieces)
    joined = "\n".join(block.source for block in blocks) if is_lines else "".join(b.source for b in blocks)
    assert joined.rstrip() == text.rstrip()


def test_each_block_looks_as_it_does_in_the_whole():
    """Cut into blocks the answer shows the lines that it shows in one piece."""
    stream = MarkdownStream()
    blocks = [block for char in TEXT for block in stream.feed(char)] + stream.finish()
    by_blocks = [line for block in blocks for line in shown(block.source)]
    assert by_blocks == [line for line in shown(TEXT) if line]


def test_nothing_of_the_text_is_left_out_and_line_breaks_stay():
    """I16: tags, images and definitions, which Markdown hides, stand as they were written."""
    lines = shown(TEXT, 100)
    assert "Some text with code, a <b>tag</b>, !an image (x.png) and a link (http://a.b)." in lines
    assert lines[lines.index("Roses are red") + 1] == "violets are blue"
    assert "[ref]: http://c.d" in lines


def test_answers_wrap_by_words_and_what_is_longer_than_a_line_is_folded():
    """I16: no word is cut where it fits on a line; wide characters count two columns."""
    assert shown("one two three four", 10) == ["one two", "three four"]
    assert shown("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert shown("日本語のテキスト", 10) == ["日本語のテ", "キスト"]
    assert shown("```\n" + "y" * 15 + "\n```", 10) == ["y" * 10, "y" * 5]


def test_code_is_shown_without_anything_around_it():
    """What is copied from the terminal is the code."""
    assert shown("```python\nif x:\n    y()\n\nz()\n```") == ["if x:", "    y()", "", "z()"]


def test_whole_lines_of_a_long_code_block_are_cut_off_its_front():
    """I16: a block longer than the screen is printed as it grows."""
    stream = MarkdownStream()
    stream.feed("```py\na\nb\nc")
    assert stream.cut() == [Block("```py\na\nb\n```\n")]
    assert stream.open == Block("```py\nc", is_sequel=True)
    assert stream.cut() == []
    assert stream.feed("\n```\n\n") == []
    assert stream.cut() == []
    assert stream.feed("after\n") == [Block("```py\nc\n```\n\n", is_sequel=True)]
    assert stream.finish() == [Block("after\n")]


def test_all_items_of_a_long_list_but_the_last_are_cut_off():
    """I16: the numbers go on."""
    stream = MarkdownStream()
    stream.feed("1. a\n2. b\n   - c\n3. d\n")
    first = stream.cut()
    assert first == [Block("1. a\n2. b\n   - c\n")]
    assert stream.finish() == [Block("3. d\n", is_sequel=True)]
    assert shown("3. d\n") == [" 3 d"]
    stream.feed("a paragraph\nof lines\n")
    assert stream.cut() == []


@pytest.mark.parametrize("begun", ["-", "==", "2.", "```", "> ", "| "])
def test_a_line_of_which_nothing_is_known_yet_is_not_shown(begun):
    """No flicker: a dash under a paragraph would make a heading of it for one token."""
    stream = MarkdownStream()
    stream.feed(f"text\n{begun}")
    assert stream.open.source == "text\n"
    assert stream.finish() == [Block(f"text\n{begun}")]
