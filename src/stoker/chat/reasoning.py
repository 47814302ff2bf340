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
    """The text before and after reasoning. Both may be control tokens, which have to be spelled out.

    Attributes:
        opener, closer: of the reasoning.
        mark: what shows in a template that its model reasons so; empty: the closer.
        answer: the text around the answer behind it, which is no part of the answer; empty: nothing.
        final: the header of the answer itself, where an answer is messages with headers; empty: it is not.
    """

    opener: str
    closer: str
    mark: str = ""
    answer: tuple[str, str] = ("", "")
    final: str = ""

    @property
    def spelled(self) -> tuple[str, ...]:
        """All that has to be seen in the text."""
        return tuple(text for text in (self.opener, self.closer, *self.answer) if text)

    def is_in(self, template: str) -> bool:
        """Whether a chat template (Jinja source) shows these tags."""
        return (self.mark or self.closer) in template


THINK = ReasoningTags("<think>", "</think>")
BRACKETS = ReasoningTags("[THINK]", "[/THINK]")
THINKING = ReasoningTags("<thinking>", "</thinking>")
SEED_THINK = ReasoningTags("<seed:think>", "</seed:think>")
CHANNEL_THOUGHT = ReasoningTags("<|channel>thought", "<channel|>")
COMMAND_THINKING = ReasoningTags(
    "<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
GRANITE_THINK = ReasoningTags("<think>", "</think>", mark="<response>", answer=("<response>", "</response>"))
APRIEL_STEPS = ReasoningTags(
    "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", answer=("", "[END FINAL RESPONSE]")
)
HUNYUAN_THINK = ReasoningTags("<think:opensource>", "</think:opensource>", mark=":opensource")
MINIMAX_THINK = ReasoningTags("<mm:think>", "</mm:think>")
GRANITE_HERE = ReasoningTags("Here is my thought process:", "Here is my response:")
HARMONY_TAGS = ReasoningTags(
    "<|channel|>analysis<|message|>", "<|end|>", mark="<|channel|>", final="<|channel|>final<|message|>"
)
_KNOWN = (
    *(HARMONY_TAGS, CHANNEL_THOUGHT, COMMAND_THINKING, GRANITE_THINK, SEED_THINK),
    *(APRIEL_STEPS, HUNYUAN_THINK, MINIMAX_THINK, THINK, THINKING, BRACKETS, GRANITE_HERE),
)
_FIELDS = frozenset({"reasoning_content", "reasoning"})


def reasoning_tags_of(template: str | None) -> ReasoningTags | None:
    """The tags that a chat template (Jinja source) writes or removes; None: the model does not reason."""
    return next((tags for tags in _KNOWN if template and tags.is_in(template)), None)


def is_opened_by(prompt: str, tags: ReasoningTags) -> bool:
    """Whether the rendered prompt ends inside reasoning, so that the answer begins there."""
    return prompt.rstrip(WHITE).endswith(tags.opener)


class _Place(Enum):
    START = auto()
    REASONING = auto()
    BETWEEN = auto()  # white space behind the reasoning
    OPENING = auto()  # what opens the answer, which only some models write
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
        self._space: list[str] = []  # white space that is not delivered yet
        self._held = ""  # what may begin a tag, behind that
        self._has_reasoned = False  # text of the reasoning was delivered

    def __repr__(self) -> str:
        return f"ReasoningSplitter({self._tags.opener}, {self._place.name.lower()}, held={len(self._held)})"

    @property
    def is_reasoning(self) -> bool:
        """Whether the text stands inside reasoning."""
        return self._place is _Place.REASONING

    def feed(self, text: str) -> list[Reasoning | str]:
        """What `text` adds."""
        if self._place is _Place.ANSWER and not self._tags.answer[1]:
            return [text] if text else []
        self._held += text
        events: list[Reasoning | str] = []
        if self._place is not _Place.ANSWER:
            self._set_space_aside()
        if self._place is _Place.START and self._held:
            self._start()
        if self._place is _Place.REASONING:
            self._reason(events)
        if self._place is _Place.BETWEEN:
            self._set_space_aside()
            self._space.clear()
            if self._held:
                self._place = _Place.OPENING
        if self._place is _Place.OPENING:
            self._open_answer()
        if self._place is _Place.ANSWER and self._held:
            self._answer(events)
        return events

    def finish(self) -> list[Reasoning | str]:
        """What was held back, when nothing can follow any more."""
        held, self._held = self._held, ""
        if self._place is _Place.REASONING:
            held = self._behind_space(held) if held else ""
            return [Reasoning(held)] if held else []
        held = "".join(self._space) + held
        self._space.clear()
        return [held] if held else []

    def _set_space_aside(self) -> None:
        """Nothing that is held begins with white space, which may be long and is looked at once."""
        bare = self._held.lstrip(WHITE)
        self._space.append(self._held[: len(self._held) - len(bare)])
        self._held = bare

    def _behind_space(self, text: str) -> str:
        """Text of the reasoning with the white space before it, if it is not the first."""
        space = "".join(self._space) if self._has_reasoned else ""
        self._space.clear()
        return space + text

    def _start(self) -> None:
        opener = self._tags.opener
        if self._held.startswith(opener):
            self._held = self._held.removeprefix(opener)
            self._place = _Place.REASONING
            self._set_space_aside()
        elif not opener.startswith(self._held):
            self._place = _Place.OPENING

    def _reason(self, events: list[Reasoning | str]) -> None:
        closer = self._tags.closer
        text, found, rest = self._held.partition(closer)
        held = "" if found else text[len(text) - _overlap(text, closer) :]
        text = text.removesuffix(held)
        if shown := text.rstrip(WHITE):
            events.append(Reasoning(self._behind_space(shown)))
            self._has_reasoned = True
        self._space.append(text[len(shown) :])
        self._held = held
        if found:
            self._place, self._held = _Place.BETWEEN, rest

    def _open_answer(self) -> None:
        opener = self._tags.answer[0]
        if opener and opener.startswith(self._held) and self._held != opener:
            return  # held until it is told apart
        if opener and self._held.startswith(opener):
            self._held = self._held.removeprefix(opener)
        else:
            self._held = "".join(self._space) + self._held
        self._space.clear()
        self._place = _Place.ANSWER

    def _answer(self, events: list[Reasoning | str]) -> None:
        """Deliver the answer without what closes it."""
        closer = self._tags.answer[1]
        text = self._held.replace(closer, "") if closer else self._held
        end = len(text) - (_overlap(text, closer) if closer else 0)
        if end:
            events.append(text[:end])
        self._held = text[end:]


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
    if tags is None or tags.final or kept.get("role") != "assistant" or not isinstance(content, str):
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
