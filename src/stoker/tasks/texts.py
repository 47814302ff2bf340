"""Texts as a model sees them: tokens and their bytes. The vocabulary is the engine's, so it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from stoker.ipc.commands import CountTokens, Detokenize, TextQuestion, Tokenize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.ipc.request import GenerateRequest


class Vocabularies(Protocol):
    """What answers questions about text."""

    async def ask(self, question: TextQuestion) -> dict[str, Any]:
        """The engine's answer."""
        ...


async def tokenize(engine: Vocabularies, question: Tokenize) -> tuple[list[int], list[bytes]]:
    """Token ids of a text and the bytes of each."""
    answer = await engine.ask(question)
    return answer["tokens"], answer["pieces"]


async def detokenize(engine: Vocabularies, tokens: Sequence[int], model: str) -> str:
    """The text of token ids."""
    text: str = (await engine.ask(Detokenize(call_id=0, model=model, tokens=list(tokens))))["text"]
    return text


async def count_tokens(engine: Vocabularies, request: GenerateRequest, model: str) -> int:
    """How many tokens the prompt of a request to that model has."""
    num_tokens: int = (await engine.ask(CountTokens(0, model, request)))["num_tokens"]
    return num_tokens
