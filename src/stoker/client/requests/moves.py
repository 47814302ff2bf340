"""Where each choice of a request is, and what the request went through: its moves, for status and events.

Owns the states that people are shown. What an engine is given again follows from `record` and `replay`.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from stoker.ipc.events import (
    Admitted,
    Parked,
    Paused,
    Preparing,
    Queued,
    RequestEvent,
    Resumed,
    Waiting,
)
from stoker.ipc.status import RequestMove

LOADING = "its model is being loaded"
NEXT_STEP = "waits for the next step"
MAX_MOVES = 64
"""Moves that a request remembers; past this the oldest goes."""


class ShownState(StrEnum):
    """What people are shown of a request, or of a choice of it."""

    HELD = "held"
    PREPARING = "preparing"
    QUEUED = "queued"
    PREFIX_WAIT = "prefix_wait"
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"
    PAUSED = "paused"
    ENDED = "ended"


FURTHEST = (
    ShownState.DECODE,
    ShownState.PREFILL,
    ShownState.PARKED,
    ShownState.PREFIX_WAIT,
    ShownState.QUEUED,
)
"""Of several choices the state of the one that is furthest counts."""
_WAITS = frozenset(ShownState) - {ShownState.PREFILL, ShownState.DECODE, ShownState.ENDED}
_IN_SLOT = frozenset({ShownState.PREFILL, ShownState.DECODE})


class RequestMoves:
    """The moves of one request of `num_choices` choices."""

    __slots__ = ("_latest", "_moves", "_num_choices", "num_moves")

    def __init__(self, num_choices: int) -> None:
        self.num_moves = 0
        self._num_choices = num_choices
        self._moves: deque[RequestMove] = deque(maxlen=MAX_MOVES)
        self._latest: dict[int, RequestMove] = {}

    def __repr__(self) -> str:
        return f"<RequestMoves {self.num_moves}, {self.state}>"

    # ------------------------------------------------------------ questions

    @property
    def listed(self) -> list[RequestMove]:
        """The last ones, the oldest first."""
        return list(self._moves)

    @property
    def state(self) -> ShownState:
        """Of the choice that is furthest."""
        states = {move.state for move in self._latest.values()}
        for state in FURTHEST:
            if state in states:
                return state
        return ShownState(self._moves[-1].state) if self._moves else ShownState.HELD

    @property
    def waits_for(self) -> str:
        """Why it does not compute; empty: a choice of it does, or it has ended."""
        return self.wait.reason if self.wait else ""

    @property
    def wait(self) -> RequestMove | None:
        """The move since which it does not compute; None: a choice of it does, or it has ended."""
        state = self.state
        if state not in _WAITS:
            return None
        return next((move for move in reversed(self._moves) if move.state == state), None)

    @property
    def _is_on_its_way(self) -> bool:
        """Whether no queue of its model has it."""
        return self.state in {ShownState.HELD, ShownState.PREPARING} or self.waits_for == LOADING

    @property
    def in_slots(self) -> list[RequestMove]:
        """The latest moves of the choices that compute."""
        return [move for move in self._latest.values() if move.state in _IN_SLOT]

    def is_writing(self, index: int) -> bool:
        """Whether a choice has had a token since it got its slot."""
        latest = self._latest.get(index)
        return latest is not None and latest.state == ShownState.DECODE

    # ------------------------------------------------------------ what happens

    def take(self, event: RequestEvent, at: float) -> RequestMove | None:
        """The move that an engine's event means; None: it means none."""
        state, reason = "", ""
        match event:
            case Waiting() | Admitted() | Parked():
                return self._one_moves(_move_of(event, at))
            case Preparing():
                state, reason = ShownState.PREPARING, "its model is ready"
            case Queued() if event.awaits_model:
                state, reason = ShownState.QUEUED, LOADING
            case Queued() if self._is_on_its_way:
                state, reason = ShownState.QUEUED, NEXT_STEP
            case Paused():
                state, reason = ShownState.PAUSED, "asked to"
            case Resumed():
                state, reason = ShownState.QUEUED, "resumed"
        return self.all_move(ShownState(state), at, reason) if state else None

    def writes(self, index: int, at: float) -> RequestMove | None:
        """A choice has got a token; None: it had one before, in its slot."""
        if self.is_writing(index):
            return None
        latest = self._latest.get(index)
        slot = None if latest is None else latest.slot
        return self._one_moves(RequestMove(at=at, state=ShownState.DECODE, index=index, slot=slot))

    def choice_ends(self, index: int, at: float, reason: str) -> RequestMove | None:
        """One choice of several has ended."""
        if self._num_choices == 1:
            return None  # the request ends with it
        return self._one_moves(RequestMove(at=at, state=ShownState.ENDED, index=index, reason=reason))

    def all_move(
        self, state: ShownState, at: float, reason: str, by: str | None = None
    ) -> RequestMove | None:
        """Every choice that has not ended; None: they were there for that reason."""
        last = self._moves[-1] if self._moves else None
        if last is not None and (last.index, last.state, last.reason) == (None, state, reason):
            return None
        move = RequestMove(at=at, state=state, reason=reason, by=by)
        for index in range(self._num_choices):
            if index not in self._latest or self._latest[index].state != ShownState.ENDED:
                self._latest[index] = move
        return self._note(move)

    def _one_moves(self, move: RequestMove) -> RequestMove | None:
        assert move.index is not None, f"{move} is of no choice"
        before = self._latest.get(move.index)
        if before is not None and before.state == ShownState.ENDED:
            return None
        self._latest[move.index] = move
        return self._note(move)

    def _note(self, move: RequestMove) -> RequestMove:
        self._moves.append(move)
        self.num_moves += 1
        return move


def _move_of(event: Waiting | Admitted | Parked, at: float) -> RequestMove:
    """What it means for the choice that it is of."""
    match event:
        case Admitted():
            state, slot, by = ShownState.PREFILL, event.slot, None
        case Parked():
            state, slot, by = ShownState.PARKED, None, event.by
        case Waiting():
            state, slot, by = (
                ShownState.PREFIX_WAIT if event.is_for_prefix else ShownState.QUEUED,
                None,
                event.by,
            )
    return RequestMove(at=at, state=state, index=event.index, slot=slot, reason=event.reason, by=by)
