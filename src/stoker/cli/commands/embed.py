"""`stoker embed`: vectors of texts, one line each, for programs and pipes.

Output and input stay line by line beside each other: a blank line, which has no vector, is a null in its
place.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.fitting_model import EMBED
from stoker.cli.options import AsJson
from stoker.cli.session import given_lines
from stoker.cli.target import Target, asks_model
from stoker.wording import count_text

_SHOWN_LINES = 5

if TYPE_CHECKING:
    from stoker.tasks.embed import TextEmbeddings


@asks_model
def embed(
    target: Target,
    *,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="What to embed; without any, each line of standard input.", metavar="TEXT"),
    ] = None,
    skip_blank: Annotated[
        bool, typer.Option("--skip-blank", help="Leave out blank lines instead of printing null for each.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the vector of each text, of length 1: a JSON array a line, or with --json one document."""
    lines = given_lines(texts, "texts")
    given = [text for text in lines if text is not None]
    found = target.answered(EMBED, lambda asked: asked.runtime.embed(given, model=asked.model))
    vectors = iter(found.floats())
    aligned = [None if text is None else next(vectors) for text in (given if skip_blank else lines)]
    if as_json:
        typer.echo(json.dumps(_document(found, aligned)))
    else:
        sys.stdout.writelines(f"{json.dumps(vector)}\n" for vector in aligned)
    if None in aligned:
        _tell_blank([number for number, text in enumerate(lines, 1) if text is None])


def _tell_blank(numbers: list[int]) -> None:
    shown = ", ".join(map(str, numbers[:_SHOWN_LINES])) + (", ..." if len(numbers) > _SHOWN_LINES else "")
    text = f"{count_text(len(numbers), 'line')} blank ({shown}): null in place of a vector"
    typer.echo(f"stoker: {text}; --skip-blank leaves them out", err=True)


def _document(found: TextEmbeddings, vectors: list[list[float] | None]) -> dict[str, object]:
    """As /v1/embeddings answers; the embedding of a blank line is null."""
    num_tokens = found.usage.prompt_tokens
    return {
        "object": "list",
        "data": [
            {"index": index, "embedding": vector, "object": "embedding"}
            for index, vector in enumerate(vectors)
        ],
        "model": found.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
