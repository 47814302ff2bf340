"""What to give up first when the cache is full (SPEC C7).

Pure: an entry's figures in, a choice out. The caller leaves leased entries out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

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


def victim(candidates: Iterable[tuple[T, Candidate]]) -> T | None:
    """The entry worth least; among equals the longest idle, then the larger, then the first named."""
    chosen = min(
        candidates,
        key=lambda named: (keep_value(named[1]), -named[1].idle_s, -named[1].size_bytes),
        default=None,
    )
    return None if chosen is None else chosen[0]
