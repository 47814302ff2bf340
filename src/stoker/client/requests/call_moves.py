"""What a call of several requests goes through: as its foremost request does, in order of submission.

A call whose requests are computed one after the other does not wait between two of them: it leaves the
computing states only when a request says that it waits, and none computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.client.requests.moves import FURTHEST, NEXT_STEP, RequestMoves, ShownState

if TYPE_CHECKING:
    from stoker.ipc.status import RequestMove

_COMPUTES = frozenset({ShownState.PREFILL, ShownState.DECODE})
_SHORT = frozenset({ShownState.PREPARING})
"""States in which a request is for a moment only, on its way to the next."""
_RANKS = {state: rank for rank, state in enumerate(FURTHEST)}


class CallMoves:
    """The moves of one call, which begins now.

    Args:
        at: seconds since the epoch.
    """

    __slots__ = ("_members", "_own")

    def __init__(self, at: float) -> None:
        self._own = RequestMoves(1)
        self._own.all_move(ShownState.PREPARING, at, "")
        self._members: dict[str, RequestMoves] = {}

    def __repr__(self) -> str:
        return f"<CallMoves {self.state} of {len(self._members)} requests>"

    @property
    def state(self) -> ShownState:
        """Where it is."""
        return self._own.state

    @property
    def waits_for(self) -> str:
        """Why it does not compute; empty: it does, or has ended."""
        return self._own.waits_for

    @property
    def listed(self) -> list[RequestMove]:
        """The last ones, the oldest first."""
        return self._own.listed

    @property
    def num_moves(self) -> int:
        """How many there were."""
        return self._own.num_moves

    def member_moved(self, request_id: str, member: RequestMoves, move: RequestMove) -> RequestMove | None:
        """One of its requests has moved; returns the move of the call, None: it is where it was."""
        self._members[request_id] = member
        foremost = min(self._members.values(), key=lambda one: _RANKS.get(one.state, len(_RANKS)))
        state, wait = foremost.state, foremost.wait
        if wait is not None:
            is_on = self.state in _COMPUTES and _is_short(move)
            return None if is_on else self._own.all_move(state, move.at, wait.reason, wait.by)
        return None if state == self.state else self._own.all_move(state, move.at, move.reason, move.by)

    def member_ended(self, request_id: str) -> None:
        """One of its requests has ended: where the call is follows from the next move of another."""
        self._members.pop(request_id, None)

    def all_move(self, state: ShownState, at: float, reason: str) -> RequestMove | None:
        """The call as a whole is there; None: it was, for that reason."""
        return self._own.all_move(state, at, reason)


def _is_short(move: RequestMove) -> bool:
    """Whether a request that moves so is computed soon, if nothing comes between."""
    return move.state in _COMPUTES | _SHORT or move.reason == NEXT_STEP
