"""The report as a picture: one bar a metric, as long as the median ratio; its line spans all repetitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from bench.results import Report, Series

COLOURS = {None: "#6b8cae", True: "#2a7f62", False: "#c0562f"}
VERDICTS = {None: "no bar to reach", True: "reaches its bar", False: "misses its bar"}
PEER = "#444444"
BAR = "#b00020"
LOG_SCALE_ABOVE = 4.0
ROW_INCHES = 0.55
WIDTH_INCHES = 9.0


def draw_chart(report: Report, path: Path) -> None:
    """Write the picture of `report` to `path` (PNG). The report must hold at least one comparison."""
    rows = [(comparison, series) for comparison in report.comparisons for series in comparison.series]
    canvas = Canvas(figsize=(WIDTH_INCHES, 1.8 + ROW_INCHES * len(rows)), layout="constrained")
    axes = canvas.add_subplot()
    for index, (_, series) in enumerate(rows):
        _draw_bar(axes, index, series)
    axes.set_yticks(range(len(rows)), [f"{c.title}\n{s.metric.title}" for c, s in rows], fontsize=9)
    axes.invert_yaxis()
    axes.axvline(1.0, color=PEER, linewidth=1.2)
    _scale(axes, [ratio for _, series in rows for ratio in series.ratios])
    axes.set_xlabel(f"ratio to {report.labels[1]}, more is better (bar: median; line: least to most)")
    axes.set_title(
        f"{report.labels[0]} against {report.labels[1]}, {report.machine.get('cpu', '')}", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    canvas.legend(handles=_legend(report), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    canvas.savefig(path, dpi=150)


def _draw_bar(axes: Axes, index: int, series: Series) -> None:
    ratio, low, high = series.ratio, min(series.ratios), max(series.ratios)
    axes.barh(index, ratio, height=0.55, color=COLOURS[series.is_good], alpha=0.85)
    axes.plot([low, high], [index, index], color="black", linewidth=1.2)
    axes.plot(series.ratios, [index] * len(series.ratios), "o", color="black", markersize=3)
    axes.annotate(
        f"{ratio:.2f}", (max(high, ratio), index), (6, 0), textcoords="offset points", va="center", fontsize=9
    )
    if series.metric.bar is not None:
        axes.plot(
            [series.metric.bar] * 2,
            [index - 0.38, index + 0.38],
            color=BAR,
            linestyle=":",
            linewidth=1.8,
        )


def _legend(report: Report) -> list[Artist]:
    verdicts = {series.is_good for comparison in report.comparisons for series in comparison.series}
    handles: list[Artist] = [Line2D([], [], color=PEER, linewidth=1.2, label=f"{report.labels[1]} = 1")]
    handles += [Patch(color=COLOURS[v], alpha=0.85, label=VERDICTS[v]) for v in COLOURS if v in verdicts]
    if verdicts != {None}:
        handles.append(Line2D([], [], color=BAR, linestyle=":", linewidth=1.8, label="bar to reach"))
    return handles


def _scale(axes: Axes, ratios: list[float]) -> None:
    if max(ratios) > LOG_SCALE_ABOVE:
        axes.set_xscale("log")
        axes.set_xlim(min(0.5, *ratios) * 0.8, max(ratios) * 1.6)
    else:
        axes.set_xlim(0, max(1.2, *ratios) * 1.12)
