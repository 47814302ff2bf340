"""When a waiting sequence may run (SPEC Q14), and when a refused caller may try again (SPEC Q11).

Estimates from measured times: answers may end early, and later arrivals are not known.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceOf

from stoker.kv.sequence import Sequence
from stoker.scheduler.cost import StepCost


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
FOLLOW = 0.2

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
        self._answer_tokens += FOLLOW * (sequence.num_generated - self._answer_tokens)
        self._service_s += FOLLOW * ((now - started_s) / self._num_slots - self._service_s)

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
