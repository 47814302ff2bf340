"""`stoker embed`: vectors of texts, one line each, for programs and pipes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson, Config, CtxSize, Model, Threads, engine_settings
from stoker.cli.stdin import piped_text
from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    from stoker.cli.options import RuntimeFactory
    from stoker.settings import EngineSettings
    from stoker.tasks.embed import TextEmbeddings


def embed(
    *,
    ctx: typer.Context,
    texts: Annotated[
        list[str] | None, typer.Argument(help="What to embed; without any, each line of standard input.")
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
    ctx_size: CtxSize = None,
    threads: Threads = None,
    config: Config = None,
) -> None:
    """Print the vector of each text, of length 1: as a JSON array a line, or with --json as one document."""
    given = texts or lines_of(piped_text(), "texts")
    models = [model] if model else None
    settings = engine_settings(config, models=models, ctx_size=ctx_size, threads=threads)
    found = asyncio.run(_embed(settings, given, ctx.obj))
    if as_json:
        typer.echo(json.dumps(_document(found)))
        return
    sys.stdout.writelines(f"{json.dumps(vector)}\n" for vector in found.floats())


async def _embed(
    settings: EngineSettings, texts: list[str], factory: RuntimeFactory | None
) -> TextEmbeddings:
    from stoker.cli.session import opened
    from stoker.tasks.embed import Embeddings

    async with opened(settings, factory) as runtime:
        return await Embeddings(runtime).embed(texts)


def _document(found: TextEmbeddings) -> dict[str, object]:
    """As /v1/embeddings answers."""
    num_tokens = found.usage.prompt_tokens
    return {
        "object": "list",
        "data": [
            {"index": index, "embedding": vector, "object": "embedding"}
            for index, vector in enumerate(found.floats())
        ],
        "model": found.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def lines_of(text: str, what: str) -> list[str]:
    """The lines of a text that are not blank. Raises InvalidRequestError where there are none."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InvalidRequestError(f"there are no {what}: give some, or pipe them in, one a line", param=what)
    return lines
