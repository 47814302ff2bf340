"""The report as text: a table for the terminal and a Markdown page."""

from __future__ import annotations

from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from bench.company import DISTURBED_CORES
from bench.workloads.workload import Better, Judged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.results import Comparison, Figure, Report, Series
    from bench.workloads.workload import Metric

FIGURE_HEADS = ["figure", "value", "limit", ""]
VERDICTS = {None: "", True: "good", False: "MISSED"}
STYLES = {None: "", True: "green", False: "bold red"}
LARGE = 100
CLOSE = 10
RULE = f"others took more than {DISTURBED_CORES:g} of a core"
CACHE_PICTURE = "cache.png"
"""File name of the picture of hit rates and first tokens, beside the page."""


def number(value: float) -> str:
    """A value with about three significant digits."""
    return f"{value:.0f}" if abs(value) >= LARGE else f"{value:.3g}"


def ratio_number(ratio: float) -> str:
    """A ratio to a thousandth where it is near 1."""
    return f"{ratio:.3f}" if ratio < CLOSE else number(ratio)


def _series_cells(series: Series) -> list[str]:
    return [
        f"{series.metric.title} ({series.metric.unit})",
        number(median(series.first)),
        number(median(series.second)),
        *map(ratio_number, (series.ratio, min(series.ratios), max(series.ratios))),
        bar_text(series.metric),
        VERDICTS[series.is_good],
    ]


def title_of(comparison: Comparison) -> str:
    """The workload's title, with how many of its repetitions were disturbed."""
    if not comparison.num_disturbed:
        return comparison.title
    return f"{comparison.title} (DISTURBED: {comparison.num_disturbed} of {len(comparison.turns)})"


def bar_text(metric: Metric) -> str:
    """The bar and what it is of: the ratio, or the first server's own values, their median or each."""
    if metric.bar is None:
        return ""
    match metric.judged:
        case Judged.RATIO:
            return f"≥ {metric.bar:.3g}"
        case Judged.MEDIAN | Judged.EACH:
            sign = "≥" if metric.better is Better.HIGHER else "≤"
            of = "each" if metric.judged is Judged.EACH else "own"
            return f"{of} {sign} {metric.bar:.3g}"


def _heads(report: Report) -> list[str]:
    return ["metric", *report.labels, "ratio", "least", "most", "bar", ""]


def ratio_tables(report: Report, width: int) -> Iterator[Table]:
    """Ratios, a table a workload under one head, for a terminal of so many columns: only words are folded."""
    heads = _heads(report)
    rows = [[_series_cells(series) for series in comparison.series] for comparison in report.comparisons]
    widths = [max(map(len, column)) for column in zip(heads, *chain.from_iterable(rows), strict=True)]
    widths[0] = max(len(heads[0]), min(widths[0], width - sum(widths[1:]) - len(widths[1:])))
    for index, (comparison, cells) in enumerate(zip(report.comparisons, rows, strict=True)):
        table = Table(
            title=escape(title_of(comparison)),
            title_justify="left",
            title_style="bold yellow" if comparison.num_disturbed else "bold",
            box=None,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_header=index == 0,
        )
        for head, column in zip(heads, widths, strict=True):
            table.add_column(head, justify="left" if head == heads[0] else "right", width=column)
        for series, row in zip(comparison.series, cells, strict=True):
            table.add_row(*row, style=STYLES[series.is_good])
        yield table


def fact_table(report: Report) -> Table:
    """The machine, its load and the settings, for the terminal."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(report).items():
        table.add_row(name, escape(value))
    return table


def _facts(report: Report) -> dict[str, str]:
    during = {"load during": report.load_during} if report.load_during else {}
    num_disturbed = sum(comparison.num_disturbed for comparison in report.comparisons)
    num_all = sum(len(comparison.turns) for comparison in report.comparisons)
    # said of every run whose turns were watched: its absence is no proof of quiet
    watched = {"disturbed": f"{num_disturbed} of {num_all} repetitions ({RULE})"} if report.is_watched else {}
    return {**report.machine, **during, **watched, **report.settings}


def figure_table(report: Report) -> Table:
    """The figures that are no ratios, for the terminal."""
    table = Table(title="figures", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for head in FIGURE_HEADS:
        table.add_column(head, justify="left" if head == FIGURE_HEADS[0] else "right")
    for figure in report.figures:
        table.add_row(*_figure_cells(figure), style=STYLES[figure.is_good])
    return table


def _figure_cells(figure: Figure) -> list[str]:
    return [
        f"{figure.title} (DISTURBED)" if figure.is_disturbed else figure.title,
        f"{number(figure.value)} {figure.unit}",
        "" if figure.limit is None else f"≤ {figure.limit:g}",
        VERDICTS[figure.is_good],
    ]


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


def markdown(report: Report, *, has_pictures: bool = True) -> str:
    """The whole report as a Markdown page that shows `report.png` and the like beside it, where they are."""
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
        lines += ["![ratios by workload](report.png)", ""] if has_pictures else []
        lines += _markdown_table(["workload", *_heads(report)], _rows(report))
    if has_pictures and any(comparison.stages for comparison in report.comparisons):
        lines += [f"![hit rate and first token by workload]({CACHE_PICTURE})", ""]
    for comparison in report.comparisons:
        if has_pictures and comparison.timelines:
            title = f"who ran when: {comparison.title}"
            lines += [f"![{title}]({timeline_name(comparison.workload)})", ""]
    if report.figures:
        lines += _markdown_table(FIGURE_HEADS, [_figure_cells(figure) for figure in report.figures])
    lines += _markdown_table(["run", ""], [[name, value] for name, value in _facts(report).items()])
    return "\n".join(lines)


def _rows(report: Report) -> list[list[str]]:
    return [
        [title_of(comparison), *_series_cells(series)]
        for comparison in report.comparisons
        for series in comparison.series
    ]
