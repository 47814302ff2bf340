"""What every chunk of one answer repeats, and the totals its end reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from stoker.ipc.usage import Timings, Usage
from stoker.server.openai.answers import (
    ChatChoice,
    ChatChunkChoice,
    CompletionAnswer,
    Progress,
    TextChoice,
    TimingsAnswer,
    encode,
    image_answers,
    shift_answer,
    timings_answer,
    usage_answer,
)
from stoker.server.streaming.generation import total_usage
from stoker.server.streaming.sse import frame

if TYPE_CHECKING:
    from stoker.images import ImageReport
    from stoker.ipc.events import Finished, PrefillProgress

    _Choices = list[ChatChunkChoice] | list[TextChoice]


@dataclass(frozen=True)
class Head:
    """Identity of one answer.

    Attributes:
        id: `chatcmpl-...` or `cmpl-...`.
        model: id of the model that answers.
        n: choices of each prompt.
        wants_usage: whether a stream ends with a usage chunk.
        tier: the `service_tier` it is served with; unset: it is not known.
        has_functions: calls are read in the form that was before tools.
        created: seconds since the epoch.
        images: what became of the pictures of its prompt.
    """

    id: str
    model: str
    n: int
    wants_usage: bool
    tier: str | UnsetType = UNSET
    has_functions: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    images: tuple[ImageReport, ...] = ()

    def answer(self, kind: str, choices: _Choices | list[ChatChoice], **fields: Any) -> bytes:
        """JSON of the answer, or of a chunk of it, whose `object` is `kind`."""
        made = CompletionAnswer(self.id, kind, self.created, self.model, choices, self.tier, **fields)
        return encode(made)


class Totals:
    """Usage and times over the prompts of one answer."""

    def __init__(self) -> None:
        self._finished: list[Finished] = []

    def add(self, event: Finished) -> None:
        """Take in the end of one prompt."""
        self._finished.append(event)

    def usage(self) -> Usage:
        """The sum of all prompts."""
        return total_usage([event.usage for event in self._finished])

    def timings(self) -> TimingsAnswer:
        """The longest of each stage: prompts run side by side. Preemptions are added up."""
        every = [event.timings for event in self._finished] or [Timings()]
        return timings_answer(
            Timings(
                queue_s=max(timings.queue_s for timings in every),
                prefill_s=max(timings.prefill_s for timings in every),
                decode_s=max(timings.decode_s for timings in every),
                num_preemptions=sum(timings.num_preemptions for timings in every),
            )
        )


def closing(head: Head, kind: str, totals: Totals, nothing: _Choices) -> bytes:
    """Frames after the last event: usage and timings where usage was asked for, a context shift always (C12).

    Args:
        head: of the answer.
        kind: the chunk's `object`.
        totals: over all prompts.
        nothing: one choice without text, for clients that look at the first of every chunk; who asked for
            usage expects a chunk without choices.
    """
    usage = totals.usage()
    shift = shift_answer(usage)
    if head.wants_usage:
        fields = {"usage": usage_answer(usage), "context_shift": shift, "images": image_answers(head.images)}
        return frame(head.answer(kind, [], timings=totals.timings(), **fields))
    if shift is not UNSET:
        return frame(head.answer(kind, nothing, context_shift=shift))
    return b""


def progress(head: Head, kind: str, event: PrefillProgress, nothing: _Choices) -> bytes:
    """The frame of a chunk with `prompt_progress`; the other arguments are as in `closing`."""
    done = Progress(total=event.total, cache=event.cached, processed=event.processed, time_ms=event.time_ms)
    return frame(head.answer(kind, nothing, prompt_progress=done))


def whole(head: Head, kind: str, totals: Totals, choices: list[ChatChoice] | list[TextChoice]) -> bytes:
    """The body of an answer in one piece, `kind` being its `object`."""
    usage = totals.usage()
    return head.answer(
        kind,
        choices,
        usage=usage_answer(usage),
        timings=totals.timings(),
        context_shift=shift_answer(usage),
        images=image_answers(head.images),
    )
