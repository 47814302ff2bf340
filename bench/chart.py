"""The report as a picture: one bar a metric, as long as the median ratio; its line spans all repetitions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.workloads.workload import Judged

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from bench.results import Report, Series

COLOURS = {None: "#6b8cae", True: "#2a7f62", False: "#c0562f"}
VERDICTS = {None: "no bar to reach", True: "reaches its bar", False: "misses its bar"}
PEER = "#444444"
BAR = "#b00020"
LOG_SCALE_ABOVE = 4.0
LEAST_RATIO = 0.01
ROW_INCHES = 0.55
WIDTH_INCHES = 9.0


def draw_chart(report: Report, path: Path) -> None:
    """Write the picture of `report` to `path` (PNG). The report must hold at least one comparison."""
    rows = [(c, series) for c in report.comparisons for series in c.series if series.metric.in_picture]
    canvas = Canvas(figsize=(WIDTH_INCHES, 1.8 + ROW_INCHES * len(rows)), layout="constrained")
    axes = canvas.add_subplot()
    limit = _greatest(ratio for _, series in rows for ratio in series.ratios)
    for index, (_, series) in enumerate(rows):
        _draw_bar(axes, index, series, limit)
    axes.set_yticks(range(len(rows)), [f"{c.title}\n{s.metric.title}" for c, s in rows], fontsize=9)
    axes.invert_yaxis()
    axes.axvline(1.0, color=PEER, linewidth=1.2)
    shown = [_within(ratio, limit) for _, series in rows for ratio in series.ratios]
    _scale(axes, shown + [bar for _, series in rows if (bar := _ratio_bar(series)) is not None])
    axes.set_xlabel(f"ratio to {report.labels[1]}, more is better (bar: median; line: least to most)")
    axes.set_title(
        f"{report.labels[0]} against {report.labels[1]}, {report.machine.get('cpu', '')}", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles = _legend(report.labels[1], [series for _, series in rows])
    canvas.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    canvas.savefig(path, dpi=150)


def _greatest(ratios: Iterable[float]) -> float:
    """Where an infinite ratio is drawn: well beyond the greatest that is a number."""
    return 4 * max((ratio for ratio in ratios if math.isfinite(ratio)), default=1.0)


def _within(ratio: float, limit: float) -> float:
    return min(max(ratio, LEAST_RATIO), limit)


def _draw_bar(axes: Axes, index: int, series: Series, limit: float) -> None:
    ratios = [_within(ratio, limit) for ratio in series.ratios]
    ratio, low, high = _within(series.ratio, limit), min(ratios), max(ratios)
    axes.barh(index, ratio, height=0.55, color=COLOURS[series.is_good], alpha=0.85)
    axes.plot([low, high], [index, index], color="black", linewidth=1.2)
    axes.plot(ratios, [index] * len(ratios), "o", color="black", markersize=3)
    axes.annotate(
        f"{series.ratio:.2f}",
        (max(high, ratio), index),
        (6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )
    if (bar := _ratio_bar(series)) is not None:
        axes.plot([bar] * 2, [index - 0.38, index + 0.38], color=BAR, linestyle=":", linewidth=1.8)


def _ratio_bar(series: Series) -> float | None:
    return series.metric.bar if series.metric.judged is Judged.RATIO else None


def _legend(peer: str, rows: list[Series]) -> list[Artist]:
    verdicts = {series.is_good for series in rows}
    handles: list[Artist] = [Line2D([], [], color=PEER, linewidth=1.2, label=f"{peer} = 1")]
    handles += [Patch(color=COLOURS[v], alpha=0.85, label=VERDICTS[v]) for v in COLOURS if v in verdicts]
    if verdicts != {None}:
        handles.append(Line2D([], [], color=BAR, linestyle=":", linewidth=1.8, label="ratio to reach"))
    return handles


def _scale(axes: Axes, ratios: list[float]) -> None:
    if max(ratios) > LOG_SCALE_ABOVE:
        axes.set_xscale("log")
        axes.set_xlim(min(0.5, *ratios) * 0.8, max(ratios) * 1.6)
    else:
        axes.set_xlim(0, max(1.2, *ratios) * 1.12)
