"""`stoker rerank`: documents in the order of what they have to say to a query."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.commands.embed import lines_of
from stoker.cli.options import AsJson, Config, CtxSize, Model, Threads, engine_settings
from stoker.cli.stdin import piped_text

if TYPE_CHECKING:
    from stoker.cli.options import RuntimeFactory
    from stoker.settings import EngineSettings
    from stoker.tasks.rerank import Ranking


def rerank(
    *,
    ctx: typer.Context,
    query: Annotated[str, typer.Argument(help="What is asked.")],
    documents: Annotated[
        list[str] | None, typer.Argument(help="What to score; without any, each line of standard input.")
    ] = None,
    model: Model = None,
    top_n: Annotated[int | None, typer.Option("--top-n", help="Print so many, the best.", min=1)] = None,
    output: Annotated[
        int, typer.Option(help="Which output of the classifier is the score, from 0.", min=0)
    ] = 0,
    as_json: AsJson = False,
    ctx_size: CtxSize = None,
    threads: Threads = None,
    config: Config = None,
) -> None:
    """Print the documents, the best first, each after its score: the model's own number, no probability."""
    given = documents or lines_of(piped_text(), "documents")
    models = [model] if model else None
    settings = engine_settings(config, models=models, ctx_size=ctx_size, threads=threads)
    fields = {"top_n": top_n, "output": output}
    found = asyncio.run(_rerank(settings, (query, given), fields, ctx.obj))
    if as_json:
        typer.echo(json.dumps(_record(found, given)))
        return
    sys.stdout.writelines(f"{each.score:.4f}\t{given[each.index]}\n" for each in found.results)


async def _rerank(
    settings: EngineSettings,
    texts: tuple[str, list[str]],
    fields: dict[str, Any],
    factory: RuntimeFactory | None,
) -> Ranking:
    from stoker.cli.session import opened
    from stoker.tasks.rerank import Reranking

    async with opened(settings, factory) as runtime:
        return await Reranking(runtime).rerank(*texts, **fields)


def _record(found: Ranking, documents: list[str]) -> dict[str, object]:
    """As /v1/rerank answers with `return_documents`."""
    num_tokens = found.usage.prompt_tokens
    return {
        "object": "list",
        "results": [
            {
                "index": each.index,
                "relevance_score": each.score,
                "document": {"text": documents[each.index]},
            }
            for each in found.results
        ],
        "model": found.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
