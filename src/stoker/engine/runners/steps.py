"""The steps of one model: launches each, waits for its rows, and delivers what the rows became.

Owns the step in flight. Where a backend computes inside `launch` a step is over when `run` returns. Where the
device computes meanwhile, `run` only launches; `deliver` then digests the step before, and `finish`, at the
beginning of the next turn, waits for the rows and draws from them. One step is in flight at a time:
whatever else touches the backend or the sequences calls `settle` first, other native work `StepTimer.begin`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.engine.runners.apply_ops import carry_out
from stoker.engine.runners.postprocess import Postprocess
from stoker.errors import ContextLengthError, PoolFullError, StepFailedError
from stoker.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stoker.backends.protocol.backend import Backend, InFlight, Rows
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.threads.timer import Runner, StepTimer
    from stoker.kv.ops import Schedule
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.plan import Planned
    from stoker.scheduler.scheduler import Scheduler
    from stoker.speculation.speculator import Speculator

log = logging.getLogger(__name__)


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
        self._runner: Runner = timer.join(backend, scheduler.cost)
        self._compaction = backend.extensions.compaction
        self._overlaps = backend.capabilities.is_async
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
        self._timer.leave(self._runner)

    # ------------------------------------------------------------ a turn

    def run(self, plan: StepPlan, now: float) -> None:
        """Launch a step, with a draft where one pays; one that computes in `launch` is finished too."""
        self._launch(self._speculator.extended(plan), now)
        if not self._overlaps:
            self.finish(now)

    def collect(self) -> None:
        """Wait for the rows of the step in flight, if there is one, and count its tokens as computed."""
        step = self._launched
        if step is None or step.is_collected:
            return
        self._timer.in_flight = None
        try:
            step.rows = step.in_flight.rows()
        except StepFailedError as error:
            self._timer.abandon()
            step.error = error
            return
        step.took_s = self._timer.end(self._runner, step.num_tokens)
        self._scheduler.computed(step.plan, self._timer.now())
        self._apply_late()  # before it moves on

    def finish(self, now: float) -> None:
        """Draw from the rows of the step in flight, if there is one."""
        self.deliver()  # of the step before it; done already, unless this one's launch failed
        self.collect()
        step, self._launched = self._launched, None
        if step is None:
            return
        if step.rows is not None:
            self._postprocess.draw(step.plan, step.rows)
            self._speculator.learn(step.plan, step.took_s)
            return
        assert step.error is not None, f"{step!r} has neither rows nor an error"
        if running := _running(step.plan.parts):
            self._halve(running, step.error, now)
            self.finish(now)

    def deliver(self) -> None:
        """Text, stop strings, log probabilities and events of what was drawn; the device may compute."""
        self._postprocess.deliver()

    def settle(self, now: float) -> None:
        """Bring the step in flight to its end: nothing is launched and nothing undelivered afterwards."""
        self.finish(now)
        self.deliver()

    # ------------------------------------------------------------ one step

    def _launch(self, plan: StepPlan, now: float) -> None:
        """One step; a failing one is halved until it fails its culprit alone (SPEC Q12)."""
        batch = plan.batch()
        num_tokens = batch.num_tokens + self._num_unread(plan)
        if self._compaction is not None:
            self._compaction.close_up([item.seq for item in batch.items])  # its time is not the step's
        self._timer.begin(num_tokens)
        try:
            in_flight = self._backend.launch(batch)
        except PoolFullError as error:
            self._timer.abandon()
            if plan.has_draft:
                self._launch(plan.without_draft(), now)
            else:
                self._relieve(plan, error, now)
        except StepFailedError as error:
            self._timer.abandon()
            self._halve(plan, error, now)
        else:
            self._launched = _Launched(plan, in_flight, num_tokens)
            if self._overlaps:
                self._timer.in_flight = self.collect

    def _halve(self, plan: StepPlan, error: StepFailedError, now: float) -> None:
        """A step failed: without its draft, or each half of it, up to the one sequence that is at fault."""
        if plan.has_draft:
            self._launch(plan.without_draft(), now)
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
        if late := self._scheduler.allocator.take_late_ops():
            failed = carry_out(late, self._backend, self._scheduler.allocator)
            assert not failed, f"a late op began {failed}"


def _running(parts: Iterable[Planned]) -> StepPlan | None:
    """The step of those that still run; None: none does."""
    still = tuple(part for part in parts if part.sequence.is_running)
    return StepPlan(still) if still else None
