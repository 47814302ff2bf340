"""When a waiting sequence will run (SPEC Q14), and when a refused caller may try again (SPEC Q11).

Three things are measured. `Pace` is how many times its quiet time a step takes now, by the clock on the wall:
other programs, other models and our own code all count. `AnswerLengths` is how long answers were, of those
that ended by themselves and of those that were cut. What the sequences before still have to compute follows
from these, and `starts_s` plays it through with the rules of the planner: slots, classes, slices of prompts.

Later arrivals are not known, nor is what a prompt will find in the cache. Pure: time arrives as an argument.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING, Protocol

from stoker.ipc.model import Policy
from stoker.ipc.request import FinishReason
from stoker.kv.sequence import SequenceState
from stoker.scheduler.cost import MOST_TIMES, People
from stoker.scheduler.plan import BACKGROUND_SHARE, StepBudget

if TYPE_CHECKING:
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.cost import StepCost

MIN_RETRY_AFTER_S = 1.0
FOLLOW_ANSWERS = 0.2
CLOSE_POSITIONS = 32
"""Positions whose waits are played through; further back they are taken to grow evenly."""

PACE_S = 6.0
"""Time over which the pace is a mean: a stall is soon forgotten, a program that stays is soon known."""
FEW_TOKENS = 4.0
"""A step costs at least as much as that many prompt tokens, where no small one was measured yet."""


class Pace:
    """How many times its quiet time a step takes now."""

    def __init__(self) -> None:
        self._took_s = self._quiet_s = 0.0

    def __repr__(self) -> str:
        return f"<Pace {self.times:.2f}>"

    @property
    def times(self) -> float:
        """Wall time over quiet time of the last steps; 1 before the first."""
        return self._took_s / self._quiet_s if self._quiet_s else 1.0

    def stepped(self, took_s: float, quiet_s: float) -> None:
        """From one step to the next it took so long, where a quiet machine takes `quiet_s`."""
        if quiet_s <= 0.0:
            return
        took_s = min(took_s, MOST_TIMES * quiet_s)
        fading = math.exp(-took_s / PACE_S)
        self._took_s = self._took_s * fading + took_s
        self._quiet_s = self._quiet_s * fading + quiet_s


NUM_ANSWERS = 32
UNKNOWN_LENGTHS = (32, 64, 128, 256, 512)
"""Lengths that count as seen until as many answers have ended as are remembered."""


class AnswerLengths:
    """How long answers are by themselves, from the last that ended (product limit, Kaplan and Meier 1958).

    An answer that was cut, by its own limit or its caller, says only that it would have been longer. Beyond
    the longest that was seen, one goes on for as long again.
    """

    def __init__(self) -> None:
        self._ended = deque([(length, False) for length in UNKNOWN_LENGTHS], NUM_ANSWERS)
        self._lengths: list[float] = []
        self._shares: list[float] = []
        self._areas: list[float] = []
        self._longest = 1.0
        self._learn()

    def __repr__(self) -> str:
        return f"<AnswerLengths of {len(self._ended)}, {self.left(0, None):.0f} tokens on average>"

    def note(self, num_tokens: int, reason: FinishReason) -> None:
        """An answer has ended with so many tokens."""
        self._ended.append((num_tokens, reason is not FinishReason.STOP))
        self._learn()

    def left(self, num_written: int, num_wanted: int | None) -> float:
        """Tokens that an answer still has to come, 1 at least.

        Args:
            num_written: those it has.
            num_wanted: those it may have; None: as many as it likes.
        """
        end = math.inf if num_wanted is None else float(num_wanted)
        share = self._shares[bisect_right(self._lengths, num_written) - 1]
        if share <= 0.0:  # longer than any before: as long again
            return max(1.0, min(end - num_written, num_written))
        return max(1.0, (self._area(end) - self._area(num_written)) / share)

    def _area(self, length: float) -> float:
        """Tokens that an answer has among its first `length`, on average."""
        seen = min(length, self._longest)
        at = bisect_right(self._lengths, seen) - 1
        beyond = self._longest * (1 - math.exp((seen - length) / self._longest))
        return self._areas[at] + (seen - self._lengths[at] + beyond) * self._shares[at]

    def _learn(self) -> None:
        """Which share of answers is longer than each length at which one ended, and the sums of these."""
        num_left, share = len(self._ended), 1.0
        self._lengths, self._shares = [0.0], [1.0]
        self._longest = max(1.0, *(length for length, _ in self._ended))
        for length, was_cut in sorted(self._ended):
            if not was_cut:
                share *= 1 - 1 / num_left
                self._lengths.append(length)
                self._shares.append(share)
            num_left -= 1
        gaps = (b - a for a, b in pairwise(self._lengths))
        self._areas = list(accumulate(map(mul, gaps, self._shares), initial=0.0))


@dataclass(slots=True, eq=False)
class WorkLeft:
    """What a sequence still has to compute: tokens of its prompt, then tokens of its answer.

    Two are never equal: jobs of one batch often have as much left as each other.
    """

    num_prompt: float
    num_tokens: float
    is_background: bool = False


class StepTimes(Protocol):
    """How steps are filled, and how long they take now."""

    def step_s(self, num_tokens: float) -> float:
        """Seconds of a step over so many tokens."""
        ...

    def prompt_tokens(self, num_rows: int, num_prompts: int) -> float:
        """Tokens that so many prompts of people get in a step beside so many of their rows."""
        ...

    def background_prompt_tokens(self, num_rows: int) -> float:
        """Tokens that prompts of jobs get in a step beside so many of their rows, without people."""
        ...

    def background_share(self) -> float:
        """Part of their time that people's steps give to jobs."""
        ...

    def beside_people(self, work_s: float, now_s: float) -> float:
        """Seconds that jobs take from `now_s` on for work of `work_s`, as people come unannounced."""
        ...


def starts_s(
    running: SequenceOf[WorkLeft], waiting: SequenceOf[WorkLeft], num_places: int, times: StepTimes
) -> list[float]:
    """Seconds until each waiting one runs, in order of the queue: people before jobs.

    Args:
        running: what runs, the oldest first; changed.
        waiting: what waits, next first; changed.
        num_places: sequences that run at once.
        times: of steps.
    """
    now_s, starts, active, queue = 0.0, [], list(running), deque(waiting)
    parked: deque[WorkLeft] = deque()
    while queue:
        while queue and _make_place(queue[0], active, parked, num_places):
            active.append(queue.popleft())
            starts.append(now_s)
        while parked and len(active) < num_places and (not queue or queue[0].is_background):
            active.append(parked.popleft())
        if queue:
            now_s += _advance(active, times, now_s)
            active = [work for work in active if work.num_prompt > 0 or work.num_tokens > 0]
    return starts


def _make_place(head: WorkLeft, active: list[WorkLeft], parked: deque[WorkLeft], num_places: int) -> bool:
    """Whether there is a slot for the head of the queue; for a person the youngest job is parked."""
    if len(active) < num_places:
        return not (head.is_background and parked)
    jobs = [work for work in active if work.is_background]
    if head.is_background or not jobs:
        return False
    active.remove(jobs[-1])
    parked.appendleft(jobs[-1])
    return True


def _advance(active: list[WorkLeft], times: StepTimes, now_s: float) -> float:
    """Compute until one of these has its prompt or its answer; returns the seconds it took."""
    people = [work for work in active if not work.is_background]
    jobs = [work for work in active if work.is_background]
    if people:
        rows, prompts = _split(people)
        num_prompt = min(times.prompt_tokens(len(rows), len(prompts)), sum(w.num_prompt for w in prompts))
        step_s = times.step_s(len(rows) + num_prompt)
        speeds = _speeds(rows, prompts, num_prompt)
        if jobs:
            rows, prompts = _split(jobs)
            extra_s = times.background_share() * step_s
            token_s = (times.step_s(len(people) + num_prompt + len(jobs)) - step_s) / len(jobs)
            num_tokens = extra_s / token_s if token_s > 0 else float(len(jobs))
            for_rows = min(1.0, num_tokens / len(rows)) if rows else 0.0
            num_prompt = min(num_tokens - for_rows * len(rows), sum(w.num_prompt for w in prompts))
            speeds += _speeds(rows, prompts, num_prompt, for_rows)
            step_s += extra_s
    else:
        rows, prompts = _split(jobs)
        num_prompt = min(times.background_prompt_tokens(len(rows)), sum(w.num_prompt for w in prompts))
        step_s = times.step_s(len(rows) + num_prompt)
        speeds = _speeds(rows, prompts, num_prompt)
    num_steps = min((work.num_prompt or work.num_tokens) / speed for work, speed in speeds if speed > 0)
    for work, speed in speeds:
        if work.num_prompt > 0:
            work.num_prompt = _less(work.num_prompt, num_steps * speed)
        else:
            work.num_tokens = _less(work.num_tokens, num_steps * speed)
    return num_steps * step_s if people else times.beside_people(num_steps * step_s, now_s)


def _split(works: list[WorkLeft]) -> tuple[list[WorkLeft], list[WorkLeft]]:
    """Those that write, and those whose prompt is read."""
    return [w for w in works if w.num_prompt <= 0], [w for w in works if w.num_prompt > 0]


def _speeds(
    rows: list[WorkLeft], prompts: list[WorkLeft], num_prompt: float, for_rows: float = 1.0
) -> list[tuple[WorkLeft, float]]:
    """Tokens that each gets in a step."""
    each = num_prompt / len(prompts) if prompts else 0.0
    return [(work, for_rows) for work in rows] + [(work, each) for work in prompts]


def _less(tokens: float, done: float) -> float:
    """What is left; a rest of rounding is nothing."""
    return 0.0 if math.isclose(tokens, done) else tokens - done


class EtaEstimator:
    """Learns the pace and how long answers are; see the module.

    Args:
        cost: of steps on a quiet machine.
        budget: how steps are filled.
        num_slots: sequences that run at once.

    Attributes:
        num_places: as many of these as have room now.
        people: who are not there yet and expected.
    """

    def __init__(self, cost: StepCost, budget: StepBudget, num_slots: int) -> None:
        self.num_places = num_slots
        self.people = People()
        self._cost = cost
        self._budget = budget
        self._num_slots = num_slots
        self._pace = Pace()
        self._lengths = {False: AnswerLengths(), True: AnswerLengths()}
        self._new_share = 1.0
        self._service_s = MIN_RETRY_AFTER_S

    def __repr__(self) -> str:
        return f"<EtaEstimator {self._pace!r} people {self._lengths[False]!r} jobs {self._lengths[True]!r}>"

    # ------------------------------------------------------------ what is measured

    def stepped(self, num_tokens: int, took_s: float) -> None:
        """From one step to the next it took so long."""
        self._pace.stepped(took_s, self._quiet_s(num_tokens) or 0.0)

    def note_end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence that ran has ended."""
        started_s = sequence.arrival_s if sequence.started_s is None else sequence.started_s
        self._service_s += FOLLOW_ANSWERS * ((now - started_s) / self._num_slots - self._service_s)
        self._lengths[sequence.is_background].note(sequence.num_generated, reason)
        new_share = 1.0 - (sequence.num_cached or 0) / max(1, sequence.num_prompt)
        self._new_share += FOLLOW_ANSWERS * (new_share - self._new_share)

    # ------------------------------------------------------------ what follows

    def retry_after_s(self) -> float:
        """Seconds after which a refused caller may try again: the time of an answer, over the slots."""
        return max(MIN_RETRY_AFTER_S, self._service_s)

    def wait_s(
        self, running: SequenceOf[Sequence], waiting: SequenceOf[Sequence], position: int
    ) -> float | None:
        """Seconds until one position runs; None: no step was measured yet."""
        return self.waits_s(running, waiting[: position + 1])[position]

    def waits_s(self, running: SequenceOf[Sequence], waiting: SequenceOf[Sequence]) -> list[float | None]:
        """Seconds until each queued one runs; far back roughly, as arrivals must not cost much."""
        if self._cost.predict(1) is None:
            return [None] * len(waiting)
        close = [self._work(sequence) for sequence in waiting[:CLOSE_POSITIONS]]
        starts = starts_s([self._work(sequence) for sequence in running], close, self.num_places, self)
        each_s = starts[-1] / len(starts) if starts else 0.0
        return [*starts, *(each_s * (at + 1) for at in range(len(starts), len(waiting)))]

    def arrival_s(self, running: SequenceOf[Sequence], waiting: SequenceOf[Sequence]) -> float | None:
        """Seconds until one more person would run, behind those who wait; None: nothing was measured yet."""
        if self._cost.predict(1) is None:
            return None
        people = [sequence for sequence in waiting if not sequence.is_background]
        close = [self._work(sequence) for sequence in people[:CLOSE_POSITIONS]]
        close.append(WorkLeft(1.0, self._lengths[False].left(0, None)))
        starts = starts_s([self._work(sequence) for sequence in running], close, self.num_places, self)
        return starts[-1] * max(1.0, (len(people) + 1) / len(close))

    def _work(self, sequence: Sequence) -> WorkLeft:
        num_prompt: float = sequence.num_pending
        if sequence.state is SequenceState.QUEUED and sequence.shares:
            num_prompt *= self._new_share
        elif sequence.state is SequenceState.DECODE:
            num_prompt = 0.0
        lengths = self._lengths[sequence.is_background]
        num_left = lengths.left(sequence.num_generated, sequence.num_wanted)
        return WorkLeft(num_prompt, num_left, sequence.is_background)

    # ------------------------------------------------------------ `StepTimes`

    def _quiet_s(self, num_tokens: float) -> float | None:
        """Seconds of such a step on a quiet machine."""
        return self._cost.predict_few(num_tokens, FEW_TOKENS)

    def step_s(self, num_tokens: float) -> float:
        """Seconds of a step over so many tokens, now."""
        return (self._quiet_s(num_tokens) or 0.0) * self._pace.times

    def prompt_tokens(self, num_rows: int, num_prompts: int) -> float:
        """Tokens that prompts of people get in a step."""
        return max(num_prompts, self._budget.prefill(num_rows, num_prompts))  # each gets one at least

    def background_prompt_tokens(self, num_rows: int) -> float:
        """Tokens that prompts of jobs get in a step without people."""
        return max(1, self._budget.background(0, has_decoding=False) - num_rows)

    def beside_people(self, work_s: float, now_s: float) -> float:
        """Seconds that jobs take for their work beside the people to come."""
        speed = 1.0 - (1.0 - self.background_share()) * self.people.share
        slow_s = max(0.0, self.people.lasts_s - now_s)
        return work_s / speed if work_s <= slow_s * speed else work_s + slow_s * (1.0 - speed)

    def background_share(self) -> float:
        """Part of their time that people's steps give to jobs: more where the policy is another."""
        return BACKGROUND_SHARE if self._budget.policy is Policy.LATENCY else 1.0
