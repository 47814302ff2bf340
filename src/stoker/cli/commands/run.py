"""`stoker run`: one prompt, one answer, streamed.

Owns how a prompt comes together, and where the answer, what the model thinks and the figures go.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.chat.session import ChatReply
from stoker.cli.fitting_model import GENERATE
from stoker.cli.options import (
    REQUEST_FIELDS,
    AsJson,
    Documents,
    Images,
    Recordings,
    System,
    schema_text,
    takes_fields,
)
from stoker.cli.session import Activity, piped_beside_a_prompt, piped_text, tell, write
from stoker.cli.target import Asked, Target, asks_model
from stoker.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from stoker.audio import Audio
    from stoker.client.requests.stream import TextDelta
    from stoker.documents import Document


@asks_model
@takes_fields(*REQUEST_FIELDS)
def run(
    target: Target,
    fields: dict[str, Any],
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="What to ask; - reads standard input. Piped input is added to it.", metavar="PROMPT"
        ),
    ] = None,
    system: System = None,
    image: Images = None,
    audio: Recordings = None,
    file: Documents = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without a template.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt and stream the answer to the terminal."""
    text = _prompt_text(prompt)
    if raw and (system is not None or image or audio or file):
        what = "it takes none of --system, --image, --audio and --file"
        raise InvalidRequestError(f"--raw has no turns: {what}", param="raw")
    turns: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    attached = _attached(audio or (), file or ())
    turns.append({"role": "user", "content": [*attached, text] if attached else text})
    if "json_schema" in fields:
        fields["json_schema"] = schema_text(fields["json_schema"])
    if image:
        fields["images"] = image
    asyncio.run(_run(target, text if raw else turns, fields, as_json=as_json))


def _attached(recordings: Sequence[Path], documents: Sequence[Path]) -> list[Audio | Document]:
    """What stands before the prompt, in the order of the options' help."""
    from stoker.audio import Audio
    from stoker.documents import Document

    return [*map(Audio, recordings), *map(Document, documents)]


def _prompt_text(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        text = piped_text()
    else:
        text = "\n\n".join(part for part in (prompt, piped_beside_a_prompt()) if part)
    if not text.strip():
        raise InvalidRequestError(
            "there is no prompt: give one, or pipe it in; `stoker chat` is a conversation", param="prompt"
        )
    return text


async def _run(
    target: Target, prompt: str | list[dict[str, Any]], fields: dict[str, Any], *, as_json: bool
) -> None:
    async with target.opened(GENERATE, slots=1) as asked:
        reply = ChatReply(asked.model, fields["max_tokens"])
        try:
            with Activity() as activity:
                async with aclosing(_deltas(asked, prompt, fields, activity)) as deltas:
                    async for delta in deltas:
                        activity.clear()
                        reply.take(delta)
                        if not as_json:
                            write(delta.text)
                            _think(delta.reasoning)
        finally:
            if reply.text and not as_json and not reply.text.endswith("\n"):
                write("\n")
    if as_json:
        typer.echo(json.dumps(reply.record(), ensure_ascii=False))
    if sys.stderr.isatty() or not (reply.text.strip() or as_json):
        tell(reply.figures)


def _deltas(
    asked: Asked, prompt: str | list[dict[str, Any]], fields: dict[str, Any], activity: Activity
) -> AsyncGenerator[TextDelta, None]:
    """The answer; a text, and what a model that takes no conversations is asked, is continued as it is."""
    how: dict[str, Any] = {
        "model": asked.model,
        "return_progress": True,
        "on_notice": activity.on_notice,
        **fields,
    }
    if not isinstance(prompt, str):
        if asked.runtime.resolve(asked.model).takes_conversations:
            return asked.runtime.chat(prompt, **how)
        if not all(isinstance(turn["content"], str) for turn in prompt):
            text = f"{asked.model} takes no conversations, and so neither --audio nor --file"
            raise UnsupportedError(text, param="messages")
        prompt = "\n".join(turn["content"] for turn in prompt)
    return asked.runtime.generate(prompt, **how)


def _think(text: str) -> None:
    """What a model thinks is for people who watch, and no part of the answer."""
    if text and sys.stderr.isatty():
        tell(text, end="")
