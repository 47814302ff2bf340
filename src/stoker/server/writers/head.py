"""What every chunk of one answer repeats, and the totals its end reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.messages import Timings
from stoker.server.generation import total_usage
from stoker.server.schema.answers import (
    Progress,
    TimingsAnswer,
    UsageAnswer,
    timings_answer,
    usage_answer,
)

if TYPE_CHECKING:
    from stoker.messages import Finished, PrefillProgress


@dataclass(frozen=True)
class Head:
    """Identity of one answer.

    Attributes:
        id: `chatcmpl-...` or `cmpl-...`.
        model: id of the model that answers.
        n: choices of each prompt.
        wants_usage: whether a stream ends with a usage chunk.
        created: seconds since the epoch.
    """

    id: str
    model: str
    n: int
    wants_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))


class Totals:
    """Usage and times over the prompts of one answer."""

    def __init__(self) -> None:
        self._finished: list[Finished] = []

    def add(self, event: Finished) -> None:
        """Take in the end of one prompt."""
        self._finished.append(event)

    def usage(self) -> UsageAnswer:
        """The sum of all prompts."""
        return usage_answer(total_usage([event.usage for event in self._finished]))

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


def progress(event: PrefillProgress) -> Progress:
    """`prompt_progress` of an event."""
    return Progress(total=event.total, cache=event.cached, processed=event.processed, time_ms=event.time_ms)
