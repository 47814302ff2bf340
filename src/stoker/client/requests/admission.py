"""Whether one more request may wait, decided in the client (SPEC Q11).

The engine decides last, but it reads its inbox only between two steps; here a full queue is refused at once.
Owns how fast the requests of each model end, which `Retry-After` is computed from. Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.ipc.request import check_queue, queue_bound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.client.requests.record import RequestRecord
    from stoker.ipc.request import GenerateRequest

MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0
"""Past this the past says little about when a place is free."""
SMOOTHING = 0.2
"""Weight of the newest interval in the mean."""


def num_waiting(live: Iterable[RequestRecord], model: str, num_slots: int) -> int:
    """How many requests of `model` wait or are paused, less those that a free slot will take at once.

    Args:
        live: every live request.
        model: id of the model.
        num_slots: choices that the model runs at once.
    """
    mine = [one for one in live if one.request.model == model]
    num_free = max(0, num_slots - sum(one.num_running for one in mine))
    return max(0, sum(one.is_waiting for one in mine) - num_free)


@dataclass(slots=True)
class _Ends:
    """How fast the requests of one model end, as long as there are any.

    `since_s` is the last end, or the arrival that ended an idle time; `interval_s` 0: not known yet.
    """

    since_s: float
    num_live: int = 0
    interval_s: float = 0.0

    def ended(self, now: float) -> None:
        took_s = now - self.since_s
        self.interval_s += (SMOOTHING if self.interval_s else 1.0) * (took_s - self.interval_s)
        self.since_s = now
        self.num_live -= 1

    def next_s(self, now: float) -> float:
        """Seconds between two ends; what has passed since the last one is a lower bound."""
        return max(self.interval_s, now - self.since_s)


class Admission:
    """The bound on waiting requests, per model and class.

    Args:
        max_queue: requests of a model that may wait; background is refused at half of it.
    """

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._ends: dict[str, _Ends] = {}

    def __repr__(self) -> str:
        return f"<Admission {self._max_queue} {self._ends}>"

    def check(self, request: GenerateRequest, num_waiting: int, now: float) -> None:
        """Refuse a newcomer that finds the queue at the bound of its class.

        Args:
            request: the newcomer.
            num_waiting: what `num_waiting` counts for its model.
            now: seconds on the clock of `arrived` and `ended`.

        Raises:
            QueueFullError: `retry_after_s` is when enough will have ended, 1 s at least.
        """
        num_over = num_waiting - queue_bound(self._max_queue, request.priority) + 1
        ends = self._ends.get(request.model)
        retry_s = num_over * ends.next_s(now) if ends else 0.0
        retry_s = min(max(retry_s, MIN_RETRY_S), MAX_RETRY_S)
        check_queue(self._max_queue, request.priority, num_waiting, retry_s)

    def arrived(self, model: str, now: float) -> None:
        """A request was taken in."""
        ends = self._ends.setdefault(model, _Ends(now))
        if ends.num_live == 0:
            ends.since_s = now  # nothing ran meanwhile: that time says nothing
        ends.num_live += 1

    def ended(self, model: str, now: float) -> None:
        """One of them ended, however it did."""
        self._ends[model].ended(now)
