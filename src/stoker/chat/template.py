"""Chat messages to one prompt, by the template that the model brought along.

Owns the variables a template gets and the meaning of its errors. What a template may reach is bounded by
`stoker.chat.sandbox`, time and memory by the worker process that it runs in. A model without a template gets
ChatML, a format that it may not know. The tokenizer makes tokens of the text; a rendered prompt already holds
its special tokens. Gemma's and Mistral's first templates know no system turn, others none but the first:
their text becomes part of the user's next turn. Which form a template takes is found by rendering it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError

from stoker.chat.sandbox import MAX_PROMPT_CHARS, MAX_TEMPLATE_CHARS, RenderBudget, TemplateEnvironment
from stoker.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from jinja2 import Template

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MAX_MESSAGES = 10_000
_RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token", "raise_exception", "strftime_now"})


class ChatTemplate:
    """One model's chat template.

    Args:
        source: Jinja source from the model file; None or empty falls back to ChatML.
        bos_text: the beginning-of-sequence token as text.
        eos_text: the end-of-sequence token as text.
    """

    def __init__(self, source: str | None, bos_text: str = "", eos_text: str = "") -> None:
        self.is_fallback = not source
        self._source = source or CHATML
        self._bos_text = bos_text
        self._eos_text = eos_text

    def __repr__(self) -> str:
        kind = "ChatML fallback" if self.is_fallback else f"{len(self._source)} characters"
        return f"ChatTemplate({kind})"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for `messages`.

        Args:
            messages: each with a `role` and a `content`: text, None, or OpenAI content parts.
            tools: function declarations in OpenAI's form, for templates that know them.
            extra: further variables of the template, such as `enable_thinking`; `add_generation_prompt` is
                true where they do not have it: the prompt ends with the opening of the assistant's turn.

        Raises:
            InvalidRequestError: malformed messages, or the template refused or failed on them; its own
                message is kept.
            UnsupportedError: the template itself is broken, so this model cannot chat.
        """
        variables = {
            "add_generation_prompt": True,
            **_checked_extra(extra),
            "messages": _checked_messages(messages),
            "tools": list(tools) if tools else None,
            "bos_token": self._bos_text,
            "eos_token": self._eos_text,
        }
        template = self._compiled
        try:
            return "".join(_bounded(template.generate(**variables, **RenderBudget().as_variables())))
        except TemplateError as error:
            reason = error.message or type(error).__name__
            text = f"the chat template refused the messages: {reason}"
            raise InvalidRequestError(text, param="messages") from error
        except MemoryError:  # the worker process turns it into an error that names the bound
            raise
        except Exception as error:  # a template is foreign code; whatever it trips over, the caller hears
            text = f"the chat template failed on the messages: {type(error).__name__}: {error}"
            raise InvalidRequestError(text, param="messages") from error

    @cached_property
    def _compiled(self) -> Template:
        if len(self._source) > MAX_TEMPLATE_CHARS:
            raise UnsupportedError(
                f"the model's chat template has {len(self._source)} characters, "
                f"at most {MAX_TEMPLATE_CHARS} are taken"
            )
        try:
            return TemplateEnvironment().from_string(self._source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise UnsupportedError(f"the model's chat template is broken: {error}") from error


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_PROMPT_CHARS:
            raise TemplateError(f"the prompt is longer than {MAX_PROMPT_CHARS} characters")
        yield piece


def _checked_extra(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in sorted(_RESERVED & extra.keys()):
        raise InvalidRequestError(f"the template variable {name!r} cannot be set", param=name)
    return extra


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries, 1 to {MAX_MESSAGES} are taken", param="messages"
        )
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{index}] has no role", param=f"messages[{index}].role")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content}
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(
            f"messages[{index}].content is neither text nor a list of parts",
            param=f"messages[{index}].content",
        )
    texts = [part.get("text") if part.get("type") == "text" else None for part in content]
    if all(isinstance(text, str) for text in texts):  # most templates know text only
        return {**message, "content": text_of(content)}
    return {**message, "content": list(content)}


@lru_cache(maxsize=64)
def template_of(source: str | None, bos_text: str, eos_text: str) -> ChatTemplate:
    """The template of a model, compiled once. Raises what `ChatTemplate` raises."""
    return ChatTemplate(source, bos_text=bos_text, eos_text=eos_text)


def text_of(content: Any) -> str:
    """The text of a turn's content: of a list that of its parts, nothing of what is no text.

    Each part stands on a line of its own, as with vLLM and llama-server: clients cut a content where a line
    ends, and joined without one two sentences would share a word.
    """
    if isinstance(content, list | tuple):
        return "\n".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


# ---------------------------------------------------------------- system turns


class LayOut(Protocol):
    """Renders a conversation."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], /, **changes: Any) -> str:
        """The prompt; `changes` are template variables that replace others. Raises InvalidRequestError."""


def accepted(messages: Sequence[Mapping[str, Any]], lay_out: LayOut, **changes: Any) -> str:
    """The prompt of the first form of the conversation that the template takes.

    Raises:
        InvalidRequestError: it takes none; what it says of the conversation as it was given.
    """
    try:
        return lay_out(messages, **changes)
    except InvalidRequestError:
        for folded in _folded_forms(messages):
            with contextlib.suppress(InvalidRequestError):
                return lay_out(folded, **changes)
        raise


def _folded_forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """First without system turns behind the beginning, then without any."""
    systems = [index for index, message in enumerate(messages) if message.get("role") == "system"]
    if systems and systems != [0]:
        begins = systems[0] == 0
        yield [*messages[:begins], *_folded(messages[begins:])]
    if systems and systems[0] == 0:
        yield _folded(messages)


def _folded(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    turns: list[Mapping[str, Any]] = []
    told: list[str] = []
    for message in messages:
        if message.get("role") == "system":
            told.append(text_of(message.get("content")))
        elif told and message.get("role") == "user":
            turns.append({**message, "content": _behind(told, message.get("content"))})
            told = []
        else:
            turns.append(message)
    return [*turns, {"role": "user", "content": _behind(told, None)}] if told else turns


def _behind(told: Sequence[str], content: Any) -> Any:
    if isinstance(content, list):
        return [*({"type": "text", "text": text} for text in told), *content]
    return "\n\n".join(text for text in (*told, content) if text)
