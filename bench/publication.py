"""Puts a report where it is read: tables in the terminal; page, data and picture in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.tables import figure_table, markdown, ratio_table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from bench.results import Report


def show(report: Report, console: Console) -> None:
    """Print the tables of `report`."""
    if report.comparisons:
        console.print(ratio_table(report))
    if report.figures:
        console.print(figure_table(report))


def write(report: Report, folder: Path) -> list[Path]:
    """Write the files of `report`, and say which; there is no picture without a comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    page, data, picture = (folder / f"report.{kind}" for kind in ("md", "json", "png"))
    page.write_text(markdown(report), encoding="utf-8")
    data.write_bytes(msgspec.json.format(msgspec.json.encode(report.document()), indent=2) + b"\n")
    if not report.comparisons:
        picture.unlink(missing_ok=True)
        return [page, data]
    from bench.chart import draw_chart  # noqa: PLC0415 - drawing takes a second to import

    draw_chart(report, picture)
    return [page, data, picture]
