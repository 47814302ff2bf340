"""Texts as a model sees them: tokens, their bytes, and the prompt that a conversation becomes.

The vocabulary is the engine's, so tokens are asked of it; templates are rendered here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from stoker.chat.template import template_of
from stoker.errors import UnsupportedError
from stoker.messages import Detokenize, Tokenize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker.values import ModelInfo


class Vocabularies(Protocol):
    """What answers questions about text."""

    async def ask(self, question: Tokenize | Detokenize) -> dict[str, Any]:
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


def render_chat(info: ModelInfo, messages: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> str:
    """The prompt that a conversation becomes, by the model's own template or, without one, the usual.

    Raises:
        UnsupportedError: what an encoder-decoder without a template would read is no conversation.
    """
    if not info.takes_conversations:
        raise UnsupportedError(
            f"{info.id} is {info.class_text} without a chat template: it reads a text, sent as a prompt",
            param="messages",
        )
    template = template_of(info.chat_template, info.bos_text, info.eos_text)
    return template.render(messages, **args)
