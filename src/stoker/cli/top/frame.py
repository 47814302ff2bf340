"""A frame of `stoker top`: all its lines, for a size of the screen. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.cli.top import parts
from stoker.cli.top.layout import UNICODE, Glyphs, fitted, lines_of, printable, shares

if TYPE_CHECKING:
    from rich.text import Text

    from stoker.cli.top.layout import Part
    from stoker.cli.top.view import RuntimeView

ALL_LINES = 100_000
"""The height of a frame that is written where nothing scrolls away: a file, a pipe."""
_LEAST_PART_LINES = 2
_LINES_BEFORE_GAPS = 6
"""A part has so many lines, if it wants them, before blank lines are spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameState:
    """What a frame is drawn for, beside the server's state.

    Attributes:
        width, height: of the screen, in cells and lines.
        now: seconds since the epoch, on the server's clock.
        selected: the request of the selected row; empty: none.
        footer: the last line; empty: none.
        glyphs: what it is drawn with.
        silent_s: for how long the server has not answered; None: it does.
    """

    width: int
    height: int
    now: float
    selected: str = ""
    footer: str = ""
    glyphs: Glyphs = UNICODE
    silent_s: float | None = None


def selectable(view: RuntimeView, now: float) -> list[str]:
    """The requests that can be selected, from the top of a frame to its end."""
    rows = [*parts.slots(view, now).rows, *parts.line(view, now).rows]
    return list(dict.fromkeys(row.request_id for row in rows if row.request_id))


def frame(view: RuntimeView, state: FrameState) -> list[Text]:
    """The lines of a frame: at most as many as the screen has, none wider than it is."""
    from rich.text import Text

    def whole(text: str, style: str) -> Text:
        return Text(fitted(printable(text), state.width, state.glyphs.cut).rstrip(), style)

    lines = [whole(text, style) for text, style in parts.head(view, state.now, state.glyphs, state.silent_s)]
    tail = []
    selected = view.requests.get(state.selected)
    if selected is not None:
        tail.append(whole(parts.story(selected, state.glyphs), "italic"))
    if state.footer:
        tail.append(whole(state.footer, "dim"))
    found = [
        parts.slots(view, state.now),
        parts.line(view, state.now),
        parts.recent(view, state.now),
        parts.models(view, state.now),
    ]
    if view.machines:
        found.insert(0, parts.machines(view))
    room = state.height - len(lines) - len(tail)
    lines += _parts_of(found, room, state)
    return [*lines[: max(0, state.height - len(tail))], *tail][: state.height]


def _parts_of(found: list[Part], room: int, state: FrameState) -> list[Text]:
    """The parts below each other in so many lines, with a blank line before each where there is room."""
    from rich.text import Text

    wanted = [(max(1, len(part.rows)) + 1, part.share) for part in found]
    num_gaps = room - sum(min(size, _LINES_BEFORE_GAPS) for size, _ in wanted)
    num_gaps = max(0, min(num_gaps, len(found)))
    given = shares(wanted, room - num_gaps)
    lines: list[Text] = []
    for at, (part, num_lines) in enumerate(zip(found, given, strict=True)):
        if num_lines < _LEAST_PART_LINES:
            continue
        if at < num_gaps:
            lines.append(Text(""))
        lines += lines_of(part, num_lines - 1, state.width, state.glyphs, state.selected)
    return lines
