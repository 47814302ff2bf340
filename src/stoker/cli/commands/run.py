"""`stoker run`: one prompt, one answer, streamed."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from stoker.cli.fitting_model import GENERATE
from stoker.cli.options import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TEMPERATURE,
    MaxTokens,
    Seed,
    Temperature,
)
from stoker.cli.session import ReplyText, piped_beside_a_prompt, piped_text, write_answer
from stoker.cli.target import Asked, Target, asks_model
from stoker.errors import InvalidRequestError
from stoker.ipc.request import GenerateRequest, Sampling

DEFAULT_PROMPT = "What is the capital of France? Answer in one sentence."


@asks_model
def run(
    target: Target,
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="What to ask; - reads standard input. Piped input is added to it.", metavar="PROMPT"
        ),
    ] = None,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = DEFAULT_TEMPERATURE,
    seed: Seed = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")
    ] = False,
) -> None:
    """Answer a prompt and stream the answer to the terminal."""
    text = _prompt_text(prompt)
    ask = _Ask(text, Sampling(temperature=temperature, seed=seed), max_tokens, is_raw=raw)
    asyncio.run(_run(target, ask))


def _prompt_text(prompt: str | None) -> str:
    if prompt is None:
        text = piped_text() or ("" if not sys.stdin.isatty() else DEFAULT_PROMPT)
    elif prompt == "-":
        text = piped_text()
    else:
        text = "\n\n".join(part for part in (prompt, piped_beside_a_prompt()) if part)
    if not text.strip():
        raise InvalidRequestError("there is no prompt: give one, or pipe it in", param="prompt")
    return text


@dataclass(frozen=True, slots=True)
class _Ask:
    """What the options of one `run` ask for."""

    text: str
    sampling: Sampling
    max_tokens: int
    is_raw: bool

    def request(self, asked: Asked) -> GenerateRequest:
        """The request, with the model's chat template around the text unless it is raw or can have none."""
        is_raw = self.is_raw or not asked.runtime.resolve(asked.model).takes_conversations
        turn = {"role": "user", "content": self.text}
        prompt = self.text if is_raw else asked.runtime.render_chat([turn], asked.model)
        return GenerateRequest(
            prompt=prompt,
            model=asked.model,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            is_chat=not is_raw,
            return_progress=True,
        )


async def _run(target: Target, ask: _Ask) -> None:
    async with target.opened(GENERATE, slots=1) as asked:
        answer = ReplyText()
        await write_answer(asked.runtime, ask.request(asked), answer)
        if sys.stderr.isatty():
            typer.secho(answer.summary, err=True, dim=True)
