"""Tables and docstrings as Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence

MADE = "<!-- Made by `make reference` from the code; changes belong there. -->\n"
_PROMISE = re.compile(r" ?\((?:SPEC )?[A-Z]\d+(?:, (?:SPEC )?[A-Z]\d+)*\)")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
_EXAMPLE = re.compile(r"(?:^    .*\n?(?:\n(?=    ))?)+", re.MULTILINE)
_ENTRY = re.compile(r"^(\*{0,2}\w[\w, ]*|[A-Z]\w*(?:, \w+)*): ?(.*)$")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a bar inside of a cell is escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = (" ".join(cell.replace("|", "\\|").split()) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def sentence(docstring: str | None) -> str:
    """The first paragraph in one line, without references to promises."""
    paragraph = inspect.cleandoc(docstring or "").split("\n\n")[0]
    return _PROMISE.sub("", " ".join(paragraph.split()))


def docstring_of(thing: object, own: str | None = None) -> str:
    """A docstring's paragraphs, and its sections as lists; empty where there is none."""
    text = _PROMISE.sub("", inspect.cleandoc(own if own is not None else thing.__doc__ or ""))
    parts = _SECTION.split(text)
    out = [_EXAMPLE.sub(_fenced, parts[0]).strip()]
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        out.append(f"{name}:\n\n{_entries(body)}")
    return "\n\n".join(part for part in out if part) + "\n"


def _fenced(found: re.Match[str]) -> str:
    code = textwrap.dedent(found[0]).strip()
    return f"<!-- not run: an excerpt -->\n```python\n{code}\n```\n"


def _entries(body: str) -> str:
    """Entries of a section, one a point; what is indented deeper goes on."""
    points: list[str] = []
    indent = None
    for line in body.splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        if depth > indent and points:
            points[-1] += f" {line.strip()}"
        else:
            points.append(line.strip())
    return "\n".join(_point(point) for point in points)


def _point(text: str) -> str:
    found = _ENTRY.match(text)
    return f"- `{found[1]}`: {found[2]}" if found else f"- {text}"
