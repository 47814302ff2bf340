"""`stoker completion`: commands, options and names of models at the press of Tab, in bash, zsh and fish.

The scripts are the command line library's own; they ask this program, so they know what it knows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import completion

from stoker.cli.command import HelpfulCommand, HelpfulGroup
from stoker.cli.options import AsJson, Version, with_version
from stoker.errors import InvalidRequestError

PROGRAM = "stoker"
VARIABLE = "_STOKER_COMPLETE"
"""What a script sets for this program to answer with what fits."""

Shell = Annotated[
    Literal["bash", "zsh", "fish"] | None,
    typer.Argument(help="bash, zsh or fish. [$SHELL]", metavar="SHELL"),
]

app = typer.Typer(
    cls=HelpfulGroup,
    rich_markup_mode=None,
    help="Complete commands, options and names of models with the Tab key.",
    epilog="stoker completion install\nstoker completion show zsh",
)


@app.callback()
def _options(*, _version: Version = False) -> None:
    pass


@app.command("install", cls=HelpfulCommand, epilog="stoker completion install\nstoker completion install zsh")
@with_version
def install(*, shell: Shell = None, as_json: AsJson = False) -> None:
    """Install completion for this user; shells that start from then on have it."""
    name, path = completion.install(  # type: ignore[attr-defined]  # its own import
        shell=shell or _detected(), prog_name=PROGRAM, complete_var=VARIABLE
    )
    if as_json:
        typer.echo(json.dumps({"shell": name, "path": str(path)}))
    else:
        typer.echo(f"{name} completes stoker from its next start on: {path}")


@app.command("show", cls=HelpfulCommand, epilog="stoker completion show fish")
@with_version
def show(*, shell: Shell = None, as_json: AsJson = False) -> None:
    """Print the script, for who installs it otherwise."""
    name = shell or _detected()
    script = completion.get_completion_script(  # type: ignore[attr-defined]  # its own import
        prog_name=PROGRAM, complete_var=VARIABLE, shell=name
    )
    typer.echo(json.dumps({"shell": name, "script": script}) if as_json else script)


def _detected() -> str:
    """The user's shell."""
    name = Path(os.environ.get("SHELL", "")).name
    if name not in {"bash", "zsh", "fish"}:
        raise InvalidRequestError("which shell? name bash, zsh or fish", param="shell")
    return name
