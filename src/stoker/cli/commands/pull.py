"""`stoker pull`: get a model from a hub, with progress (SPEC L7).

Apart because each command has its module.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from stoker.cli.download import download
from stoker.cli.options import AsJson, Config, engine_settings


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
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Download a model: resumed where it stopped, verified, or not there at all."""
    path = download(reference, engine_settings(config).models_dir, revision)
    if as_json:
        typer.echo(json.dumps({"id": path.stem, "path": str(path), "size_bytes": path.stat().st_size}))
    else:
        typer.echo(str(path))
