"""Timelines as a picture: both servers, one under the other, on one scale of seconds.

Thick bars are what ran, in as many lanes as slots were in use; thin lines below, what waited or paused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.timeline import Spell, State
from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from bench.results import Comparison
    from bench.timeline import Timeline

COLOURS = {Priority.BACKGROUND: "#6b8cae", Priority.INTERACTIVE: "#d98c21"}
STYLES = {State.WAITING: "-", State.PAUSED: ":"}
BROKEN = "#b00020"
QUEUE_STEP = 0.3
GAP = 0.4
LANE_INCHES = 0.3
WIDTH_INCHES = 10.0
LEAST_WIDTH = 1 / 500


def draw_timelines(comparison: Comparison, labels: Sequence[str], path: Path) -> None:
    """Write the timelines of `comparison`, which has one for each of `labels`, to `path` (PNG)."""
    timelines = comparison.timelines
    heights = [_height(timeline) for timeline in timelines]
    inches = 1.6 + sum(0.4 + LANE_INCHES * height for height in heights)
    canvas = Canvas(figsize=(WIDTH_INCHES, inches), layout="constrained")
    grid = canvas.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)
    end_s = max(timeline.end_s for timeline in timelines)
    for axes, timeline, label in zip(grid[:, 0], timelines, labels, strict=True):
        _draw(axes, timeline, end_s)
        axes.set_title(f"{label}: {timeline.end_s:.1f} s", fontsize=10, loc="left")
    grid[-1, 0].set_xlabel("seconds since the first request, as the client saw it")
    canvas.suptitle(comparison.title, fontsize=11)
    canvas.legend(handles=_legend(timelines), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    canvas.savefig(path, dpi=150)


def _height(timeline: Timeline) -> float:
    return len(timeline.slots) + GAP + QUEUE_STEP * len(timeline.queue) + GAP


def _draw(axes: Axes, timeline: Timeline, end_s: float) -> None:
    for slot, lane in enumerate(timeline.slots):
        for spell in lane:
            width = max(spell.ended_s - spell.began_s, end_s * LEAST_WIDTH)
            axes.barh(slot, width, left=spell.began_s, height=0.7, color=COLOURS[spell.priority])
            _mark(axes, spell, slot)
    top = len(timeline.slots) - 0.5 + GAP
    for row, lane in enumerate(timeline.queue):
        for spell in lane:
            y = top + QUEUE_STEP * row
            ends = (spell.began_s, spell.ended_s)
            axes.plot(
                ends,
                (y, y),
                STYLES[spell.state],
                color=COLOURS[spell.priority],
                lw=1.3,
                solid_capstyle="butt",
            )
            _mark(axes, spell, y)
    # the client cannot know the numbers that the server gave its slots
    names = [f"lane {index + 1}" for index in range(len(timeline.slots))]
    middle = top + QUEUE_STEP * max(0, len(timeline.queue) - 1) / 2
    axes.set_yticks([*range(len(names)), middle], [*names, "waiting"], fontsize=9)
    axes.set_xlim(0, end_s * 1.01)
    axes.set_ylim(_height(timeline) - 0.5, -0.5)
    axes.axvline(timeline.end_s, color="#444444", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(axes: Axes, spell: Spell, y: float) -> None:
    if spell.is_broken:
        axes.plot([spell.ended_s], [y], "X", color=BROKEN, markersize=7, clip_on=False)


def _legend(timelines: Sequence[Timeline]) -> list[Artist]:
    spells = [s for timeline in timelines for lane in (*timeline.slots, *timeline.queue) for s in lane]
    handles: list[Artist] = [
        Patch(color=colour, label=priority.value)
        for priority, colour in COLOURS.items()
        if any(spell.priority is priority for spell in spells)
    ]
    handles += [
        Line2D([], [], color="#444444", linestyle=style, lw=1.3, label=label)
        for label, style in (("until its first token", "-"), ("paused: had tokens, none come", ":"))
    ]
    if any(spell.is_broken for spell in spells):
        handles.append(Line2D([], [], color=BROKEN, marker="X", linestyle="", label="failed or cut short"))
    return handles
