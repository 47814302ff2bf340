"""Downloads of the command line: with a bar a file, and offered where a model is asked for and not here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

import typer

from stoker.errors import ModelFileError, ModelNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import TaskID


def download(reference: str, models_dir: Path, revision: str = "main") -> Path:
    """Get a model from the hub; a bar a file on stderr shows how far it is.

    Raises:
        StokerError: there is no such model, or it cannot be downloaded.
    """
    from stoker.models.hub import hub

    request = hub.PullRequest(reference=reference, models_dir=models_dir, revision=revision)
    with _Bars() as bars:
        return hub.pull(request, bars.show)


def here_or_offered(name: str, models_dir: Path) -> str:
    """A model's name, or its path where it was not here, or damaged, and was downloaded on demand (SPEC T9).

    Raises:
        ModelNotFoundError: it is not here, and there is nothing to download or nobody to ask.
        StokerError: it is broken, or cannot be downloaded.
    """
    from stoker.models.hub.downloads import is_reference
    from stoker.models.store import ModelStore

    try:
        ModelStore(models_dir).resolve(name)
    except (ModelNotFoundError, ModelFileError) as error:
        if not is_reference(name) or not _is_somebody_there():
            raise
        typer.echo(f"stoker: {error.message}", err=True)
        is_here = isinstance(error, ModelFileError)
        if not typer.confirm("Get what is damaged again?" if is_here else "Download it now?", err=True):
            raise typer.Abort from None
        return str(download(name, models_dir))
    return name


def _is_somebody_there() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


class _Bars:
    """One bar a file, on stderr, while entered."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._by_name: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._by_name:  # one without bars ends with an empty line
            self._progress.stop()

    def show(self, num_done: int, num_bytes: int, name: str) -> None:
        """Take what the download says."""
        self._progress.start()
        if name not in self._by_name:
            self._by_name[name] = self._progress.add_task(name, total=num_bytes)
        self._progress.update(self._by_name[name], completed=num_done)
