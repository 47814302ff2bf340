"""What a model thinks before it answers, apart from the answer (SPEC D7).

Owns the tags of reasoning: which a template knows, whether a prompt has opened them already, where the text
leaves them, and which of it is shown to the model again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from stoker.chat.answer_events import Reasoning

WHITE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The text before and after reasoning. Both may be control tokens, which have to be spelled out."""

    opener: str
    closer: str


THINK = ReasoningTags("<think>", "</think>")
BRACKETS = ReasoningTags("[THINK]", "[/THINK]")
_KNOWN = (THINK, BRACKETS)
_FIELDS = frozenset({"reasoning_content", "reasoning"})


def reasoning_tags_of(template: str | None) -> ReasoningTags | None:
    """The tags that a chat template (Jinja source) writes or removes; None: the model does not reason."""
    return next((tags for tags in _KNOWN if template and tags.closer in template), None)


def is_opened_by(prompt: str, tags: ReasoningTags) -> bool:
    """Whether the rendered prompt ends inside reasoning, so that the answer begins there."""
    return prompt.rstrip(WHITE).endswith(tags.opener)


class _Place(Enum):
    START = auto()
    REASONING = auto()
    BETWEEN = auto()  # white space behind the reasoning
    ANSWER = auto()


class ReasoningSplitter:
    """Splits one choice's text; only what it begins with can be reasoning.

    White space around the reasoning is dropped. An end of the text within the reasoning ends that.

    Args:
        tags: of the model.
        is_open: the prompt ends inside reasoning.
    """

    def __init__(self, tags: ReasoningTags, *, is_open: bool = False) -> None:
        self._tags = tags
        self._place = _Place.REASONING if is_open else _Place.START
        self._held = ""
        self._has_reasoned = False  # text of the reasoning was delivered

    def __repr__(self) -> str:
        return f"ReasoningSplitter({self._tags.opener}, {self._place.name.lower()}, held={len(self._held)})"

    @property
    def is_reasoning(self) -> bool:
        """Whether the text stands inside reasoning."""
        return self._place is _Place.REASONING

    def feed(self, text: str) -> list[Reasoning | str]:
        """What `text` adds."""
        if self._place is _Place.ANSWER:
            return [text] if text else []
        self._held += text
        events: list[Reasoning | str] = []
        if self._place is _Place.START:
            self._start()
        if self._place is _Place.REASONING:
            self._reason(events)
        if self._place is _Place.BETWEEN:
            self._held = self._held.lstrip(WHITE)
            if self._held:
                self._place = _Place.ANSWER
        if self._place is _Place.ANSWER and self._held:
            events.append(self._held)
            self._held = ""
        return events

    def finish(self) -> list[Reasoning | str]:
        """What was held back, when nothing can follow any more."""
        held, self._held = self._held, ""
        if self._place is _Place.REASONING:
            held = held.rstrip(WHITE)
            return [Reasoning(held)] if held else []
        return [held] if held else []

    def _start(self) -> None:
        begun = self._held.lstrip(WHITE)
        opener = self._tags.opener
        if begun.startswith(opener):
            self._held = begun.removeprefix(opener)
            self._place = _Place.REASONING
        elif not opener.startswith(begun):
            self._place = _Place.ANSWER

    def _reason(self, events: list[Reasoning | str]) -> None:
        if not self._has_reasoned:
            self._held = self._held.lstrip(WHITE)
        closer = self._tags.closer
        text, found, rest = self._held.partition(closer)
        if not found:
            shown = text[: len(text) - _overlap(text, closer)].rstrip(WHITE)
            rest = text[len(shown) :]
        else:
            shown = text.rstrip(WHITE)
            self._place = _Place.BETWEEN
        if shown:
            events.append(Reasoning(shown))
            self._has_reasoned = True
        self._held = rest


def strip_reasoning(
    messages: Sequence[Mapping[str, Any]], tags: ReasoningTags | None = THINK
) -> list[dict[str, Any]]:
    """The messages without what the assistant thought before the user's last turn (adr/0020).

    Behind that turn, in a loop of tool calls, a template decides: the thoughts stand in `reasoning_content`,
    or in the text as they were given.
    """
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    last_user = users[-1] if users else -1
    return [
        _without_reasoning(message, tags) if index < last_user else _with_reasoning(message)
        for index, message in enumerate(messages)
    ]


def reasoning_of(message: Mapping[str, Any]) -> str:
    """What the assistant thought, by either name that servers have for the field."""
    given = message.get("reasoning_content") or message.get("reasoning")
    return given if isinstance(given, str) else ""


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in _FIELDS}
    thought = reasoning_of(message)
    return {**kept, "reasoning_content": thought} if thought else kept


def _without_reasoning(message: Mapping[str, Any], tags: ReasoningTags | None) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in _FIELDS}
    content = kept.get("content")
    if tags is None or kept.get("role") != "assistant" or not isinstance(content, str):
        return kept
    opened, found, rest = content.partition(tags.closer)
    # A template that opens the reasoning itself leaves answers with the closing tag alone.
    if found and (opened.lstrip(WHITE).startswith(tags.opener) or tags.opener not in opened):
        kept["content"] = rest.lstrip(WHITE)
    return kept


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with, less than all of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
