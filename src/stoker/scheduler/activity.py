"""What the steps of a model were like lately: their time, their rows, whose they were. Moving averages.

Pure: time arrives as an argument. The time of a step is that from the end of the one before, so that what
happens between steps counts too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stoker.scheduler.plan import StepPlan

ACTIVITY_S = 15.0
"""Time over which the averages are taken."""
GONE_S = 3.0
"""Where no person was there for so long, none is expected."""


class People(NamedTuple):
    """Part of the time that people who are not there yet will take, and for how many seconds."""

    share: float = 0.0
    lasts_s: float = 0.0


class StepActivity:
    """Sums of what the steps did, which fade with time."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._at_s = 0.0
        self._num_steps = self._num_rows = self._num_tokens = 0.0
        self._people_s = self._jobs_s = 0.0
        self._people_at_s = self._people_since_s = -math.inf

    def __repr__(self) -> str:
        return f"<StepActivity {self.figures(self._at_s)}>"

    def stepped(self, plan: StepPlan, took_s: float, now: float) -> None:
        """A step has ended; one with a row of a person is people's."""
        if self._began_s is None:
            self._began_s = now - took_s
        fading = self._fading(now)
        is_peoples = any(not part.sequence.is_background for part in plan.parts)
        self._at_s = now
        if is_peoples:
            if now - took_s - self._people_at_s > GONE_S:
                self._people_since_s = now - took_s
            self._people_at_s = now
        self._num_steps = self._num_steps * fading + 1
        self._num_rows = self._num_rows * fading + len(plan.parts)
        num_tokens = sum(len(part.item.tokens) for part in plan.parts)
        self._num_tokens = self._num_tokens * fading + num_tokens
        self._people_s = self._people_s * fading + (took_s if is_peoples else 0.0)
        self._jobs_s = self._jobs_s * fading + (0.0 if is_peoples else took_s)

    def people_share(self, now: float) -> float:
        """Part of the time that steps for people took, 0 to 1."""
        return min(1.0, self._people_s * self._fading(now) / self._window_s(now))

    def people_to_come(self, now: float) -> People:
        """Who has come one after the other for a while is expected to do so for as long again."""
        if now - self._people_at_s > GONE_S:
            return People()
        return People(self.people_share(now), now - self._people_since_s)

    def figures(self, now: float) -> dict[str, float]:
        """Averages by name; those of a step are 0 before the first."""
        num_steps = self._num_steps or math.inf
        return {
            "step_ms": (self._people_s + self._jobs_s) / num_steps * 1000.0,
            "rows_per_step": self._num_rows / num_steps,
            "tokens_per_step": self._num_tokens / num_steps,
            "people_share": self.people_share(now),
            "jobs_share": min(1.0, self._jobs_s * self._fading(now) / self._window_s(now)),
        }

    def _fading(self, now: float) -> float:
        return math.exp(-max(0.0, now - self._at_s) / ACTIVITY_S)

    def _window_s(self, now: float) -> float:
        """What the sums would be if steps took all the time since the first one began."""
        lasted_s = 0.0 if self._began_s is None else now - self._began_s
        return max(1e-3, ACTIVITY_S * (1.0 - math.exp(-lasted_s / ACTIVITY_S)))
