"""What the client itself knows of its engine: while that computes a long step, and over its ends.

Owns the shape in which slots and waiting requests are shown from the client's records. What the engine says
of itself is `engine.runners.status`'s.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from stoker.client.requests.record import RequestRecord, Stage
from stoker.ipc.status import EngineStatus, RequestStatus, SlotStatus, WaitStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NO_STATUS = EngineStatus(slots=[], queue=[], parked=[], counters={}, kv_cells_total=0, kv_cells_used=0)


def known_status(
    records: Iterable[RequestRecord], slots: Mapping[str, int], last: EngineStatus, now: float
) -> EngineStatus:
    """An engine that does not answer, as its last status and the live requests tell of it.

    Args:
        records: of the live requests, in order of submission.
        slots: how many each model has that is in memory, by its id.
        last: what the engine said last.
        now: on the clock of the records.
    """
    live = [record for record in records if not record.is_held]
    running = [record for record in live for _ in range(record.num_running)]
    parked = [record for record in live if record.parked]
    paused = [record for record in live if record.stage is Stage.PAUSED]
    waiting = [record for record in live if record.is_waiting and record.stage is not Stage.PAUSED]
    shown = [_slot(at, record.status(now)) for at, record in enumerate(running)]
    busy = Counter(slot.model for slot in shown)
    for model, count in slots.items():
        for _ in range(count - busy[model]):
            shown.append(SlotStatus(id=len(shown), state="idle", model=model, num_tokens=0))
    return msgspec.structs.replace(
        last,
        slots=shown,
        queue=[_waiting(record.status(now), at) for at, record in enumerate(waiting)],
        parked=[_waiting(record.status(now), None) for record in parked],
        paused=[_waiting(record.status(now), None) for record in paused],
    )


def _slot(at: int, request: RequestStatus) -> SlotStatus:
    return SlotStatus(
        id=at,
        state=request.state,
        model=request.model,
        num_tokens=request.processed_tokens + request.completion_tokens,
        request_id=request.request_id,
        priority=request.priority,
    )


def _waiting(request: RequestStatus, position: int | None) -> WaitStatus:
    return WaitStatus(
        request_id=request.request_id,
        priority=request.priority,
        model=request.model,
        position=position,
        eta_s=None if position is None else request.eta_s,
        num_tokens=request.prompt_tokens + request.completion_tokens,
    )
