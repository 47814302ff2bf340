"""`stoker rerank`: documents in the order of what they have to say to a query.

Apart because each command has its module.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.fitting_model import RERANK
from stoker.cli.options import AsJson
from stoker.cli.session import given_lines
from stoker.cli.target import Target, asks_model

if TYPE_CHECKING:
    from stoker.tasks.rerank import Ranking


@asks_model
def rerank(
    target: Target,
    *,
    query: Annotated[str, typer.Argument(help="What is asked.", metavar="QUERY")],
    documents: Annotated[
        list[str] | None,
        typer.Argument(help="What to score; without any, each line of standard input.", metavar="DOCUMENT"),
    ] = None,
    top_n: Annotated[
        int | None, typer.Option("--top-n", help="Print so many, the best.", min=1, metavar="N")
    ] = None,
    output: Annotated[
        int | None,
        typer.Option(
            help="Which output of the classifier is the score, from 0. [what its labels say]",
            min=0,
            metavar="N",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the documents, the best first, each after its score: the model's own number, no probability."""
    lines = given_lines(documents, "documents")
    given = [text for text in lines if text is not None]
    found = target.answered(
        RERANK,
        lambda asked: asked.runtime.rerank(query, given, top_n=top_n, output=output, model=asked.model),
    )
    if as_json:
        places = [index for index, text in enumerate(lines) if text is not None]
        typer.echo(json.dumps(_record(found, given, places)))
        return
    sys.stdout.writelines(f"{each.score:.4f}\t{given[each.index]}\n" for each in found.results)


def _record(found: Ranking, documents: list[str], places: list[int]) -> dict[str, object]:
    """As /v1/rerank answers with `return_documents`; an index counts blank lines too."""
    num_tokens = found.usage.prompt_tokens
    return {
        "object": "list",
        "results": [
            {
                "index": places[each.index],
                "relevance_score": each.score,
                "document": {"text": documents[each.index]},
            }
            for each in found.results
        ],
        "model": found.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
