"""Models, slots and queues as status shows them, with each sequence's story (SPEC K7, Q14, I4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.backends.protocol.encoding import Encoder
from stoker.engine.jobs.table import Place, places
from stoker.ipc.model import ModelInfo
from stoker.ipc.status import ModelStatus, SlotStatus, WaitStatus
from stoker.kv.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.engine.residency.catalogue import ServedModel
    from stoker.engine.runners.runner import ModelRunner
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


def slot_status(scheduler: Scheduler, model: str, now: float) -> list[SlotStatus]:
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


def waiting_status(runners: Iterable[ModelRunner], now: float) -> dict[SequenceState, list[WaitStatus]]:
    """Queued, parked and paused sequences of all queues by state, each queue's next first."""
    found: dict[SequenceState, list[WaitStatus]] = {
        state: [] for state in (SequenceState.QUEUED, SequenceState.PARKED, SequenceState.PAUSED)
    }
    for runner in runners:
        for queue in runner.queues:
            for place in places(queue):
                status = _waiting(place.sequence, runner.spec.id, now, place)
                found[place.sequence.state].append(status)
            for sequence in queue.paused:
                found[sequence.state].append(_waiting(sequence, runner.spec.id, now, None))
    return found


def _waiting(sequence: Sequence, model: str, now: float, place: Place | None) -> WaitStatus:
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
    )


def _story(sequence: Sequence, now: float) -> list[tuple[float, str]]:
    return [(round(now - at, 3), what) for at, what in sequence.story]


def model_info(runner: ModelRunner) -> ModelInfo:
    """What was loaded and the limits that resulted (SPEC K7)."""
    spec, backend = runner.spec, runner.backend
    limits, vocabulary, threads = backend.capabilities, backend.vocabulary, backend.extensions.threads
    num_slots, pooling, n_embd = min(spec.num_slots, limits.num_sequences), "", 0
    if isinstance(backend, Encoder):  # it has as many places as a call takes texts
        num_slots, pooling, n_embd = limits.num_sequences, backend.pooling, backend.n_embd
    return ModelInfo(
        id=spec.id,
        path=spec.path,
        label=limits.label,
        model_class=limits.model_class,
        architecture=limits.architecture,
        description=limits.description,
        num_params=limits.num_params,
        size_bytes=limits.size_bytes,
        n_vocab=limits.n_vocab,
        n_ctx=limits.n_ctx,
        n_ctx_train=limits.n_ctx_train,
        n_batch=limits.n_batch,
        num_slots=num_slots,
        num_threads=threads.num_threads if threads else 0,
        kv_type=limits.kv_type,
        flash_attention=limits.flash_attention,
        memory_bytes=backend.memory(),
        chat_template=vocabulary.chat_template,
        bos_text=vocabulary.bos_text,
        eos_text=vocabulary.eos_text,
        can_trim=limits.can_trim,
        can_fork=limits.can_fork,
        has_vision=limits.has_vision,
        pairing=limits.pairing,
        degraded=list(runner.degraded),
        adapters=spec.adapters,
        pooling=pooling,
        n_embd=n_embd,
    )
