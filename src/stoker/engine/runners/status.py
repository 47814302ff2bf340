"""Models, slots and queues as status shows them, with each sequence's story (SPEC K7, Q14, I4)."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from stoker.engine.jobs.table import Place, places
from stoker.ipc.status import ModelStatus, SlotStatus, WaitStatus
from stoker.kv.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.engine.residency.catalogue import ServedModel
    from stoker.engine.runners.runner import ModelRunner
    from stoker.ipc.status import StreamingStatus
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.scheduler import Scheduler


def model_status(
    served: ServedModel, leases: int, now: float, streaming: StreamingStatus | None = None
) -> ModelStatus:
    """A served model as it is now."""
    due_s = None if leases else served.due_s()
    return ModelStatus(
        id=served.spec.id,
        state=served.life,
        stage=served.stage,
        fraction=served.fraction,
        bytes=dict(served.size),
        is_pinned=served.is_pinned,
        leases=leases,
        keep_alive_s=served.keep_alive_s,
        unload_in_s=None if due_s is None else max(0.0, due_s - now),
        degraded=list(served.degraded),
        reason=served.reason,
        streaming=streaming,
    )


def slot_status(scheduler: Scheduler, model: str, now: float) -> list[SlotStatus]:
    """Each slot as it is now, by the places that sequences take up."""
    shown = scheduler.slots.shown()
    taken = {slot.sequence.place for slot in shown if slot.sequence is not None}
    free = (place for place in count() if place not in taken)
    found = [
        SlotStatus(
            id=next(free) if slot.sequence is None else slot.sequence.place,
            state="idle" if slot.sequence is None else slot.sequence.state,
            model=model,
            num_tokens=len(slot.kept) if slot.sequence is None else slot.sequence.num_computed,
            request_id=None if slot.sequence is None else slot.sequence.key.request_id,
            priority=None if slot.sequence is None else slot.sequence.priority,
            story=[] if slot.sequence is None else _story(slot.sequence, now),
            index=None if slot.sequence is None else slot.sequence.key.index,
            others=[] if slot.sequence is None else list(slot.sequence.others),
        )
        for slot in shown
    ]
    return sorted(found, key=lambda status: status.id)


def waiting_status(runners: Iterable[ModelRunner], now: float) -> dict[SequenceState, list[WaitStatus]]:
    """Queued, parked and paused sequences of all queues by state, each queue's next first."""
    found: dict[SequenceState, list[WaitStatus]] = {
        state: [] for state in (SequenceState.QUEUED, SequenceState.PARKED, SequenceState.PAUSED)
    }
    for runner in runners:
        for queue in runner.queues:
            for place in places(queue):
                if place.sequence.state in found:  # else it is computed in the place that it has
                    status = _waiting(place.sequence, runner.spec.id, now, place)
                    found[place.sequence.state].append(status)
            for sequence in queue.paused:
                found[sequence.state].append(_waiting(sequence, runner.spec.id, now, None))
    return found


def _waiting(sequence: Sequence, model: str, now: float, place: Place | None) -> WaitStatus:
    hindrance = sequence.hindrance
    return WaitStatus(
        request_id=sequence.key.request_id,
        index=sequence.key.index,
        model=model,
        priority=sequence.priority,
        position=None if place is None else place.position,
        eta_s=None if place is None else place.eta_s,
        num_tokens=len(sequence.tokens),
        form=sequence.form,
        story=_story(sequence, now),
        others=list(sequence.others),
        reason=sequence.why if hindrance is None else hindrance.reason,
        by=None if hindrance is None else hindrance.by or None,
    )


def _story(sequence: Sequence, now: float) -> list[tuple[float, str]]:
    return [(round(now - at, 3), what) for at, what in sequence.story]
