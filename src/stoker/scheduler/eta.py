"""When a waiting sequence may run (SPEC Q14): pure arithmetic over what runs and who waits.

An estimate: answers may end early, and nobody knows who arrives meanwhile.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Line


def waits_s(running: Line[float], waiting: Line[float], num_slots: int) -> list[float]:
    """Seconds until each waiter gets a slot, in order of the line.

    Args:
        running: seconds each running sequence still needs.
        waiting: seconds each waiter will need once it runs.
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
