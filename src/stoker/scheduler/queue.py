"""The queue of a model: which sequence is next (SPEC Q2, Q5, Q6, Q11).

Pure order over sequences without a slot. Parked sequences stand before newcomers of their class, so that
cells freed for them are not taken by a later arrival. Paused ones are not queued.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from stoker.ipc.request import Priority, check_queue
from stoker.kv.sequence import Sequence, SequenceState


def insert_position(queue: SequenceOf[Priority], newcomer: Priority) -> int:
    """Where `newcomer` goes: background to the end, interactive before the first waiting background."""
    if newcomer is Priority.BACKGROUND:
        return len(queue)
    return next((at for at, waiting in enumerate(queue) if waiting is Priority.BACKGROUND), len(queue))


class RequestQueue:
    """Sequences without a slot, in the order they will get one."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self._sequences: list[Sequence] = []

    def __repr__(self) -> str:
        return f"<RequestQueue {len(self._sequences)} of {self.max_queue}>"

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def check_queue(self, priority: Priority, num_waiting: int, retry_after_s: float) -> None:
        """Raises QueueFullError when `num_waiting` requests are at the bound of the class."""
        check_queue(self.max_queue, priority, num_waiting, retry_after_s)

    def push(self, sequence: Sequence) -> int:
        """Enter at the place of its class; returns the position."""
        at = insert_position([waiting.priority for waiting in self._sequences], sequence.priority)
        self._sequences.insert(at, sequence)
        return at

    def rejoin(self, sequence: Sequence) -> int:
        """Come back before later arrivals, parked ones before all newcomers; returns the position."""
        place = self._place(sequence)
        at = next(
            (at for at, waiting in enumerate(self._sequences) if self._place(waiting) > place),
            len(self._sequences),
        )
        self._sequences.insert(at, sequence)
        return at

    @staticmethod
    def _place(sequence: Sequence) -> tuple[bool, bool, float, int]:
        is_newcomer = sequence.state is not SequenceState.PARKED
        return sequence.is_background, is_newcomer, sequence.arrival_s, sequence.key.index

    def remove(self, sequence: Sequence) -> None:
        """Leave the queue."""
        self._sequences.remove(sequence)
