"""`stoker pull`: get a model from a hub, with progress (SPEC L7)."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from stoker.cli.options import Config, engine_settings


def pull(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REPO[:FILE]", help="OWNER/REPO, with a file or a quantisation after a colon."
        ),
    ],
    revision: Annotated[
        str, typer.Option("--revision", help="Branch, tag or commit.", metavar="NAME")
    ] = "main",
    config: Config = None,
) -> None:
    """Download a model: resumed where it stopped, verified, or not there at all."""
    from stoker.models.hub import hub

    folder = engine_settings(config).models_dir
    request = hub.PullRequest(reference=reference, models_dir=folder, revision=revision)
    with _Bars() as bars:
        path = hub.pull(request, bars.show)
    typer.echo(str(path))


class _Bars(Progress):
    """One bar a file, on stderr."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._by_name: dict[str, TaskID] = {}

    def show(self, num_done: int, num_bytes: int, name: str) -> None:
        """Take what the download says."""
        if name not in self._by_name:
            self._by_name[name] = self.add_task(name, total=num_bytes)
        self.update(self._by_name[name], completed=num_done)
