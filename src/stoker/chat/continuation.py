"""A last turn of the assistant that its answer goes on with (prefill), as vLLM, llama-server and others do.

Owns when a conversation is continued, and the prompt that ends within the turn. The answer is the new text
alone. The turn is laid out by the template with a mark behind its text, and the prompt ends there, so that
what the template puts around it is what the model was trained with; where the template shows no mark, the
text follows the opening of the assistant's turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.chat.reasoning import WHITE, ReasoningTags, is_opened_by, reasoning_of
from stoker.chat.template import LayOut, accepted, text_of
from stoker.errors import InvalidRequestError

_MARK = "StokerGoesOnHere"
_CONTINUE, _OPEN = "continue_final_message", "add_generation_prompt"


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the answer goes on with: content, or reasoning where there is none; both empty: a new turn's."""

    content: str
    reasoning: str

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with the mark behind the last turn's text."""
        *before, last = map(dict, messages)
        if self.content or not self.reasoning:
            return [*before, {**last, "content": self.content + _MARK}]
        return [*before, {**last, "content": "", "reasoning_content": self.reasoning + _MARK}]

    def prompt(self, marked: Sequence[Mapping[str, Any]], tags: ReasoningTags | None, lay_out: LayOut) -> str:
        """The prompt that ends with the given text. Raises InvalidRequestError."""
        if self.content or self.reasoning:
            with contextlib.suppress(InvalidRequestError):  # some templates want the user's turn last
                before, found, _ = accepted(marked, lay_out, **{_OPEN: False}).rpartition(_MARK)
                if found:
                    return self._closed(before, tags)
        if len(marked) == 1:
            text = "a last assistant turn is continued: the template wants a turn before it"
            raise InvalidRequestError(text, param="messages")
        return self._behind(accepted(marked[:-1], lay_out, **{_OPEN: True}), tags)

    def is_reasoning(self, prompt: str, tags: ReasoningTags) -> bool:
        """Whether the answer to the prompt begins inside reasoning."""
        if self.content:
            return self.content.lstrip(WHITE).startswith(tags.opener) and tags.closer not in self.content
        return bool(self.reasoning) or is_opened_by(prompt, tags)

    def _closed(self, prompt: str, tags: ReasoningTags | None) -> str:
        """The prompt as the template wrote it; where that puts the content inside reasoning, it is closed."""
        head = prompt.removesuffix(self.content.lstrip(WHITE)) if self.content else prompt
        if tags is None or head == prompt or not is_opened_by(head, tags):
            return prompt
        return self._behind(head, tags)

    def _behind(self, prompt: str, tags: ReasoningTags | None) -> str:
        """The text behind a prompt that opens the assistant's turn, and perhaps its reasoning."""
        if tags is None:
            return prompt + self.content
        bare, is_open = prompt.rstrip(WHITE), is_opened_by(prompt, tags)
        if self.content.lstrip(WHITE).startswith(tags.opener):
            return (bare.removesuffix(tags.opener) if is_open else prompt) + self.content
        if tags.closer in self.content:
            return prompt + self.content
        if self.reasoning and bare.endswith(tags.closer):  # what the template closed was empty
            prompt = bare.removesuffix(tags.closer).rstrip(WHITE).removesuffix(tags.opener)
        if not (is_open or self.reasoning):
            return prompt + self.content
        opened = prompt if is_open else f"{prompt}{tags.opener}\n"
        return opened + self.reasoning + (f"\n{tags.closer}\n\n{self.content}" if self.content else "")


def continuation_of(messages: Sequence[Mapping[str, Any]], args: dict[str, Any]) -> Continuation | None:
    """What the answer is to go on with; None: it is a turn of its own.

    A last turn of the assistant without calls is continued, unless `args` say otherwise.

    Args:
        messages: with contents as text, as far as they are continued.
        args: variables of the template; `continue_final_message`, which is none, is taken out.

    Raises:
        InvalidRequestError: it is asked for and cannot be, or a new turn is asked for as well.
    """
    wanted, opens = args.pop(_CONTINUE, None), args.get(_OPEN)
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if wanted and opens:
        raise InvalidRequestError(f"{_OPEN} and {_CONTINUE} cannot both be true", param=_CONTINUE)
    if wanted and (last.get("role") != "assistant" or last.get("tool_calls")):
        text = f"{_CONTINUE}: the last message is no text of the assistant, so it cannot be continued"
        raise InvalidRequestError(text, param=_CONTINUE)
    is_continued = wanted or (wanted is None and not opens)
    if not is_continued or last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    return Continuation(text_of(last.get("content")), reasoning_of(last))
