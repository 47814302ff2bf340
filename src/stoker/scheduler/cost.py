"""Times of steps, learned from those that were run: how long one takes, and what the last were like.

`StepCost` has one table for each number of threads, since a step costs another time with another number. A
table has a point for each power of two of tokens: the mean size and time of the steps near it. Between
points time is interpolated: a step costs a fixed part, then less and less a token as matrix products grow. A
point follows quicker steps at once and slower ones slowly: a quiet machine is what it remembers, while the
growth of contexts, which is slow, still reaches it. The first step of a size is forgotten for a quicker one.

`Slowdown` is how many times that quiet time a step takes at this moment: other processes, a hot processor and
long contexts all count. It follows within two steps of a fifth of a second, and back at once.

`StepActivity` has moving averages of the last steps: their time, their rows, whose they were. There the time
of a step is that from the end of the one before, so that what happens between steps counts too.

Pure: time arrives as an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stoker.scheduler.plan import StepPlan

UNMEASURED_TOKENS = 32
"""What a step may carry beside interactive decode before anything was measured."""
FOLLOW_DOWN = 0.5
FOLLOW_UP = 0.05


SLOWDOWN_S = 0.2
"""Time in steps over which it is followed upwards."""
MOST_TIMES = 20.0
"""A step counts as at most so many times its quiet time: the process itself may have stood still."""


class Slowdown:
    """How many times its quiet time a step takes now.

    Attributes:
        times: 1 at least.
    """

    def __init__(self) -> None:
        self.times = 1.0

    def __repr__(self) -> str:
        return f"<Slowdown {self.times:.2f}>"

    def stepped(self, took_s: float, quiet_s: float) -> None:
        """A step took so long, where a quiet machine takes `quiet_s`."""
        if quiet_s <= 0.0:
            return
        times = min(took_s / quiet_s, MOST_TIMES)
        weight = FOLLOW_DOWN if times < self.times else 1.0 - math.exp(-took_s / SLOWDOWN_S)
        self.times = max(1.0, self.times + weight * (times - self.times))


@dataclass(slots=True)
class _Point:
    num_tokens: float
    took_s: float
    is_first: bool = False


class StepCost:
    """Times of steps by number of tokens.

    Attributes:
        num_threads: whose table is asked and taught.
        slowdown: of the last steps; `predict` leaves it out, `predict_now` and `tokens_now` count it.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self.slowdown = Slowdown()
        self._tables: dict[int, dict[int, _Point]] = {}
        self._curve: list[_Point] | None = None

    def __repr__(self) -> str:
        told = ", ".join(f"{at.num_tokens:.0f}: {at.took_s * 1000:.1f}" for at in self._points())
        return f"<StepCost ms of steps by tokens, {self.num_threads} threads: {told or 'nothing measured'}>"

    def use_threads(self, num_threads: int) -> None:
        """Ask and teach the table of that number of threads from now on."""
        self.num_threads, self._curve = num_threads, None

    def learn(self, num_tokens: int, took_s: float) -> None:
        """A step over `num_tokens` took `took_s` seconds; 0: the process stood still, which says nothing."""
        if took_s <= 0.0:
            return
        self._curve = None
        table = self._tables.setdefault(self.num_threads, {})
        rank = num_tokens.bit_length()
        point = table.get(rank)
        if point is None:
            table[rank] = _Point(num_tokens, took_s, is_first=True)
            return
        expected_s = point.took_s * num_tokens / point.num_tokens
        weight = FOLLOW_DOWN if took_s < expected_s else FOLLOW_UP
        if point.is_first and took_s < expected_s:
            weight = 1.0  # the first of its kind had pages to touch, or a device its kernels to load
        point.is_first = False
        point.num_tokens += weight * (num_tokens - point.num_tokens)
        point.took_s += weight * (took_s - point.took_s)

    def stepped(self, num_tokens: int, took_s: float) -> None:
        """A step took so long, on the machine as it is; call it before `learn`."""
        quiet_s = self.predict(num_tokens)
        if quiet_s is not None:
            self.slowdown.stepped(took_s, quiet_s)

    def predict(self, num_tokens: float) -> float | None:
        """Seconds a step over `num_tokens` takes on a quiet machine; None: nothing was measured.

        Fewer tokens than were ever measured count like the fewest, more like as many of the most.
        """
        points = self._points()
        if not points:
            return None
        last = points[0]
        if num_tokens <= last.num_tokens:
            return last.took_s
        for point in points[1:]:
            if num_tokens <= point.num_tokens:
                share = (num_tokens - last.num_tokens) / (point.num_tokens - last.num_tokens)
                return last.took_s + share * (point.took_s - last.took_s)
            last = point
        return last.took_s * num_tokens / last.num_tokens

    def among_others(self, num_tokens: float) -> float | None:
        """Seconds that so many tokens take in a step of the quickest size; None: nothing was measured."""
        best = self.best_rate()
        return num_tokens / best if best else None

    def predict_few(self, num_tokens: float, few: float) -> float | None:
        """The same, where steps smaller than any measured cost as much as `few` tokens more of one."""
        points = self._points()
        if not points or num_tokens >= points[0].num_tokens:
            return self.predict(num_tokens)
        return min(1.0, (num_tokens + few) / points[0].num_tokens) * points[0].took_s

    def knows(self, num_tokens: int) -> bool:
        """Whether steps of about so many tokens were measured with these threads."""
        return num_tokens.bit_length() in self._tables.get(self.num_threads, {})

    def is_sure(self, num_tokens: int) -> bool:
        """Whether more than the first step of about so many tokens was measured with these threads."""
        point = self._tables.get(self.num_threads, {}).get(num_tokens.bit_length())
        return point is not None and not point.is_first

    def is_measured(self, num_tokens: int) -> bool:
        """Whether steps of about so many tokens, or more, were measured with these threads."""
        points = self._points()
        return bool(points) and 2 * points[-1].num_tokens >= num_tokens

    def tokens_within(self, budget_s: float, most: int) -> int:
        """The most tokens, up to `most`, that a step of `budget_s` seconds can carry; 0: not even one."""
        points = self._points()
        if not points:
            return min(UNMEASURED_TOKENS, most)
        last = points[0]
        if budget_s < last.took_s:
            return 0
        for point in points[1:]:
            if budget_s < point.took_s:  # so it is more than the last point's
                share = (budget_s - last.took_s) / (point.took_s - last.took_s)
                return min(most, int(last.num_tokens + share * (point.num_tokens - last.num_tokens)))
            last = point
        return min(most, int(last.num_tokens * budget_s / last.took_s))

    def tokens_now(self, budget_s: float, most: int) -> int:
        """As `tokens_within`, on the machine as it is; steps smaller than any measured cost in proportion."""
        quiet_s, points = budget_s / self.slowdown.times, self._points()
        if points and quiet_s < points[0].took_s:
            return min(most, int(points[0].num_tokens * quiet_s / points[0].took_s))
        return self.tokens_within(quiet_s, most)

    def tokens_at_best(self, budget_s: float, most: int) -> int:
        """As `tokens_within`; more tokens cost no more each than those of the quickest size measured."""
        return max(self.tokens_within(budget_s, most), min(most, int(self.best_rate() * budget_s)))

    def best_rate(self) -> float:
        """Tokens a second of the quickest size measured; 0: nothing was measured."""
        return max((point.num_tokens / point.took_s for point in self._points()), default=0.0)

    def _points(self) -> list[_Point]:
        """The table in use, ascending in tokens and in time; of another number of threads if it has none."""
        if self._curve is not None:
            return self._curve
        table = self._tables.get(self.num_threads) or next(iter(self._tables.values()), {})
        points: list[_Point] = []
        least_s = float("inf")
        for _, point in sorted(table.items(), reverse=True):
            least_s = min(least_s, point.took_s)  # more tokens never take less
            points.append(_Point(point.num_tokens, least_s))
        points.reverse()
        self._curve = points
        return points


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
        self._num_tokens = self._num_tokens * fading + plan.num_tokens
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


@dataclass(slots=True)
class StepTally:
    """What the steps of one model did since that was asked last: sums that cost a step a few additions.

    Attributes:
        num_steps, took_s, longest_s: steps, their seconds in native code, and the longest of them.
        num_rows: sequences that wrote in them.
        num_prompt_tokens: of prompts, computed.
        num_drawn: tokens drawn.
    """

    num_steps: int = 0
    took_s: float = 0.0
    longest_s: float = 0.0
    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_drawn: int = 0

    def took(self, took_s: float) -> None:
        """A step has ended."""
        self.num_steps += 1
        self.took_s += took_s
        self.longest_s = max(self.longest_s, took_s)

    def taken(self) -> StepTally:
        """The sums until now; they begin anew."""
        found = StepTally(
            self.num_steps,
            self.took_s,
            self.longest_s,
            self.num_rows,
            self.num_prompt_tokens,
            self.num_drawn,
        )
        self.num_steps = self.num_rows = self.num_prompt_tokens = self.num_drawn = 0
        self.took_s = self.longest_s = 0.0
        return found
