"""What the client itself knows of its engine: while that computes a long step, and over its ends.

Owns the shape in which slots and waiting requests are shown from the client's records. What the engine says
of itself is `engine.runners.status`'s.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stoker.client.requests.record import RequestRecord, Stage
from stoker.ipc.status import EngineStatus, RequestMove, RequestStatus, SlotStatus, WaitStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_IDLE = "idle"
NO_STATUS = EngineStatus(slots=[], queue=[], parked=[], counters={}, kv_cells_total=0, kv_cells_used=0)


def known_status(
    records: Iterable[RequestRecord], slots: Mapping[str, int], last: EngineStatus, now: float
) -> EngineStatus:
    """An engine that does not answer, or is away, as its last status and the live requests tell of it.

    Args:
        records: of the live requests, in order of submission.
        slots: how many each model has that is in memory, by its id.
        last: what the engine said last.
        now: on the clock of the records.
    """
    live = list(records)
    parked = [record for record in live if record.parked]
    paused = [record for record in live if record.is_at_rest or record.stage is Stage.PAUSED]
    waiting = [record for record in live if record.is_waiting and record not in paused]
    shown = [_slot(lane, now) for lane in lanes(live, slots)]
    return msgspec.structs.replace(
        last,
        slots=shown,
        queue=[_waiting(record.status(now), at) for at, record in enumerate(waiting)],
        parked=[_waiting(record.status(now), None) for record in parked],
        paused=[_waiting(record.status(now), None) for record in paused],
    )


class SlotLane(NamedTuple):
    """A slot of a model, and what is in it: a choice of a request that computes; None: nothing."""

    model: str
    slot: int
    record: RequestRecord | None = None
    move: RequestMove | None = None

    def document(self) -> dict[str, Any]:
        """As events show it."""
        move = self.move
        return {
            "slot": self.slot,
            "model": self.model,
            "request_id": self.record.request_id if self.record else None,
            "index": move.index if move else None,
            "state": move.state if move else _IDLE,
        }


def lanes(records: Iterable[RequestRecord], slots: Mapping[str, int]) -> list[SlotLane]:
    """Every slot of the models in memory, by model and number; of spare ones those that are busy.

    Args:
        records: of the live requests.
        slots: how many each model has that is in memory, by its id.
    """
    busy: dict[str, dict[int, SlotLane]] = {model: {} for model in slots}
    for record in records:
        model = record.request.model
        for move in record.moves.in_slots if model in busy else ():
            if move.slot is not None:
                busy[model][move.slot] = SlotLane(model, move.slot, record, move)
    found: list[SlotLane] = []
    for model, taken in busy.items():
        free = (slot for slot in count() if slot not in taken)
        idle = [SlotLane(model, next(free)) for _ in range(slots[model] - len(taken))]
        found += sorted([*taken.values(), *idle], key=lambda lane: lane.slot)
    return found


def _slot(lane: SlotLane, now: float) -> SlotStatus:
    if lane.record is None or lane.move is None:
        return SlotStatus(id=lane.slot, state=_IDLE, model=lane.model, num_tokens=0)
    request = lane.record.status(now)
    return SlotStatus(
        id=lane.slot,
        state=lane.move.state,
        model=request.model,
        num_tokens=request.processed_tokens + request.completion_tokens,
        request_id=request.request_id,
        priority=request.priority,
        index=lane.move.index,
    )


def _waiting(request: RequestStatus, position: int | None) -> WaitStatus:
    return WaitStatus(
        request_id=request.request_id,
        priority=request.priority,
        model=request.model,
        position=position,
        eta_s=None if position is None else request.eta_s,
        num_tokens=request.prompt_tokens + request.completion_tokens,
        reason=request.waits_for,
    )
