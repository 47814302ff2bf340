"""What the README and the pages of docs/ show: fenced blocks with their marks, and commands in running text.

A mark is a comment on the line above a fence. It says what a block is where its language does not:

    file: NAME       the content of that file in the folder of the page's later blocks
    output           what the block before prints; `...` stands for anything, numbers may differ
    drawing          a picture made of characters
    sample: WHY      what something prints that differs from machine to machine
    not run: WHY     needs what a test has not; its syntax is checked, and that commands and options exist
    slow: WHY        runs with the slow tests
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"<!-- (file|output|drawing|sample|not run|slow)(?:: ([^\n]+?))? -->\s*\Z")
NEEDS_WORDS = {"file", "sample", "not run", "slow"}
INDENTED = re.compile(r"(?:\A|\n\n)((?: {4}\S.*\n)+)")
SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
        page: below the root of the repository.
        line: of its fence, from 1.
        mark: the kind of its mark; empty: it has none.
        words: what its mark says after the colon.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str = ""
    words: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language or 'no language'})"


def pages() -> list[Path]:
    """Every page that speaks of the present; decisions and the changelog keep what was."""
    found = (path for path in (ROOT / "docs").rglob("*.md") if "adr" not in path.parts)
    return [*sorted(ROOT.glob("*.md")), *sorted(found)]


def blocks_of(page: Path) -> list[Block]:
    """Its fenced blocks, in order."""
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    return [_block(name, text, found) for found in FENCE.finditer(text)]


def _block(name: str, text: str, found: re.Match[str]) -> Block:
    before = text[: found.start()]
    mark = MARK.search(before)
    kind, words = (mark[1], mark[2] or "") if mark else ("", "")
    indent = len(found["indent"])
    body = "".join(line[indent:] for line in found["text"].splitlines(keepends=True))
    return Block(name, before.count("\n") + 1, found["language"], body, kind, words)


def spans_of(page: Path) -> Iterator[str]:
    """What stands between backticks in its running text."""
    for found in SPAN.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        yield found[1]
