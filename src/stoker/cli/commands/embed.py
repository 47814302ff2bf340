"""`stoker embed`: vectors of texts, one line each, for programs and pipes.

Apart because each command has its module.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from stoker.cli.fitting_model import EMBED
from stoker.cli.options import AsJson
from stoker.cli.session import lines_of, piped_text
from stoker.cli.target import Target, asks_model
from stoker.tasks.embed import TextEmbeddings, embed_texts


@asks_model
def embed(
    target: Target,
    *,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="What to embed; without any, each line of standard input.", metavar="TEXT"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the vector of each text, of length 1: as a JSON array a line, or with --json as one document."""
    given = texts or lines_of(piped_text(), "texts")
    found = target.answered(EMBED, lambda runtime: embed_texts(runtime, given))
    if as_json:
        typer.echo(json.dumps(_document(found)))
        return
    sys.stdout.writelines(f"{json.dumps(vector)}\n" for vector in found.floats())


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
