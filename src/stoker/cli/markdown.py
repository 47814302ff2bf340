"""A model's Markdown in a terminal, block by block as it comes.

Owns where a text can be cut so that what is shown stays as it is, and how a block looks. rich renders it;
where and when it is printed is the screen's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from markdown_it import MarkdownIt
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment
from rich.syntax import Syntax
from rich.theme import Theme

if TYPE_CHECKING:
    from markdown_it.token import Token
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.markdown import MarkdownElement

THEME = Theme({"markdown.code": "cyan", "markdown.h1": "bold underline", "markdown.h2": "bold"})
"""Without backgrounds, so that it is readable on dark and on light terminals."""
CODE_THEME = "ansi_dark"

_PARSER = (
    MarkdownIt("commonmark", {"html": False})
    .enable(["table", "strikethrough"])
    .disable(["html_block", "html_inline", "image", "reference"])
)
"""As CommonMark, but nothing of the text is left out: tags, images and definitions stand as written."""
_UNDECIDED = re.compile(r"[ \t]*(?:[-=*+#>`~|: \t]+|\d{1,9}[.)]?)[ \t]*")
"""A line that begins like this may still become a heading, a list, a fence, a rule or a table."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of an answer that is rendered by itself.

    Attributes:
        source: its text.
        is_sequel: it goes on with the one before it, without a blank line between.
    """

    source: str
    is_sequel: bool = False


class MarkdownStream:
    """Markdown cut into blocks as it comes; all blocks in order hold the whole text."""

    def __init__(self) -> None:
        self._open = ""
        self._is_sequel = False

    def __repr__(self) -> str:
        return f"MarkdownStream({len(self._open)} characters open)"

    def feed(self, text: str) -> list[Block]:
        """The blocks that are complete with `text`: nothing that follows changes how they look."""
        self._open += text
        if "\n" not in text:
            return []
        later = [token.map[0] for token in self._tokens() if token.map][1:]
        return [self._taken(end - begin) for begin, end in pairwise([0, *later])]

    def cut(self) -> list[Block]:
        """The part of the open block that stays as it is, so that a long one need not wait for its end.

        Of a code block its whole lines, of a list all items but the last, of others nothing.
        """
        tokens = self._tokens()
        if not tokens or tokens[-1].map is None:
            return []
        if tokens[-1].type == "fence":
            return self._cut_fence(tokens[-1].markup, tokens[-1].map[1])
        items = [
            token.map[0] for token in self._tokens(level=1) if token.type == "list_item_open" and token.map
        ]
        if len(items) < 2:  # noqa: PLR2004 - one to cut off, one that is open
            return []
        block = self._taken(items[-1])
        self._is_sequel = True
        return [block]

    @property
    def open(self) -> Block:
        """What may still change, without a last line of which nothing can be said yet."""
        lines = _lines(self._open)
        if lines and len(lines) > 1 and _UNDECIDED.fullmatch(lines[-1]):
            lines.pop()
        return Block("".join(lines), self._is_sequel)

    def finish(self) -> list[Block]:
        """The rest; what is fed next begins a new text."""
        rest = Block(self._open, self._is_sequel)
        self._open, self._is_sequel = "", False
        return [rest] if rest.source.strip() else []

    def _tokens(self, level: int = 0) -> list[Token]:
        """What begins a block in the whole lines; what a line that is not whole will be is not known."""
        whole = self._open[: self._open.rfind("\n") + 1]
        return [token for token in _PARSER.parse(whole) if token.level == level and token.nesting >= 0]

    def _taken(self, num_lines: int) -> Block:
        """Cut so many lines off the front of what is open."""
        lines = _lines(self._open)
        block = Block("".join(lines[:num_lines]), self._is_sequel)
        self._open, self._is_sequel = "".join(lines[num_lines:]), False
        return block

    def _cut_fence(self, markup: str, num_whole: int) -> list[Block]:
        """The lines of code so far as a block of their own; nothing where there are none or all are known."""
        lines = _lines(self._open)
        is_closed = num_whole > 1 and lines[num_whole - 1].strip().startswith(markup)
        if is_closed or num_whole < 2:  # noqa: PLR2004 - the fence and a line of code
            return []
        opener, code = lines[0], "".join(lines[1:num_whole])
        block = Block(f"{opener}{code}{markup}\n", self._is_sequel)
        self._open, self._is_sequel = opener + "".join(lines[num_whole:]), True
        return [block]


class LineStream:
    """Text cut into lines as it comes; the same calls as `MarkdownStream`."""

    def __init__(self) -> None:
        self._open = ""
        self._is_sequel = False

    def __repr__(self) -> str:
        return f"LineStream({len(self._open)} characters open)"

    def feed(self, text: str) -> list[Block]:
        """The lines that are whole with `text`, as one block."""
        whole, newline, self._open = (self._open + text).rpartition("\n")
        return self._taken(whole) if newline else []

    def cut(self) -> list[Block]:
        """Nothing: only a line is open."""
        return []

    @property
    def open(self) -> Block:
        """The line that is not whole."""
        return Block(self._open, self._is_sequel)

    def finish(self) -> list[Block]:
        """The rest."""
        rest, self._open = self._open, ""
        blocks = self._taken(rest) if rest else []
        self._is_sequel = False
        return blocks

    def _taken(self, text: str) -> list[Block]:
        block, self._is_sequel = Block(text, self._is_sequel), True
        return [block]


def _lines(text: str) -> list[str]:
    """Its lines as Markdown counts them, with their ends."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


class _PlainHeading(Heading):
    """A heading at the left edge, whatever its level."""

    LEVEL_ALIGN: ClassVar = {}


class _BareCode(CodeBlock):
    """Code with highlighting and nothing around it, so that what is copied is the code."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip("\n"),
            self.lexer_name,
            theme=self.theme,
            word_wrap=True,
            background_color="default",
        )


class AnswerMarkdown(Markdown):
    """Markdown of a chat: the model's line breaks stay, code is bare, nothing is left out."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _PlainHeading,
        "fence": _BareCode,
        "code_block": _BareCode,
    }

    def __init__(self, source: str) -> None:
        super().__init__(source, code_theme=CODE_THEME, justify="default", hyperlinks=False)
        self.parsed = _PARSER.parse(source)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


def lines_of(content: RenderableType, console: Console) -> list[list[Segment]]:
    """What the console makes of it, by lines, without blanks around it and at the ends of lines."""
    lines = [_stripped(line) for line in console.render_lines(content, pad=False)]
    filled = [index for index, line in enumerate(lines) if line]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def _stripped(line: list[Segment]) -> list[Segment]:
    while line and not line[-1].text.strip():
        line = line[:-1]
    if not line:
        return []
    text, style, control = line[-1]
    return [*line[:-1], Segment(text.rstrip(), style, control)]
