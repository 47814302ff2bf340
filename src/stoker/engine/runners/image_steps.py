"""When a model looks at pictures: between its steps, as long as nobody who decodes is made to wait (SPEC V3).

Joins the gallery, which knows what is to be encoded, with the clock. A model without a projector has nothing
to look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.engine.runners.image_encoder import ImageEncoder
from stoker.kv.sequence import SequenceState
from stoker.scheduler.budget import SliceBudget

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Backend
    from stoker.cache.prefix_cache import PrefixCache
    from stoker.engine.threads.pace import Pace
    from stoker.errors import StepFailedError
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.plan import Planned, StepPlan
    from stoker.scheduler.scheduler import Scheduler


class ImageSteps:
    """Gives one model's pictures their slices."""

    def __init__(self, backend: Backend, scheduler: Scheduler, pace: Pace, cache: PrefixCache) -> None:
        self._scheduler = scheduler
        self._pace = pace
        self._budget = SliceBudget(scheduler.limits.target_step_s)
        vision = backend.extensions.vision
        self._image_encoder = (
            None if vision is None else ImageEncoder(backend, vision, cache, scheduler.limits.source)
        )

    def __repr__(self) -> str:
        return f"<ImageSteps {self._image_encoder!r} {self._budget!r}>"

    @property
    def has_work(self) -> bool:
        """Whether a slice, or handing out embeddings, would do something."""
        return self._image_encoder is not None and self._image_encoder.has_work(self._scheduler.slots.running)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody who runs can do nothing before a picture was looked at."""
        return any(sequence.awaits_image for sequence in self._scheduler.slots.running)

    @property
    def goes_first(self) -> bool:
        """Whether all people who run wait for pictures: steps of jobs alone would make them wait longer."""
        if self._image_encoder is None or not self._image_encoder.is_encoding:
            return False
        people = [each for each in self._scheduler.slots.running if not each.is_background]
        return bool(people) and all(each.awaits_image for each in people)

    def stats(self) -> dict[str, float]:
        """Every counter."""
        return {} if self._image_encoder is None else self._image_encoder.stats()

    def tend(self, now: float) -> list[tuple[Sequence, StepFailedError]]:
        """Hand out embeddings and choose what is encoded next; returns those whose pictures failed."""
        if self._image_encoder is None:
            return []
        self._image_encoder.tend(self._scheduler.slots.running, now)
        return self._image_encoder.take_failed()

    def look(self, plan: StepPlan | None, took_s: float) -> None:
        """Encode for a slice, after a step of `plan` that took so long; None: there was nothing to step."""
        image_encoder = self._image_encoder
        if (
            image_encoder is None
            or not image_encoder.has_work(self._scheduler.slots.running)
            or not image_encoder.is_encoding
        ):
            return
        budget_s = self._time_after(plan, took_s)
        if not budget_s:
            return
        begun_s = self._pace.now()
        self._pace.begin(1)
        try:
            image_encoder.run(budget_s, begun_s)
        finally:
            self._pace.abandon()
        self._budget.spent(self._pace.now() - begun_s)

    def _time_after(self, plan: StepPlan | None, took_s: float) -> float:
        """Seconds for a slice after that step; 0: not now."""
        if plan is None or not _has_people_decoding(plan):
            self._budget.idle()
        elif any(_is_of_picture(part) for part in plan.parts):
            return 0.0  # the step was the longer for another's picture already
        elif not self._scheduler.bursts.suits(took_s):
            self._budget.stepped(took_s)
        elif not self._scheduler.bursts.is_due:
            return 0.0
        else:
            self._scheduler.bursts.taken()
            self._budget.idle()
        return self._budget.next_s()

    def close(self) -> None:
        """Give up what is being encoded; idempotent."""
        if self._image_encoder is not None:
            self._image_encoder.close()


def _has_people_decoding(plan: StepPlan) -> bool:
    return any(
        part.sequence.state is SequenceState.DECODE and not part.sequence.is_background for part in plan.parts
    )


def _is_of_picture(part: Planned) -> bool:
    return part.item.tokens[0] < 0
