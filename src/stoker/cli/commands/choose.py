"""`stoker choose`: which of some texts is the likeliest after a prompt.

Apart because each command has its module.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.fitting_model import GENERATE
from stoker.cli.options import AsJson
from stoker.cli.session import piped_text
from stoker.cli.target import Target, asks_model

if TYPE_CHECKING:
    from stoker.tasks.choose import Choices


@asks_model
def choose(
    target: Target,
    *,
    choices: Annotated[
        list[str], typer.Option("--choice", help="A text that may follow; give several.", metavar="TEXT")
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="What they follow; without one, standard input.", metavar="PROMPT")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Subtract how likely each is without the prompt.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the choices, the likeliest first, each after its probability among them and its score in nats."""
    given = (piped_text() if prompt is None else prompt) or ""
    found = target.answered(
        GENERATE,
        lambda asked: asked.runtime.choose(given, choices, calibrate=calibrate, model=asked.model),
    )
    if as_json:
        typer.echo(json.dumps(_record(found)))
        return
    sys.stdout.writelines(
        f"{each.probability:.4f}\t{each.score:.4f}\t{each.choice}\n" for each in found.results
    )


def _record(found: Choices) -> dict[str, object]:
    """As /v1/choose answers."""
    import msgspec

    from stoker.server.native.choose import answer_of

    record: dict[str, object] = msgspec.to_builtins(answer_of(found))
    return record
