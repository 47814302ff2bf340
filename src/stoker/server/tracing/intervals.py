"""How long a request, or each choice of it, was in which state: its moves as intervals of time. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.ipc.status import RequestMove


class Interval(NamedTuple):
    """The time from a move to the next one of the same choice, in seconds since the epoch."""

    move: RequestMove
    ended_at: float

    @property
    def length_s(self) -> float:
        """Seconds; not negative where a clock was set back."""
        return max(0.0, self.ended_at - self.move.at)


def intervals(moves: Sequence[RequestMove], ended_at: float) -> list[Interval]:
    """The intervals of a request that has ended, in order of their begin.

    A move of all choices begins an interval of all; it lasts until the last choice has left it, which is the
    last first move of one.

    Args:
        moves: the oldest first.
        ended_at: when the request ended.
    """
    found: list[Interval] = []
    open_moves: dict[int | None, RequestMove] = {}
    left_at: float | None = None  # when a choice last left what all of them were in

    def close(index: int | None, at: float) -> None:
        move = open_moves.pop(index, None)
        if move is not None:
            found.append(Interval(move, max(move.at, at)))

    def close_all(at: float) -> None:
        for index in list(open_moves):
            close(index, left_at if index is None and left_at is not None else at)

    for move in moves:
        if move.index is None:
            close_all(move.at)
            left_at = None
        else:
            if move.index not in open_moves and None in open_moves:
                left_at = move.at
            close(move.index, move.at)
        open_moves[move.index] = move
    close_all(ended_at)
    return sorted(found, key=lambda each: (each.move.at, each.ended_at))
