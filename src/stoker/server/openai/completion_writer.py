"""Completions on the wire: chunk by chunk, or one whole answer.

Choice j of prompt i has the index i * n + j. Echoed prompts come first in the text and in the logprobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from stoker.ipc.events import Delta, Finished, PrefillProgress, PromptEcho
from stoker.server.openai.answers import TextChoice
from stoker.server.openai.logprobs import TextLogprobs, TextLogprobsWriter
from stoker.server.streaming.head import Head, Totals, closing, progress, whole
from stoker.server.streaming.sse import frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.client.requests.stream import StreamEvent
    from stoker.ipc.usage import TokenLogprob

_OBJECT = "text_completion"


class TextChunks:
    """Completions as chunks."""

    def __init__(self, head: Head, num_prompts: int) -> None:
        self._head = head
        self._totals = Totals()
        self._logprobs = [TextLogprobsWriter() for _ in range(num_prompts * head.n)]
        self._no_usage = None if head.wants_usage else UNSET

    def write(self, prompt: int, event: StreamEvent) -> bytes:
        """Frames of one event; empty if it shows nothing."""
        first = prompt * self._head.n
        if isinstance(event, Delta):
            return self._delta(first + event.index, event)
        if isinstance(event, PromptEcho):
            return b"".join(self._echo(first + index, event) for index in range(self._head.n))
        if isinstance(event, Finished):
            self._totals.add(event)
        elif isinstance(event, PrefillProgress):
            return progress(self._head, _OBJECT, event, [TextChoice(first, "")])
        return b""

    def end(self) -> bytes:
        """Frames after the last event."""
        return closing(self._head, _OBJECT, self._totals, [TextChoice(0, "")])

    def _delta(self, index: int, event: Delta) -> bytes:
        """What it adds, and behind it the reason of its end in a chunk of its own."""
        frames = b""
        if event.text or event.logprobs:
            frames = self._frame(TextChoice(index, event.text, self._lists(index, event.logprobs)))
        if event.finish_reason is not None:
            frames += self._frame(TextChoice(index, "", None, event.finish_reason))
        return frames

    def _echo(self, index: int, event: PromptEcho) -> bytes:
        lists = self._logprobs[index].write_prompt(event.logprobs, event.text) if event.logprobs else None
        return self._frame(TextChoice(index, event.text, lists))

    def _lists(self, index: int, entries: Sequence[TokenLogprob] | None) -> TextLogprobs | None:
        return self._logprobs[index].write(entries) if entries else None

    def _frame(self, choice: TextChoice) -> bytes:
        return frame(self._head.answer(_OBJECT, [choice], usage=self._no_usage))


class WholeText:
    """Completions as one answer."""

    def __init__(self, head: Head, num_prompts: int) -> None:
        num_choices = num_prompts * head.n
        self._head = head
        self._totals = Totals()
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._writers = [TextLogprobsWriter() for _ in range(num_choices)]
        self._logprobs: list[TextLogprobs | None] = [None] * num_choices
        self._reasons = ["length"] * num_choices

    def add(self, prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        first = prompt * self._head.n
        if isinstance(event, Delta):
            self._add_delta(first + event.index, event)
        elif isinstance(event, PromptEcho):
            for index in range(first, first + self._head.n):
                self._add_echo(index, event)
        elif isinstance(event, Finished):
            self._totals.add(event)

    def _add_delta(self, index: int, event: Delta) -> None:
        self._texts[index].append(event.text)
        if event.logprobs:
            self._logprobs[index] = self._writers[index].write(event.logprobs, self._logprobs[index])
        if event.finish_reason is not None:
            self._reasons[index] = event.finish_reason

    def _add_echo(self, index: int, event: PromptEcho) -> None:
        self._texts[index].append(event.text)
        if event.logprobs:
            self._logprobs[index] = self._writers[index].write_prompt(event.logprobs, event.text)

    def whole(self) -> bytes:
        """The answer's body."""
        choices = [
            TextChoice(index, "".join(texts), self._logprobs[index], self._reasons[index])
            for index, texts in enumerate(self._texts)
        ]
        return whole(self._head, _OBJECT, self._totals, choices)
