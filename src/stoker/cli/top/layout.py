"""Lines of fixed columns, and how the rows of a screen are shared between its parts.

Every line is cut to the width it is made for; nothing wraps, so a frame has as many lines as it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters beyond ASCII that a frame draws with."""

    full: str = "█"
    empty: str = "░"
    cut: str = "…"
    dot: str = "·"
    arrows: str = "↑↓"


UNICODE = Glyphs()
ASCII = Glyphs(full="#", empty="-", cut="~", dot="-", arrows="up/down")
"""For a terminal that shows no others."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a part of the screen.

    Attributes:
        name: its heading.
        width: in cells; 0: what the others leave.
        is_number: aligned to the right.
        least_width: a narrower screen leaves it out; 0: it is always there.
    """

    name: str
    width: int
    is_number: bool = False
    least_width: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a part.

    Attributes:
        cells: a text for each column.
        style: of the whole line.
        request_id: what it is about; empty: no request.
        is_idle: it makes room for others where not all rows fit.
    """

    cells: Sequence[str]
    style: str = ""
    request_id: str = ""
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the screen.

    Attributes:
        title: stands before the headings of its columns.
        columns: of every row.
        rows: all there are.
        share: how much of a small screen it gets, beside other parts.
        empty: what stands there without rows.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    share: int
    empty: str


def fitted(text: str, width: int, cut: str) -> str:
    """A text of exactly that many cells, its end cut off or filled with blanks."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(0, width - len(cut))) + cut[:width]


def columns_shown(columns: Sequence[Column], width: int) -> list[tuple[int, Column, int]]:
    """The columns that a screen of that width has: where each stands among all, itself, its width."""
    shown = [(at, column) for at, column in enumerate(columns) if width >= column.least_width]
    rest = width - sum(column.width + 1 for _, column in shown) + 1
    return [(at, column, column.width or max(4, rest)) for at, column in shown]


def line_of(part: Part, cells: Sequence[str], width: int, cut: str) -> str:
    """A row of cells as a line of at most that width."""
    from rich.cells import cell_len

    pieces = []
    for at, column, size in columns_shown(part.columns, width):
        cell = printable(cells[at])
        filler = " " * max(0, size - cell_len(cell)) if column.is_number else ""
        pieces.append(fitted(filler + cell, size, cut))
    return fitted(" ".join(pieces), width, cut).rstrip()


def printable(text: str) -> str:
    """A name may hold what would break the lines or command the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def shares(wanted: Sequence[tuple[int, int]], num_lines: int) -> list[int]:
    """How many lines each part gets.

    Args:
        wanted: of each part how many lines it would fill, and its share.
        num_lines: to give away; all parts get what they want where that fits.
    """
    given = [0] * len(wanted)
    left = num_lines
    while left > 0:
        open_parts = [at for at, (most, _) in enumerate(wanted) if given[at] < most]
        if not open_parts:
            break
        at = min(open_parts, key=lambda each: (given[each] / wanted[each][1], each))
        given[at] += 1
        left -= 1
    return given


def lines_of(part: Part, num_rows: int, width: int, glyphs: Glyphs, selected: str) -> list[Text]:
    """The heading of a part and at most so many rows, the selected one among them; the rest is counted."""
    from rich.text import Text

    heading = line_of(part, [column.name for column in part.columns], width, glyphs.cut)
    lines = [Text(heading, "bold")]
    if not part.rows:
        return [*lines, Text(fitted(part.empty, width, glyphs.cut).rstrip(), "dim")][: num_rows + 1]
    rows = part.rows if len(part.rows) <= num_rows else sorted(part.rows, key=lambda row: row.is_idle)
    begin, end = _window(rows, num_rows, selected)
    for row in rows[begin:end]:
        text = line_of(part, row.cells, width, glyphs.cut)
        is_selected = bool(selected) and row.request_id == selected
        lines.append(
            Text(fitted(text, width, glyphs.cut), "reverse") if is_selected else Text(text, row.style)
        )
    if end - begin < len(part.rows):
        more = len(part.rows) - (end - begin)
        lines.append(Text(fitted(f"{glyphs.cut} {more:,} more", width, glyphs.cut).rstrip(), "dim"))
    return lines


def _window(rows: Sequence[Row], num_rows: int, selected: str) -> tuple[int, int]:
    """Which rows are shown; one line of the room says how many are not."""
    if len(rows) <= num_rows:
        return 0, len(rows)
    room = max(0, num_rows - 1)
    at = next((at for at, row in enumerate(rows) if selected and row.request_id == selected), 0)
    begin = min(max(0, at - room + 1), len(rows) - room)
    return begin, begin + room
