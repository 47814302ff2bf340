"""Chat completions on the wire: chunk by chunk, or one whole answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from stoker.messages import Delta, Finished, PrefillProgress
from stoker.server.schema.answers import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    encode,
)
from stoker.server.schema.logprobs import chat_logprobs
from stoker.server.sse import frame
from stoker.server.writers.head import Head, Totals, closing, progress, whole

if TYPE_CHECKING:
    from stoker.streams import StreamEvent
    from stoker.values import TokenLogprob

_CHUNK = "chat.completion.chunk"
_WHOLE = "chat.completion"
_ROLE = ChatDelta(role="assistant", content="")
_NOTHING = ChatDelta()


class ChatChunks:
    """A chat completion as chunks; the first of each choice names the role."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._totals = Totals()
        self._begun: set[int] = set()
        # Where usage was asked for, every chunk has the field and the last one fills it.
        self._no_usage = None if head.wants_usage else UNSET

    def write(self, _prompt: int, event: StreamEvent) -> bytes:
        """Frames of one event; empty if it shows nothing."""
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Finished):
            self._totals.add(event)
        elif isinstance(event, PrefillProgress):
            return progress(self._head, _CHUNK, event, [ChatChunkChoice(0, _NOTHING)])
        return b""

    def end(self) -> bytes:
        """Frames after the last event."""
        return closing(self._head, _CHUNK, self._totals.usage(), [ChatChunkChoice(0, _NOTHING)])

    def _delta(self, event: Delta) -> bytes:
        opening = b""
        if event.index not in self._begun:
            self._begun.add(event.index)
            opening = self._frame(ChatChunkChoice(event.index, _ROLE))
        if not (event.text or event.finish_reason or event.logprobs):
            return opening
        return opening + self._frame(
            ChatChunkChoice(
                event.index,
                ChatDelta(content=event.text) if event.text else _NOTHING,
                chat_logprobs(event.logprobs) if event.logprobs else None,
                event.finish_reason,
            )
        )

    def _frame(self, choice: ChatChunkChoice) -> bytes:
        head = self._head
        return frame(
            encode(Answer(head.id, _CHUNK, head.created, head.model, [choice], usage=self._no_usage))
        )


class WholeChat:
    """A chat completion as one answer."""

    def __init__(self, head: Head, *, has_logprobs: bool) -> None:
        self._head = head
        self._has_logprobs = has_logprobs
        self._totals = Totals()
        self._texts: list[list[str]] = [[] for _ in range(head.n)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(head.n)]
        self._reasons = ["length"] * head.n

    def add(self, _prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        if isinstance(event, Delta):
            self._texts[event.index].append(event.text)
            self._logprobs[event.index].extend(event.logprobs or ())
            if event.finish_reason is not None:
                self._reasons[event.index] = event.finish_reason
        elif isinstance(event, Finished):
            self._totals.add(event)

    def whole(self) -> bytes:
        """The answer's body."""
        choices = [
            ChatChoice(
                index,
                ChatMessage("".join(self._texts[index])),
                self._reasons[index],
                chat_logprobs(self._logprobs[index]) if self._has_logprobs else None,
            )
            for index in range(self._head.n)
        ]
        return whole(self._head, _WHOLE, self._totals, choices)
