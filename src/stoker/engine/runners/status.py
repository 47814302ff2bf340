"""What models, their slots and lines look like from outside, with stories of who is there (SPEC Q14, I4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.ipc.status import ModelStatus, SlotStatus, WaitStatus
from stoker.kv.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.engine.residency.catalogue import ServedModel
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.scheduler import Scheduler


def model_status(served: ServedModel, leases: int, now: float) -> ModelStatus:
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
    )


def slots_of(scheduler: Scheduler, model: str, now: float) -> list[SlotStatus]:
    """Each slot as it is now."""
    return [
        SlotStatus(
            id=slot.id,
            state="idle" if slot.sequence is None else slot.sequence.state,
            model=model,
            num_tokens=len(slot.kept) if slot.sequence is None else slot.sequence.num_computed,
            request_id=None if slot.sequence is None else slot.sequence.key.request_id,
            priority=None if slot.sequence is None else slot.sequence.priority,
            story=[] if slot.sequence is None else _story(slot.sequence, now),
        )
        for slot in scheduler.slots.shown()
    ]


def line_of(scheduler: Scheduler, model: str, state: SequenceState, now: float) -> list[WaitStatus]:
    """The sequences of the line that are in `state`, next first, with their place in the whole line."""
    line = zip(scheduler.queue, scheduler.etas_s(), strict=True)
    return [
        _waiting(sequence, model, now, (position, eta_s))
        for position, (sequence, eta_s) in enumerate(line)
        if sequence.state is state
    ]


def waiting_of(sequences: Iterable[Sequence], model: str, now: float) -> list[WaitStatus]:
    """Sequences that have no place in the line of slots: they are paused, or are choices."""
    return [_waiting(sequence, model, now, (None, None)) for sequence in sequences]


def _waiting(
    sequence: Sequence, model: str, now: float, place: tuple[int | None, float | None]
) -> WaitStatus:
    position, eta_s = place
    return WaitStatus(
        request_id=sequence.key.request_id,
        index=sequence.key.index,
        model=model,
        priority=sequence.priority,
        position=position,
        eta_s=eta_s,
        num_tokens=len(sequence.tokens),
        form=sequence.form,
        story=_story(sequence, now),
    )


def _story(sequence: Sequence, now: float) -> list[tuple[float, str]]:
    return [(round(now - at, 3), what) for at, what in sequence.story]
