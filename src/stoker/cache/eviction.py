"""What to give up first when the cache is full (SPEC C7).

Pure: an entry's figures in, a choice out. The caller leaves leased entries out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")

# A token saved for background is worth half of one saved for an interactive request.
BACKGROUND_WEIGHT = 0.5
# Idle times are told apart from about here on: an entry used this second and one used ten seconds ago
# differ by their size and tokens, one used two minutes ago counts a third. About the time a person takes
# to read an answer and ask again.
SETTLING_S = 60.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """The figures of an entry that could go.

    Attributes:
        num_saved: tokens that have to be computed again when only this entry goes.
        size_bytes: bytes freed when it goes.
        idle_s: seconds since it was last used.
        is_background: whether only background asked for it.
    """

    num_saved: int
    size_bytes: int
    idle_s: float
    is_background: bool


def keep_value(candidate: Candidate) -> float:
    """What keeping an entry is worth: weighted tokens saved, a byte and a second of idleness.

    weight of the class * num_saved / size_bytes / (idle_s + `SETTLING_S`). Least recently used decides
    among entries that save alike; one that saves twice as much a byte may be idle twice as long. An entry
    that others make superfluous (`num_saved` 0) is worth nothing however fresh.
    """
    weight = BACKGROUND_WEIGHT if candidate.is_background else 1.0
    idle_s = max(0.0, candidate.idle_s)
    return weight * candidate.num_saved / max(1, candidate.size_bytes) / (idle_s + SETTLING_S)


Worth: TypeAlias = tuple[float, ...]


def worth(candidate: Candidate) -> Worth:
    """By this entries are ordered, the one to go first: least value, longest idle, largest."""
    return keep_value(candidate), -candidate.idle_s, -candidate.size_bytes


def victim(candidates: Iterable[tuple[T, Candidate]]) -> T | None:
    """The entry worth least; among equals the longest idle, then the larger, then the first named."""
    chosen = min(candidates, key=lambda named: worth(named[1]), default=None)
    return None if chosen is None else chosen[0]


class VictimRanking(Generic[T]):
    """Which of many entries goes first, asked again and again: each answer costs a few steps of a heap.

    The worth of an entry is looked at again before it is named. So an entry may become worth more, or stay,
    without being entered again; not so one that becomes worth less, or may go only now.

    Args:
        entries: of which one is to go.
        worth_of: what an entry is worth now; None: it may not go.
    """

    def __init__(self, entries: Iterable[T], worth_of: Callable[[T], Worth | None]) -> None:
        self._worth_of = worth_of
        self._number = count()  # entries are not compared with each other
        worths = ((worth_of(entry), entry) for entry in entries)
        self._heap = [(known, next(self._number), entry) for known, entry in worths if known is not None]
        heapq.heapify(self._heap)

    def __repr__(self) -> str:
        return f"<VictimRanking of {len(self._heap)}>"

    def enter(self, entry: T) -> None:
        """It is worth less than before, or may go now."""
        if (known := self._worth_of(entry)) is not None:
            heapq.heappush(self._heap, (known, next(self._number), entry))

    def least(self) -> T | None:
        """The entry worth least; None: none may go."""
        while self._heap:
            known, number, entry = self._heap[0]
            current = self._worth_of(entry)
            if current is None:
                heapq.heappop(self._heap)
            elif current > known:
                heapq.heapreplace(self._heap, (current, number, entry))
            else:
                return entry
        return None
