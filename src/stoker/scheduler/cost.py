"""How long a step over so many tokens takes, learned from the steps that were run, and what follows from it.

`StepCost` has one table for each number of threads, since a step costs another time with another number. A
table has a point for each power of two of tokens: the mean size and time of the steps near it. Between
points time is interpolated: a step costs a fixed part, then less and less a token as matrix products grow. A
point follows quicker steps at once and slower ones slowly: a quiet machine is what it remembers, while the
growth of contexts, which is slow, still reaches it.

`EtaEstimator` says when a waiting sequence may run (SPEC Q14) and when a refused caller may try again (SPEC
Q11). These are estimates from measured times: answers may end early, and later arrivals are not known.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from stoker.kv.sequence import Sequence

UNMEASURED_TOKENS = 32
"""What a step may carry beside interactive decode before anything was measured."""
FOLLOW_DOWN = 0.5
FOLLOW_UP = 0.05


@dataclass(slots=True)
class _Point:
    num_tokens: float
    took_s: float


class StepCost:
    """Times of steps by number of tokens.

    Attributes:
        num_threads: whose table is asked and taught.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self._tables: dict[int, dict[int, _Point]] = {}
        self._curve: list[_Point] | None = None

    def __repr__(self) -> str:
        told = ", ".join(f"{at.num_tokens:.0f}: {at.took_s * 1000:.1f}" for at in self._points())
        return f"<StepCost ms of steps by tokens, {self.num_threads} threads: {told or 'nothing measured'}>"

    def use_threads(self, num_threads: int) -> None:
        """Ask and teach the table of that number of threads from now on."""
        self.num_threads, self._curve = num_threads, None

    def learn(self, num_tokens: int, took_s: float) -> None:
        """A step over `num_tokens` took `took_s` seconds."""
        self._curve = None
        table = self._tables.setdefault(self.num_threads, {})
        rank = num_tokens.bit_length()
        point = table.get(rank)
        if point is None:
            table[rank] = _Point(num_tokens, took_s)
            return
        expected_s = point.took_s * num_tokens / point.num_tokens
        weight = FOLLOW_DOWN if took_s < expected_s else FOLLOW_UP
        point.num_tokens += weight * (num_tokens - point.num_tokens)
        point.took_s += weight * (took_s - point.took_s)

    def predict(self, num_tokens: int) -> float | None:
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


def waits_s(running: SequenceOf[float], waiting: SequenceOf[float], num_slots: int) -> list[float]:
    """Seconds until each waiting sequence gets one of `num_slots` slots, in order of the queue.

    Args:
        running: seconds each running sequence still needs.
        waiting: seconds each waiting one will need once it runs.
        num_slots: sequences that run at once.
    """
    free_at = sorted(running)[-num_slots:] if len(running) > num_slots else list(running)
    free_at += [0.0] * (num_slots - len(free_at))
    heapq.heapify(free_at)
    starts = []
    for own_s in waiting:
        start = free_at[0]
        starts.append(start)
        heapq.heapreplace(free_at, start + own_s)
    return starts


TYPICAL_TOKENS = 128.0
"""Length of an answer, until some have ended."""
MIN_RETRY_AFTER_S = 1.0
FOLLOW_ANSWERS = 0.2

CLOSE_POSITIONS = 32
"""Positions whose waits are simulated one by one at each arrival."""


class EtaEstimator:
    """Learns how long answers are and how often one ends."""

    def __init__(self, cost: StepCost, num_slots: int) -> None:
        self._cost = cost
        self._num_slots = num_slots
        self._answer_tokens = TYPICAL_TOKENS
        self._service_s = MIN_RETRY_AFTER_S

    def __repr__(self) -> str:
        return f"<EtaEstimator answers of {self._answer_tokens:.0f} tokens, one in {self._service_s:.1f} s>"

    def note_end(self, sequence: Sequence, now: float) -> None:
        """A sequence that ran has ended."""
        started_s = sequence.arrival_s if sequence.started_s is None else sequence.started_s
        self._answer_tokens += FOLLOW_ANSWERS * (sequence.num_generated - self._answer_tokens)
        self._service_s += FOLLOW_ANSWERS * ((now - started_s) / self._num_slots - self._service_s)

    def wait_s(self, running: SequenceOf[Sequence], waiting: SequenceOf[Sequence], position: int) -> float:
        """Seconds until one position runs; far back roughly, as arrivals must not cost much."""
        if position < CLOSE_POSITIONS:
            return self.waits_s(running, waiting[: position + 1])[position]
        close_s = self.waits_s(running, waiting[:CLOSE_POSITIONS])[-1]
        return close_s * (position + 1) / CLOSE_POSITIONS

    def retry_after_s(self) -> float:
        """Seconds after which a refused caller may try again: the time of an answer, over the slots."""
        return max(MIN_RETRY_AFTER_S, self._service_s)

    def needs_s(self, sequence: Sequence) -> float:
        """Seconds it needs from now on, beside as many others as there are slots."""
        wanted = self._answer_tokens if sequence.num_wanted is None else sequence.num_wanted
        num_left = max(1.0, wanted - sequence.num_generated)
        step_s = self._cost.predict(self._num_slots) or 0.0
        prefill_s = self._cost.predict(sequence.num_pending) or 0.0
        return prefill_s + num_left * step_s

    def waits_s(self, running: SequenceOf[Sequence], waiting: SequenceOf[Sequence]) -> list[float]:
        """Seconds until each queued one runs. Interactive work takes the slots of background at once."""
        interactive = [self.needs_s(s) for s in running if not s.is_background]
        background = [self.needs_s(s) for s in running if s.is_background]
        num_interactive = sum(not s.is_background for s in waiting)
        needs = [self.needs_s(s) for s in waiting]
        starts = waits_s(interactive, needs[:num_interactive], self._num_slots)
        return starts + waits_s(interactive + background, needs, self._num_slots)[num_interactive:]
