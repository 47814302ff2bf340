"""The report as text: a table for the terminal and a Markdown page."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from bench.workloads.workload import Better, Judged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.results import Report, Series
    from bench.workloads.workload import Metric

VERDICTS = {None: "", True: "good", False: "MISSED"}
STYLES = {None: "", True: "green", False: "bold red"}
LARGE = 100
CACHE_PICTURE = "cache.png"
"""File name of the picture of hit rates and first tokens, beside the page."""


def number(value: float) -> str:
    """A value with about three significant digits."""
    return f"{value:.0f}" if abs(value) >= LARGE else f"{value:.3g}"


def _series_cells(series: Series) -> list[str]:
    return [
        f"{series.metric.title} ({series.metric.unit})",
        number(median(series.first)),
        number(median(series.second)),
        f"{series.ratio:.3f}",
        f"{min(series.ratios):.2f} to {max(series.ratios):.2f}",
        bar_text(series.metric),
        VERDICTS[series.is_good],
    ]


def bar_text(metric: Metric) -> str:
    """The bar and what it is of: the ratio, or the first server's own values, their median or each."""
    if metric.bar is None:
        return ""
    match metric.judged:
        case Judged.RATIO:
            return f"ratio ≥ {metric.bar:.3g}"
        case Judged.MEDIAN | Judged.EACH:
            sign = "≥" if metric.better is Better.HIGHER else "≤"
            of = "each" if metric.judged is Judged.EACH else "own"
            return f"{of} {sign} {metric.bar:.3g}"


def _rows(report: Report) -> Iterator[tuple[list[str], bool | None]]:
    for comparison in report.comparisons:
        for series in comparison.series:
            yield [comparison.title, *_series_cells(series)], series.is_good


def _heads(report: Report) -> list[str]:
    return ["workload", "metric", *report.labels, "ratio", "spread", "bar", ""]


def ratio_table(report: Report) -> Table:
    """Ratios by workload, for the terminal."""
    first = report.labels[0]
    table = Table(title=f"ratio above 1: {first} is better (median of repetitions)")
    for index, head in enumerate(_heads(report)):
        table.add_column(head, justify="left" if index < 2 else "right")  # noqa: PLR2004 - two columns of text
    for cells, is_good in _rows(report):
        table.add_row(*cells, style=STYLES[is_good])
    return table


def figure_table(report: Report) -> Table:
    """The figures that are no ratios, for the terminal."""
    table = Table(title="figures")
    for head in ("figure", "value", "limit", ""):
        table.add_column(head, justify="left" if head == "figure" else "right")
    for figure in report.figures:
        limit = "" if figure.limit is None else f"≤ {figure.limit:g} {figure.unit}"
        value = f"{number(figure.value)} {figure.unit}"
        table.add_row(figure.title, value, limit, VERDICTS[figure.is_good], style=STYLES[figure.is_good])
    return table


def _markdown_table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + " --- |" * len(heads),
        *("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows),
        "",
    ]


def timeline_name(workload: str) -> str:
    """File name of a workload's timeline, beside the page."""
    return f"timeline-{workload}.png"


def markdown(report: Report) -> str:
    """The whole report as a Markdown page that shows `report.png` beside it."""
    first, second = report.labels
    lines = [
        f"# {first} and {second} on the same work",
        "",
        "Same model, slots, context and threads; the servers took turns on the same unseen prompts.",
        f"A ratio above 1 means that {first} is better; it is the median of all repetitions.",
        f"A bar is of the ratio, or of {first}'s own values: of their median (own), or of each.",
        "",
    ]
    if report.comparisons:
        lines += ["![ratios by workload](report.png)", ""]
        lines += _markdown_table(_heads(report), [cells for cells, _ in _rows(report)])
    if any(comparison.stages for comparison in report.comparisons):
        lines += [f"![hit rate and first token by workload]({CACHE_PICTURE})", ""]
    for comparison in report.comparisons:
        if comparison.timelines:
            title = f"who ran when: {comparison.title}"
            lines += [f"![{title}]({timeline_name(comparison.workload)})", ""]
    if report.figures:
        rows = [
            [
                figure.title,
                f"{number(figure.value)} {figure.unit}",
                "" if figure.limit is None else f"≤ {figure.limit:g}",
                VERDICTS[figure.is_good],
            ]
            for figure in report.figures
        ]
        lines += _markdown_table(["figure", "value", "limit", ""], rows)
    facts = {**report.machine, **report.settings}
    lines += _markdown_table(["run", ""], [[name, value] for name, value in facts.items()])
    return "\n".join(lines)
