"""The forms of a conversation that a template may take, and the text of a turn.

A line that coding agents change with every request is taken out before.

Gemma's and Mistral's first templates know no system turn, others none but the first: their text becomes part
of the user's next turn. Where turns have to alternate, neighbours of one role become one turn, and what a
user says behind the result of a call, as agents do, becomes part of that result. Which form a template takes
is found by rendering it, which is `template`'s: the client imports this module and not that one, whose
library takes memory where nothing is rendered.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from stoker.errors import InvalidRequestError

_SYSTEM_ROLES = frozenset({"system", "developer"})
DOCUMENT_PARTS = frozenset({"file", "input_file", "document"})
"""Types of the parts that are documents."""
_CHANGING_LINE = re.compile(r"^[ \t]*x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE | re.MULTILINE)
"""A coding agent writes it into its system prompt, with another value each time, which would make what was
computed of the whole conversation useless."""


def without_changing_line(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages without the line of the first system text that is another with each request."""
    at = next((index for index, turn in enumerate(messages) if turn.get("role") in _SYSTEM_ROLES), None)
    if at is None:
        return messages
    kept = _without_line(messages[at].get("content"))
    if not kept and len(messages) > 1:
        return [*messages[:at], *messages[at + 1 :]]
    return [*messages[:at], {**messages[at], "content": kept}, *messages[at + 1 :]]


def _without_line(content: Any) -> Any:
    if isinstance(content, str):
        return _CHANGING_LINE.sub("", content)
    if not isinstance(content, list | tuple):
        return content
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or (kept := _CHANGING_LINE.sub("", text)) == text:
            parts.append(part)
        elif kept:
            parts.append({**part, "text": kept})
    return parts


def may_hold_documents(messages: object) -> bool:
    """Whether a part may be a document: by its type, or as an object of the application's own."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return False
    contents = [turn.get("content") for turn in messages if isinstance(turn, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(
        part.get("type") in DOCUMENT_PARTS if isinstance(part, Mapping) else not isinstance(part, str)
        for part in parts
    )


def text_of(content: Any) -> str:
    """The text of a turn's content: of a list that of its parts, nothing of what is no text.

    Each part stands on a line of its own, as with vLLM and llama-server: clients cut a content where a line
    ends, and joined without one two sentences would share a word.
    """
    if isinstance(content, list | tuple):
        return "\n".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


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
        for form in _other_forms(messages):
            with contextlib.suppress(InvalidRequestError):
                return lay_out(form, **changes)
        raise


def _other_forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Forms of a conversation with the same text, those that change least first."""
    folded = list(_folded_forms(messages))
    yield from folded
    for form in (messages, *folded):
        joined = _joined(form)
        if len(joined) < len(form):
            yield joined


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


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Neighbouring turns of one role as one turn, and what a user says behind a result in that result."""
    turns: list[Mapping[str, Any]] = []
    for message in messages:
        before = turns[-1] if turns else {}
        match before.get("role"), message["role"]:
            case ("user", "user") | ("assistant", "assistant") if not before.get("tool_calls"):
                turns[-1] = {**before, **message, "content": _both(before, message)}
            case ("tool", "user"):
                turns[-1] = {**before, "content": _both(before, message)}
            case _:
                turns.append(message)
    return turns


def _both(before: Mapping[str, Any], message: Mapping[str, Any]) -> Any:
    """The contents of two turns in one: text, or parts where one has parts."""
    contents = [turn["content"] for turn in (before, message) if turn.get("content")]
    if any(isinstance(content, list) for content in contents):
        texts = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents)
        return [part for parts in texts for part in parts]
    return "\n\n".join(contents)


def _behind(told: Sequence[str], content: Any) -> Any:
    if isinstance(content, list):
        return [*({"type": "text", "text": text} for text in told), *content]
    return "\n\n".join(text for text in (*told, content) if text)
