"""`stoker choose`: which of some texts is the likeliest after a prompt."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson, Config, CtxSize, Model, Threads, engine_settings
from stoker.cli.stdin import piped_text

if TYPE_CHECKING:
    from stoker.cli.options import RuntimeFactory
    from stoker.settings import EngineSettings
    from stoker.tasks.choose import Choices


def choose(
    *,
    ctx: typer.Context,
    choices: Annotated[list[str], typer.Option("--choice", help="A text that may follow; give several.")],
    prompt: Annotated[
        str | None, typer.Argument(help="What they follow; without one, standard input.")
    ] = None,
    model: Model = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Subtract how likely each is without the prompt.")
    ] = False,
    as_json: AsJson = False,
    ctx_size: CtxSize = None,
    threads: Threads = None,
    config: Config = None,
) -> None:
    """Print the choices, the likeliest first, each after its probability among them and its score in nats."""
    given = piped_text() if prompt is None else prompt
    models = [model] if model else None
    settings = engine_settings(config, models=models, ctx_size=ctx_size, threads=threads)
    found = asyncio.run(_choose(settings, given or "", choices, ctx.obj, is_calibrated=calibrate))
    if as_json:
        typer.echo(json.dumps(_record(found)))
        return
    sys.stdout.writelines(
        f"{each.probability:.4f}\t{each.score:.4f}\t{each.choice}\n" for each in found.results
    )


async def _choose(
    settings: EngineSettings,
    prompt: str,
    choices: list[str],
    factory: RuntimeFactory | None,
    *,
    is_calibrated: bool,
) -> Choices:
    from stoker.cli.session import opened
    from stoker.tasks.choose import Choosing

    async with opened(settings, factory) as runtime:
        return await Choosing(runtime).choose(prompt, choices, calibrate=is_calibrated)


def _record(found: Choices) -> dict[str, object]:
    """As /v1/choose answers."""
    import msgspec

    from stoker.server.native.choose import answer_of

    record: dict[str, object] = msgspec.to_builtins(answer_of(found))
    return record
