"""The steps of one model: launches each, waits for its rows, and delivers what the rows became.

Owns the step in flight. Where a backend computes inside `launch` a step is over when `run` returns. Where
the device computes meanwhile, `run` only launches; `deliver` then digests the step before, and `finish`, at
the beginning of the next turn, waits for the rows and draws from them. Where the same rows are to decode
again `go_on` takes the place of both: between their tokens and the next launch only what that needs. One step
is in flight at a time: whatever else touches the backend or the sequences calls `settle` first, other native
work `StepTimer.begin`.

`carry_out` applies the scheduler's KV ops to the backend, and reports to the allocator how exports and
imports ended.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.cache.entry import EntryState
from stoker.engine.runners.long_steps import LongSteps
from stoker.engine.runners.postprocess import Postprocess
from stoker.engine.runners.runner import Flight
from stoker.engine.threads.timer import EVERYWHERE
from stoker.errors import (
    ContextLengthError,
    InvalidRequestError,
    PoolFullError,
    StepAbortedError,
    StepFailedError,
    StepMemoryError,
    StokerError,
)
from stoker.kv.ops import Begin, Drop, Export, Fork, Import, KVOp, Trim
from stoker.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stoker.backends.protocol.backend import Backend, InFlight, Rows
    from stoker.backends.protocol.extensions import CopyTimes
    from stoker.cache.entry import Entry
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.threads.timer import StepTimer, TimedModel
    from stoker.kv.allocator import KVAllocator
    from stoker.kv.ops import Schedule
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.plan import Planned
    from stoker.scheduler.scheduler import Scheduler
    from stoker.speculation.speculator import Speculator

log = logging.getLogger(__name__)

OVER_S = 0.0005
"""Rows that come sooner than this were there before they were asked for: copying them takes 0.1 ms."""


def carry_out(
    ops: Iterable[KVOp], backend: Backend, allocator: KVAllocator
) -> list[tuple[Sequence, StokerError]]:
    """Apply ops in order. A snapshot that cannot be had costs its sequence time, not its tokens.

    Returns:
        Sequences whose initial state the backend did not take; the caller ends them.
    """
    failed: list[tuple[Sequence, StokerError]] = []
    for op in ops:
        match op:
            case Fork(src, dst, length):
                backend.fork(src, dst, length)
            case Trim(seq, length):
                backend.trim(seq, length)
            case Drop(seq):
                backend.drop(seq)
            case Export():
                _export(op, backend, allocator)
            case Import():
                failed += _import(op, backend, allocator)
            case Begin(seq, sequence):
                failed += _begin(seq, sequence, backend)
    return failed


def _export(op: Export, backend: Backend, allocator: KVAllocator) -> None:
    entry = op.entry
    if entry.state is EntryState.RAM:
        return  # another op of this turn has brought it
    states = backend.extensions.states
    if states is None or entry.state is not EntryState.PENDING:  # another op of this turn has failed
        allocator.not_exported(entry, op.sequence)
        return
    if not _has_time_for(op, backend.extensions.copy_times, allocator):
        return
    try:
        data = states.export_state(op.seq)
    except (StokerError, MemoryError) as error:
        log.warning("no snapshot of %d tokens, they will be computed again: %s", entry.num_tokens, error)
        allocator.not_exported(entry, op.sequence)
    else:
        allocator.exported(entry, data)


def _has_time_for(op: Export, copy_times: CopyTimes | None, allocator: KVAllocator) -> bool:
    """Whether a copy that takes time may be made; if not, the allocator was told."""
    if copy_times is None:
        return True
    moves = allocator.moves
    is_late = not moves.has_time
    if not is_late:
        cost_s = copy_times.export_s(op.seq)  # which takes time to be found out
        if not moves.is_worth(cost_s, op.entry.num_tokens):
            allocator.not_exported(op.entry, op.sequence)  # others would wait for longer than it is worth
            return False
        is_late = not moves.take(cost_s)
    if is_late:
        allocator.not_exported(op.entry, op.sequence)
        allocator.store_later(op.entry)
    return not is_late


def _import(op: Import, backend: Backend, allocator: KVAllocator) -> list[tuple[Sequence, StokerError]]:
    entry, sequence = op.entry, op.sequence
    if not sequence.is_importing:
        return []  # it ended in the turn that admitted it
    if entry.data is None:  # its export has failed in this very turn
        return _start_anew(op, backend, allocator)
    states = backend.extensions.states
    assert states is not None, f"{backend!r} has exported nothing"
    try:
        states.import_state(op.seq, entry.data)
        _check_length(backend.length(op.seq), entry)
        if op.length < entry.num_tokens:
            backend.trim(op.seq, op.length)
    except (StokerError, MemoryError) as error:
        log.warning("the state of %r was not taken, its tokens are computed again: %s", sequence, error)
        failed = _start_anew(op, backend, allocator)
        if isinstance(error, InvalidRequestError):
            allocator.cache.damaged(entry)
        return failed
    allocator.imported(sequence)
    return []


def _check_length(length: int, entry: Entry) -> None:
    if length != entry.num_tokens:
        raise InvalidRequestError(f"a state of {length} tokens was kept as one of {entry.num_tokens}")


def _start_anew(op: Import, backend: Backend, allocator: KVAllocator) -> list[tuple[Sequence, StokerError]]:
    """The state could not be had: the sequence begins with its first token, here if it still runs here."""
    sequence = op.sequence
    backend.drop(op.seq)
    allocator.lost(sequence)
    if sequence.slot == op.seq and sequence.initial_state is not None:
        return _begin(op.seq, sequence, backend)
    return []


def _begin(seq: int, sequence: Sequence, backend: Backend) -> list[tuple[Sequence, StokerError]]:
    recurrent = backend.extensions.recurrent
    assert recurrent is not None, f"{sequence!r} begins from a state that {backend!r} has not"
    try:
        recurrent.write_state(seq, sequence.initial_state or [])
    except StokerError as error:
        return [(sequence, error)]
    return []


@dataclass(slots=True)
class _Launched:
    """A step that was launched; `rows` or `error` once the backend has been waited for."""

    plan: StepPlan
    in_flight: InFlight
    num_tokens: int
    rows: Rows | None = None
    error: StepFailedError | None = None
    took_s: float = 0.0

    @property
    def is_collected(self) -> bool:
        return self.rows is not None or self.error is not None


class StepRunner:
    """See the module.

    Args:
        apply: carries out what the scheduler frees where the native pool is full.

    Attributes:
        place: devices that compute beside the loop; EVERYWHERE: none does.
        flight: what others are told of its step under way.
        long_steps: what makes a step long; None: nothing could end one.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of one model's runner
        self,
        backend: Backend,
        scheduler: Scheduler,
        jobs: JobTable,
        speculator: Speculator,
        timer: StepTimer,
        apply: Callable[[Schedule, float], None],
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._jobs = jobs
        self._speculator = speculator
        self._timer = timer
        self._apply = apply
        self._timed: TimedModel = timer.join(backend, scheduler.cost)
        self._timed.is_cold = True
        self._compaction = backend.extensions.compaction
        self._overlaps = backend.capabilities.is_async
        aborts = backend.extensions.aborts if backend.capabilities.can_trim and not self._overlaps else None
        self.long_steps = None if aborts is None else LongSteps(aborts, scheduler, jobs, timer)
        devices = backend.extensions.devices if self._overlaps else None
        self.place = frozenset(devices.memory_by_device()) if devices else EVERYWHERE
        self.flight = Flight(EVERYWHERE if backend.capabilities.computes_on_cpu else self.place)
        self._postprocess = Postprocess(backend, scheduler, jobs, timer, self._end_in_flight)
        self._launched: _Launched | None = None
        self._source: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<StepRunner {self._launched!r}>"

    @property
    def is_in_flight(self) -> bool:
        """Whether a step was launched whose rows were not drawn from yet."""
        return self._launched is not None

    def close(self) -> None:
        """The model is unloaded."""
        self.collect()
        self._timer.leave(self._timed)

    # ------------------------------------------------------------ a turn

    def run(self, plan: StepPlan, now: float) -> None:
        """Launch a step, with a draft where one pays, or a long one where nobody else is there.

        One that computes in `launch` is finished too.
        """
        plan = self._speculator.extended(plan)
        if self.long_steps is None or not self.long_steps.run(plan, self._launch, now):
            self._launch(plan, now)
        if not self._overlaps:
            self.finish(now)

    def go_on(self, now: float) -> bool:
        """Launch the next step of the decode rows in flight, where that is certain to be what follows.

        Nobody came, gave way or ended, and no token drawn ends anything. Whatever the step in flight means
        beside its tokens is worked out after the launch, while the device computes.

        Returns:
            Whether it was launched. If not, the turn goes its usual way; the step may have been waited for.
        """
        step = self._launched
        if step is None or step.is_collected or not step.plan.is_rows:
            return False
        if not (self._scheduler.is_steady(now, step.plan) and self._postprocess.foresees(step.plan)):
            return False
        if not self._wait(step):
            return False
        tokens = self._postprocess.certain_tokens(step.in_flight)
        if tokens is None:
            self._count(step)
            return False
        self._postprocess.take(tokens)
        self._speculator.learn(step.plan, step.took_s)
        self._launched = None
        plan = self._scheduler.plan(step.plan)
        assert plan is not None, f"no step after {step.plan!r}"
        try:
            self._begin(self._speculator.extended(plan))
        except (PoolFullError, StepFailedError) as error:
            log.warning("a step of the same rows failed, it is planned anew: %s", error)
        self._count(step)
        return self._launched is not None

    def collect(self) -> None:
        """Wait for the rows of the step in flight, if there is one, and count its tokens as computed."""
        step = self._launched
        if step is not None and not step.is_collected and self._wait(step):
            self._count(step)

    def _wait(self, step: _Launched) -> bool:
        """Wait for the rows of a step; returns whether it succeeded."""
        self._timer.in_flight.pop(self.place, None)
        self.flight.due_s = 0.0
        asked_s = self._timer.now()
        try:
            step.rows = step.in_flight.rows()
        except StepFailedError as error:
            self._timer.abandon(self.place)
            step.error = error
            return False
        was_over = bool(self._timer.in_flight) and self._timer.now() - asked_s < OVER_S
        step.took_s = self._timer.stop(self._timed, step.num_tokens, self.place, is_bound=was_over)
        return True

    def _count(self, step: _Launched) -> None:
        """Count the tokens of a step as computed."""
        self._scheduler.tally.took(step.took_s)
        self._scheduler.computed(step.plan, self._timer.now())
        self._apply_late()  # before it moves on

    def finish(self, now: float) -> None:
        """Draw from the rows of the step in flight, if there is one."""
        self._postprocess.deliver()  # of the step before it; done already, unless this one's launch failed
        step = self._launched
        if step is None:
            return
        self.collect()
        self._launched = None
        if step.rows is not None:
            self._postprocess.draw(step.plan, step.in_flight, step.took_s)
            self._speculator.learn(step.plan, step.took_s)
            return
        assert step.error is not None, f"{step!r} has neither rows nor an error"
        if running := _running(step.plan.parts):
            self._halve(running, step.error, now)
            self.finish(now)

    def deliver(self) -> None:
        """Text, stop strings, log probabilities and events of what was drawn, and what steps have taught.

        The device may compute meanwhile: whatever the next launch does not need is done here.
        """
        if self._timer.is_behind:
            self._timer.learn()
            self._scheduler.note_steps()
        self._postprocess.deliver()

    def deliver_first(self) -> None:
        """Deliver before the next launch where a first token waits: another step takes long to prepare."""
        if self._postprocess.has_first:
            self._postprocess.deliver()

    def settle(self, now: float) -> None:
        """Bring the step in flight to its end: nothing is launched and nothing undelivered afterwards."""
        self.finish(now)
        self.deliver()

    # ------------------------------------------------------------ one step

    def _launch(self, plan: StepPlan, now: float) -> None:
        """One step; a failing one is halved until it fails its culprit alone (SPEC Q12)."""
        try:
            self._begin(plan)
        except PoolFullError as error:
            if plan.has_draft:
                self._launch(plan.without_draft(), now)
            else:
                self._relieve(plan, error, now)
        except StepAbortedError:
            raise  # nothing is wrong with it
        except StepFailedError as error:
            self._halve(plan, error, now)

    def _begin(self, plan: StepPlan) -> None:
        """Have the backend compute a step; one that raises is not in flight."""
        batch = plan.batch()
        order = self._compaction.arrange(batch) if self._compaction else range(0)  # not in the step's time
        if not isinstance(order, range):
            plan = plan.in_order(order)
            batch = plan.batch()
        num_tokens = self._scheduler.num_rows(plan) + self._num_unread(plan)
        self._timer.begin(num_tokens, self.place)
        try:
            in_flight = self._backend.launch(batch)
        except (PoolFullError, StepFailedError):
            self._timer.abandon(self.place)
            raise
        self._launched = _Launched(plan, in_flight, num_tokens)
        if self._overlaps:
            self._timer.in_flight[self.place] = self.collect
            self.flight.due_s = self._timer.now() + self._known_s(num_tokens)

    def _known_s(self, num_tokens: int) -> float:
        """Seconds that such a step takes; 0 until two of its size were timed: those are waited for."""
        cost = self._scheduler.cost
        return (cost.predict(num_tokens) or 0.0) if cost.is_sure(num_tokens) else 0.0

    def _halve(self, plan: StepPlan, error: StepFailedError, now: float) -> None:
        """A step failed: without its draft, or each half of it, up to the one sequence that is at fault.

        Where memory was short, and one sequence is left, half of its tokens are computed; the others later.
        """
        if plan.has_draft:
            self._launch(plan.without_draft(), now)
            return
        if isinstance(error, StepMemoryError) and len(plan.parts) == 1 and plan.num_tokens > 1:
            self._launch(plan.shortened(), now)
            return
        if len(plan.parts) == 1:
            job = self._jobs.get(plan.parts[0].sequence.key.request_id)
            if job is not None:
                log.warning("step failed for %r: %s", job, error)
                self._jobs.fail(job, error, now)
            return
        middle = len(plan.parts) // 2
        for half in (plan.parts[:middle], plan.parts[middle:]):
            self.finish(now)  # the half before it
            if running := _running(half):
                self._launch(running, now)

    def _num_unread(self, plan: StepPlan) -> int:
        """Tokens that an encoder reads before this step: another source than the step before had."""
        before, self._source = self._source, plan.parts[0].sequence.conditioning.source
        return 0 if self._source == before else len(self._source)

    def _relieve(self, plan: StepPlan, error: PoolFullError, now: float) -> None:
        """The native pool is fuller than counted: free something and let the next turn try again."""
        freed = self._scheduler.free_more(now)
        if freed.ops or freed.preempted:
            self._apply(freed, now)
            return
        job = self._jobs[plan.parts[0].sequence.key.request_id]
        n_ctx = self._backend.capabilities.n_ctx
        text = f"This model's maximum context length is {n_ctx} tokens. However, {error.message}"
        self._jobs.fail(job, ContextLengthError(f"{text}; alone it needs more", n_ctx=n_ctx), now)

    def _end_in_flight(self, sequence: Sequence) -> None:
        """It ends on its text while its next token is computed: that one counts as a guess that was wrong."""
        self.collect()
        if self._launched is not None and sequence.is_running and sequence.num_pending == 0:
            sequence.guess_last()

    def _apply_late(self) -> None:
        allocator = self._scheduler.allocator
        if allocator.late_ops:
            failed = carry_out(allocator.take_late_ops(), self._backend, allocator)
            assert not failed, f"a late op began {failed}"


def _running(parts: Iterable[Planned]) -> StepPlan | None:
    """The step of those that still run; None: none does."""
    still = tuple(part for part in parts if part.sequence.is_running)
    return StepPlan(still) if still else None
