"""Puts a report where it is read: tables in the terminal; page, data and picture in a folder."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

from bench.tables import CACHE_PICTURE, fact_table, figure_table, markdown, ratio_tables, timeline_name
from bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from bench.results import Report


def show(report: Report, console: Console) -> None:
    """Print the tables of `report`, and what it was measured on."""
    if report.comparisons:
        console.print(
            f"ratio above 1: {report.labels[0]} is better; median, least and most of the repetitions"
        )
        for table in ratio_tables(report, console.width):
            console.print(table)
    if report.figures:
        console.print(figure_table(report))
    console.print(fact_table(report))


def can_draw() -> bool:
    """Whether the library that draws is here: it comes with `make bench`, not with Stoker."""
    return find_spec("matplotlib") is not None


def write(report: Report, folder: Path) -> list[Path]:
    """Write the files of `report`, and say which; pictures of what it has no more are removed.

    Where nothing can be drawn there are a page without pictures and the data.
    """
    draws = can_draw()
    folder.mkdir(parents=True, exist_ok=True)
    page, data, picture = (folder / f"report.{kind}" for kind in ("md", "json", "png"))
    page.write_text(markdown(report, has_pictures=draws), encoding="utf-8")
    data.write_bytes(msgspec.json.format(msgspec.json.encode(report.document()), indent=2) + b"\n")
    cache_picture = folder / CACHE_PICTURE
    for old in (picture, cache_picture, *(folder / timeline_name(workload) for workload in WORKLOADS)):
        old.unlink(missing_ok=True)
    if not report.comparisons or not draws:
        return [page, data]
    from bench.cache_chart import draw_cache_chart  # noqa: PLC0415 - drawing takes a second to import
    from bench.chart import draw_chart  # noqa: PLC0415 - likewise
    from bench.timeline_chart import draw_timelines  # noqa: PLC0415 - likewise

    draw_chart(report, picture)
    pictures = [picture]
    if any(comparison.stages for comparison in report.comparisons):
        draw_cache_chart(report, cache_picture)
        pictures.append(cache_picture)
    timelines = [comparison for comparison in report.comparisons if comparison.timelines]
    for comparison in timelines:
        draw_timelines(comparison, report.labels, folder / timeline_name(comparison.workload))
    return [page, data, *pictures, *(folder / timeline_name(comparison.workload) for comparison in timelines)]
