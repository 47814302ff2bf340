"""What a cache does, as a picture: a row a stage; hit rate on the left, first token on the right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from bench.tables import number

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.results import Comparison, Report
    from bench.stages import Stage

COLOURS = ("#2a7f62", "#8a8f98")
BAR_HEIGHT = 0.38
ROW_INCHES = 0.5
WIDTH_INCHES = 10.0
LOG_SCALE_ABOVE = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """One stage on both servers; None: that server has no answer in it."""

    title: str
    stages: tuple[Stage | None, ...]


def rows_of(comparisons: tuple[Comparison, ...]) -> list[Row]:
    """Every stage of every workload that has some, in order; matched between the servers by name."""
    rows = []
    for comparison in comparisons:
        servers = [{stage.name: stage for stage in stages} for stages in comparison.stages]
        names = dict.fromkeys(name for stages in servers for name in stages)
        rows += [
            Row(f"{comparison.workload}\n{name}", tuple(stages.get(name) for stages in servers))
            for name in names
        ]
    return rows


def draw_cache_chart(report: Report, path: Path) -> None:
    """Write the picture of `report`, which has at least one stage, to `path` (PNG)."""
    rows = rows_of(report.comparisons)
    canvas = Canvas(figsize=(WIDTH_INCHES, 1.6 + ROW_INCHES * len(rows)), layout="constrained")
    hits, delays = canvas.subplots(1, 2, sharey=True)
    _draw(hits, rows, lambda stage: stage.hit_rate * 100)
    _draw(delays, rows, lambda stage: stage.ttft_ms)
    hits.set_xlim(0, 112)
    hits.set_xlabel("prompt tokens found in the cache, %; more is better")
    delays.set_xlabel("first token, median, ms; less is better")
    shown_ms = [stage.ttft_ms for row in rows for stage in row.stages if stage is not None]
    if max(shown_ms) > LOG_SCALE_ABOVE * min(shown_ms):
        delays.set_xscale("log")
        delays.set_xlim(min(shown_ms) / 2, max(shown_ms) * 2)
    else:
        delays.set_xlim(0, max(shown_ms) * 1.15)
    hits.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    hits.invert_yaxis()
    canvas.suptitle(f"hit rate and first token, {report.machine.get('cpu', '')}", fontsize=11)
    handles = [Patch(color=colour, label=label) for colour, label in zip(COLOURS, report.labels, strict=True)]
    canvas.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    canvas.savefig(path, dpi=150)


def _draw(axes: Axes, rows: list[Row], value_of: Callable[[Stage], float]) -> None:
    for index, row in enumerate(rows):
        for server, stage in enumerate(row.stages):
            if stage is None:
                continue
            y = index + (server - 0.5) * BAR_HEIGHT
            value = value_of(stage)
            axes.barh(y, value, height=BAR_HEIGHT, color=COLOURS[server])
            axes.annotate(
                number(value), (value, y), (3, 0), textcoords="offset points", va="center", fontsize=7
            )
    axes.spines[["top", "right"]].set_visible(False)
