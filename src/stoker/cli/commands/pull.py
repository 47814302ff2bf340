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
            metavar="REPO[:FILE]",
            help="OWNER/REPO, with a file, a quantisation or `safetensors` behind it.",
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
        name = path.name if path.is_dir() else path.stem
        files = path.iterdir() if path.is_dir() else (path,)
        size_bytes = sum(file.stat().st_size for file in files if file.is_file())
        typer.echo(json.dumps({"id": name, "path": str(path), "size_bytes": size_bytes}))
    else:
        typer.echo(str(path))
