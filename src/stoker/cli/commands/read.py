"""`stoker read`: images in, JSON out, a line for each; here or by a running server.

Owns the order (one image after the other, a broken one does not stop the rest) and what is printed where.
`stoker.tasks.read_images` asks twice and checks.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.exits import ExitCode
from stoker.cli.fitting_model import READ
from stoker.cli.options import JsonSchema, schema_text
from stoker.cli.target import Target, asks_model
from stoker.errors import CallerError, ReadingError, StokerError

if TYPE_CHECKING:
    from stoker.images import ImageReport
    from stoker.tasks.read_images import Question, Reading

_MAX_TOKENS = 1024  # as in `stoker.tasks.read_images`, which is too heavy for --help


@asks_model
def read(
    target: Target,
    *,
    images: Annotated[
        list[Path], typer.Argument(help="Images to read, one after the other.", metavar="FILE")
    ],
    schema: JsonSchema = None,
    ask: Annotated[
        str | None, typer.Option("--ask", help="What to ask. [Read this report as JSON.]", metavar="TEXT")
    ] = None,
    mmproj: Annotated[
        Path | None, typer.Option("--mmproj", help="The model's projector, a GGUF file.", metavar="FILE")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Tokens of an answer at most.", min=1, metavar="N")
    ] = _MAX_TOKENS,
    json_lines: Annotated[
        bool,
        typer.Option("--json-lines", "--json", help="Print the file and how it went beside each answer."),
    ] = False,
) -> None:
    """Print what is on each image as a line of JSON; how far it is goes to stderr."""
    from stoker.tasks.read_images import Question

    question = Question(ask, None if schema is None else json.loads(schema_text(schema)), max_tokens)
    lines = _Lines(len(images), is_long=json_lines)
    asyncio.run(_read(target, mmproj, images, question, lines))
    if lines.num_unread:
        raise typer.Exit(ExitCode.FAULT)


async def _read(
    target: Target, mmproj: Path | None, images: list[Path], question: Question, lines: _Lines
) -> None:
    how: dict[str, Any] = {"ask": question.ask, "schema": question.schema, "max_tokens": question.max_tokens}
    async with target.opened(READ, mmproj=mmproj, slots=1) as asked:
        for path in images:
            began_s = time.monotonic()
            try:
                reading = await asked.runtime.read(path, model=asked.model, **how)
            except (
                CallerError,
                ReadingError,
            ) as error:  # of this image; another kind would meet the next too
                lines.unread(path, error)
            else:
                lines.read(path, reading, time.monotonic() - began_s)


class _Lines:
    """What is printed: answers on stdout, how it goes on stderr."""

    def __init__(self, num_images: int, *, is_long: bool) -> None:
        self._num_images = num_images
        self._is_long = is_long
        self._num_done = 0
        self.num_unread = 0

    def read(self, path: Path, reading: Reading, took_s: float) -> None:
        """One that was read."""
        shown = ", ".join(_shown(report) for report in reading.images)
        again = "" if reading.attempts == 1 else f", asked {reading.attempts} times"
        self._progress(path, f"{shown}, {took_s:.1f} s{again}".lstrip(", "))
        line: Any = reading.value
        if self._is_long:
            sizes = [[*report.shrunk_to] if report.shrunk_to else None for report in reading.images]
            line = {
                "file": str(path),
                "value": reading.value,
                "attempts": reading.attempts,
                "shrunk_to": sizes,
            }
        typer.echo(json.dumps(line, ensure_ascii=False))

    def unread(self, path: Path, error: StokerError) -> None:
        """One that was not."""
        self.num_unread += 1
        self._progress(path, error.message)
        if self._is_long:
            line = {"file": str(path), "error": {"code": error.code, "message": error.message}}
            typer.echo(json.dumps(line | error.details, ensure_ascii=False, default=str))

    def _progress(self, path: Path, text: str) -> None:
        self._num_done += 1
        for name in (str(path), path.name):
            text = text.removeprefix(f"{name}: ")
        typer.echo(f"[{self._num_done}/{self._num_images}] {path}: {text}", err=True)


def _shown(report: ImageReport) -> str:
    size = f"{report.width} x {report.height}"
    return (
        size
        if report.shrunk_to is None
        else f"{size} shrunk to {report.shrunk_to[0]} x {report.shrunk_to[1]}"
    )
