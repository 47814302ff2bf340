"""Tables and lines on a terminal and in a pipe: what has to be typed elsewhere is never cut.

Every column but the last is as wide as its widest cell. The last one, a path or a reason, stands beside them
where it fits, else below its row, where the terminal wraps it. Where the others do not fit either, the first
one, a name, stands above them.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

PIPE_COLUMNS = 240  # a pipe has no edge to fold at
_GAP = 2


def new_console() -> Console:
    """A console on stdout, where texts are shown as they are; wide where no terminal has an edge."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def print_table(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> None:
    """Print rows of texts below their header.

    Args:
        console: from `new_console`.
        header: names of the columns.
        rows: a text for each column; empty ones of the last are left out where they would stand below.
        styles: of the rows; too few: the rest has none.
    """
    from rich.cells import cell_len
    from rich.text import Text

    rows = [[_shown(cell) for cell in row] for row in rows]
    widths = [max(len(name), *(cell_len(row[at]) for row in rows), 0) for at, name in enumerate(header)]
    is_beside = sum(widths) + _GAP * len(widths) <= console.width
    end = len(header) if is_beside else max(1, len(header) - 1)
    is_too_wide = sum(widths[:end]) + _GAP * (end - 1) > console.width
    is_above = is_too_wide and end > 1 and console.is_terminal
    start, indent = (1, " " * _GAP) if is_above else (0, "")
    needed = sum(widths[start:end]) + _GAP * (end - start)
    lines = _lines(console, needed, header[start:end], [row[start:end] for row in rows], styles)
    own_styles = ["bold", *styles, *[""] * len(rows)]
    for at, line in enumerate(lines):
        row = rows[at - 1] if at else header
        if is_above and row[0]:
            console.print(row[0], style=own_styles[at])
        shown = Text.assemble(indent, Text.from_ansi(line))
        shown.rstrip()
        console.print(shown)
        if at and row[-1] and end < len(header):
            console.print(f"{'':{_GAP}}{row[-1]}", style="dim")


def _lines(
    console: Console,
    needed: int,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str],
) -> list[str]:
    """A table's lines with their colours, the header's first; they need so many columns of a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_edge=False)
    for name in header:
        table.add_column(name, no_wrap=True)
    for at, row in enumerate(rows):
        table.add_row(*map(Text, row), style=styles[at] if at < len(styles) else "")
    width, console.width = console.width, max(needed, console.width)
    with console.capture() as captured:
        console.print(table)
    console.width = width
    return captured.get().splitlines()


def print_line(console: Console, head: str, text: str, style: str = "") -> None:
    """Print a head with a text beside it, which a terminal gets by words below each other.

    A word wider than the terminal, such as a path, is left whole, so that it can be copied.

    Args:
        console: from `new_console`.
        head: of one line.
        text: any length.
        style: of all.
    """
    from rich.text import Text

    shown = _shown(head + text)
    if console.is_terminal:
        indent = " " * len(head)
        shown = textwrap.fill(
            shown,
            console.width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    console.print(Text(shown, style=style))


def _shown(cell: str) -> str:
    """A name may hold what would break the table's lines or command the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cell)
