"""The report as a picture: one bar a metric, as long as the median ratio; its line spans all repetitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure as Canvas

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.results import Report, Series

AHEAD = "#2a7f62"
BEHIND = "#c0562f"
PEER = "#444444"
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
    axes.axvline(1.0, color=PEER, linewidth=1.2, label=f"{report.labels[1]} = 1")
    _scale(axes, [ratio for _, series in rows for ratio in series.ratios])
    axes.set_xlabel(f"ratio to {report.labels[1]}, more is better (bar: median; line: least to most)")
    axes.set_title(
        f"{report.labels[0]} against {report.labels[1]}, {report.machine.get('cpu', '')}", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25 - 0.3 / len(rows)), ncols=2, frameon=False)
    canvas.savefig(path, dpi=150)


def _draw_bar(axes: Axes, index: int, series: Series) -> None:
    ratio, low, high = series.ratio, min(series.ratios), max(series.ratios)
    axes.barh(index, ratio, height=0.55, color=AHEAD if ratio >= 1 else BEHIND, alpha=0.85)
    axes.plot([low, high], [index, index], color="black", linewidth=1.2)
    axes.plot(series.ratios, [index] * len(series.ratios), "o", color="black", markersize=3)
    axes.annotate(
        f"{ratio:.2f}", (max(high, ratio), index), (6, 0), textcoords="offset points", va="center", fontsize=9
    )
    if series.metric.bar is not None:
        axes.plot(
            [series.metric.bar] * 2,
            [index - 0.38, index + 0.38],
            color="#b00020",
            linestyle=":",
            linewidth=1.8,
        )


def _scale(axes: Axes, ratios: list[float]) -> None:
    if max(ratios) > LOG_SCALE_ABOVE:
        axes.set_xscale("log")
        axes.set_xlim(min(0.5, *ratios) * 0.8, max(ratios) * 1.6)
    else:
        axes.set_xlim(0, max(1.2, *ratios) * 1.12)
