"""A loaded model that generates, and everything that runs on it.

Owns the backend, its scheduler, and how requests become its sequences; a turn is `schedule`, then `step`.
Which model's turn it is, and what arrives from outside, is the loop's part; the requests stand in its table.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stoker.engine.jobs.prepare import PrepContext
from stoker.engine.runners.image_encoder import ImageEncoder
from stoker.engine.runners.oneshot import ChoiceSteps
from stoker.engine.runners.runner import Contender
from stoker.engine.runners.status import slot_status
from stoker.engine.runners.steps import StepRunner, carry_out
from stoker.engine.runners.warming import Warming
from stoker.errors import (
    SchedulerStalledError,
    StokerError,
)
from stoker.grammar.compiler import GrammarCompiler
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.events import Parked
from stoker.ipc.model import KVLayout, ModelClass
from stoker.ipc.request import FinishReason, Priority
from stoker.ipc.status import ModelRoom
from stoker.kv.cells import SchedulerLimits
from stoker.kv.sequence import ParkForm, SequenceState
from stoker.sampling.truncation import Workspace
from stoker.scheduler.scheduler import Scheduler
from stoker.speculation.speculator import Speculator

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Backend
    from stoker.cache.prefix_cache import PrefixCache
    from stoker.engine.jobs.job import Job, JobQueue
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.residency.load import Load
    from stoker.engine.threads.timer import StepTimer
    from stoker.ipc.model import ModelSpec
    from stoker.ipc.status import SlotStatus
    from stoker.kv.ops import Parking, Schedule
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.queue import Throttle

log = logging.getLogger(__name__)

PROMPT_ROWS_BYTES = 128 * 2**20
"""What the logits of one prompt slice may take, when prompt logprobs are asked."""


class SlotRunner:
    """A model in memory; see `ModelRunner`.

    Attributes:
        load: how it came into memory.
        degraded: what it was given less of than was asked for.
        flight, gathers, num_new, stepped_s: see `ModelRunner`.
        allowance_s: not used: a step is bounded by the model's own policy.
        tally: what its steps did since that was asked last.
    """

    def __init__(
        self, spec: ModelSpec, backend: Backend, timer: StepTimer, cache: PrefixCache, jobs: JobTable
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.load: Load | None = None
        self.degraded: tuple[str, ...] = ()
        self.allowance_s: float | None = None
        self._timer = timer
        self._jobs = jobs
        self._num_stalls_total = 0
        limits = backend.capabilities
        self.scheduler = Scheduler(scheduler_limits(spec, backend), cache)
        self.stepped_s, self.num_new = 0.0, 0
        self.gathers = self.scheduler.limits.is_on_device and self.scheduler.limits.has_streams
        self.tally = self.scheduler.tally
        vision, draws = backend.extensions.vision, backend.extensions.draws
        self._image_encoder = (
            None if vision is None else ImageEncoder(backend, vision, self.scheduler, timer, cache)
        )
        self._speculator = Speculator(backend, self.scheduler, jobs.speculates, spec.speculation, timer.now)
        self._steps = StepRunner(backend, self.scheduler, jobs, self._speculator, timer, self._carry_out)
        self.flight = self._steps.flight
        num_slots = min(spec.num_slots, limits.num_sequences)
        self._warming = Warming(spec.id, backend, timer, self._steps.place, num_slots)
        self._choices: ChoiceSteps | None = None  # until the first request to choose
        self._has_gone_on = False  # in this turn
        self.prep = PrepContext(
            backend.vocabulary,
            limits.n_vocab,
            limits.n_ctx,
            Workspace(limits.n_vocab),
            model=spec.id,
            fingerprint=limits.fingerprint,
            state_layout=limits.state_layout,
            cache_mode=spec.cache_mode,
            adapters=dict(limits.adapters),
            vision=vision,
            decoder_start=limits.decoder_start,
            num_candidates=0 if draws is None else draws.num_candidates,
            grammars=GrammarCompiler(lambda: GrammarTokenizer(backend.vocabulary, limits.n_vocab)),
        )

    def __repr__(self) -> str:
        return f"<SlotRunner {self.spec.id} {self.scheduler!r} {self._choices}>"

    # ------------------------------------------------------------ questions

    @property
    def queues(self) -> tuple[JobQueue, ...]:
        """What generates, and requests to choose if there were any."""
        return (self.scheduler,) if self._choices is None else (self.scheduler, self._choices.queue)

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        if self._steps.is_in_flight or self.scheduler.has_work:
            return True
        if self._choices is not None and self._choices.queue.has_work:
            return True
        return self._image_encoder is not None and self._image_encoder.has_work

    @property
    def has_people(self) -> bool:
        """Whether an interactive request waits for an answer of it."""
        return self.scheduler.has_people or (self._choices is not None and self._choices.queue.has_people)

    @property
    def has_readers(self) -> bool:
        """Whether interactive requests decode, token by token."""
        running = self.scheduler.slots.running
        return any(not each.is_background and each.state is SequenceState.DECODE for each in running)

    @property
    def has_unstored(self) -> bool:
        """Whether cells of ended requests are stored nowhere else yet."""
        return self.scheduler.allocator.has_unstored

    @property
    def is_cold(self) -> bool:
        """Whether there are kernels of its devices to be warmed."""
        return not self._warming.is_done

    @property
    def num_cells(self) -> tuple[int, int]:
        """Cells in all, and cells in use."""
        return self.scheduler.cells.total, self.scheduler.cells.used

    @property
    def running(self) -> list[Sequence]:
        """What holds a slot, in the order it got it."""
        return self.scheduler.slots.running

    @property
    def num_computing(self) -> tuple[int, int]:
        """Sequences that read their prompts, and those that write."""
        states = [each.state for each in self.running]
        return states.count(SequenceState.PREFILL), states.count(SequenceState.DECODE)

    def contender(self) -> Contender:
        """How it takes part in the choice of the next turn."""
        return Contender(self.spec.id, has_readers=self.has_readers)

    def is_owed(self, now: float) -> bool:
        """Whether background of it has waited longer than its patience."""
        return any(queue.is_owed(now) for queue in self.queues)

    def check_queue(self, priority: Priority, num_arriving: int) -> None:
        """Raises QueueFullError when its queue is at its bound; `num_arriving` are on their way."""
        num_choosing = 0 if self._choices is None else len(self._choices.queue)
        self.scheduler.check_queue(priority, num_arriving + num_choosing)

    def stats(self) -> dict[str, float]:
        """Every counter; what waits, is paused and has ended counts one-shot work too."""
        counters: dict[str, float] = {
            "num_stalls_total": self._num_stalls_total,
            "num_choosing": 0,
            "num_choosing_paused": 0,
        }
        parts = (self.scheduler, self._image_encoder, self._speculator, self._choices, self._steps.long_steps)
        for part in parts:
            for name, value in part.stats().items() if part is not None else ():
                counters[name] = counters.get(name, 0.0) + value
        return counters

    def activity(self, now: float) -> dict[str, float]:
        """What its steps were like lately."""
        self.scheduler.note_steps()
        return self.scheduler.activity.figures(now)

    def room(self) -> ModelRoom:
        """What it has left for a new request."""
        scheduler = self.scheduler
        cells = scheduler.cells
        held = cells.held(each.slot for each in scheduler.slots.running if each.slot is not None)
        return ModelRoom(
            num_cells=cells.total,
            free_cells=cells.total - held,
            interactive_wait_s=scheduler.eta.arrival_s(scheduler.slots.running, list(scheduler.queue)),
            prefill_tokens_per_s=round(scheduler.cost.best_rate(), 1),
            fingerprint=self.prep.fingerprint,
        )

    def slot_status(self, now: float) -> list[SlotStatus]:
        """Each slot as it is now."""
        return slot_status(self.scheduler, self.spec.id, now)

    # ------------------------------------------------------------ commands

    def accept(self, job: Job, now: float) -> None:
        """Put a prepared request in its queue: one-shot work beside the slots, all other into the slots'."""
        self.num_new += job.request.priority is Priority.INTERACTIVE
        if job.to_score is not None and job.choices:
            if self._choices is None:
                self._choices = ChoiceSteps(self.backend, self.scheduler, self._timer, self._jobs)
            self._choices.begin(job)
            self._jobs.place(job, self._choices.queue, self, now)
            return
        self._jobs.place(job, self.scheduler, self, now)
        if job.choices and job.request.echo and job.request.prompt_logprobs is None:
            self._jobs.events.append(job.echo())
        for index, choice in list(job.choices.items()):
            if len(choice.sequence.tokens) >= self.prep.n_ctx:  # it began where there was more context
                self._jobs.end_choice(job, index, FinishReason.LENGTH, now)

    def settle(self, now: float) -> None:
        """Take in what the step in flight has computed, so that its sequences may be moved."""
        self._steps.settle(now)

    def hold_back(self, throttle: Throttle) -> None:
        """Let only some of its requests run from the next turn on (SPEC M4, M6)."""
        for queue in self.queues:
            queue.throttle = throttle

    def drop_idle(self, now: float) -> None:
        """Free every cell that no running or queued request needs, and what the backend can make again."""
        self._steps.settle(now)
        self._carry_out(self.scheduler.drop_idle(now), now)
        if (scratch := self.backend.extensions.scratch) is not None:
            scratch.give_back()

    def close(self) -> None:
        """Free the native model."""
        self._steps.close()
        if self._choices is not None:
            self._choices.close()
        if self._image_encoder is not None:
            self._image_encoder.close()
        self.backend.close()

    # ------------------------------------------------------------ a turn

    def schedule(self, now: float) -> None:
        """Decide what runs: deadlines, cells, free slots. Rows that are to decode again do so at once."""
        self._has_gone_on = self._is_plain and self._steps.go_on(now)
        if self._has_gone_on:
            return
        self.num_new = 0
        self._steps.finish(now)
        self._steps.deliver_first()
        is_steady = self.scheduler.is_steady(now)
        if not is_steady:
            self._carry_out(self.scheduler.schedule(now), now)
        if not is_steady or self._choices is not None:
            self._jobs.publish_positions(self.spec.id, self.queues, now)

    def rest(self, now: float) -> None:
        """There is time: store something that is only in cells."""
        self._steps.settle(now)
        self._carry_out(self.scheduler.store_idle(now), now)

    def warm(self, now: float) -> None:
        """There is time: one step of a kind that requests may bring."""
        self._steps.settle(now)
        self._warming.step(self.scheduler.cells.free)

    @property
    def _is_plain(self) -> bool:
        """Whether there is nothing to compute beside steps."""
        return self._image_encoder is None and (self._choices is None or not self._choices.queue.has_work)

    def step(self, now: float) -> None:
        """Plan one step over what runs, compute it and draw from its rows."""
        if self._has_gone_on:
            self._steps.deliver()
            return
        images, choices = self._image_encoder, self._choices
        if images is not None:
            self._fail(images.tend(now), now)
        has_readers = choices is not None and self.has_readers
        goes_first = images is not None and images.goes_first and not self.scheduler.is_owed(now)
        plan = None if goes_first else self.scheduler.plan()
        if plan is not None:
            self._steps.run(plan, now)
        elif self.scheduler.has_work and not (images is not None and images.is_awaited):
            self._report_stall(now)
        if (images is not None and images.has_work) or (choices is not None and choices.queue.has_work):
            self._steps.collect()  # they need the device, and how long the step took
        took_s = self._timer.now() - now
        self._steps.deliver()
        if images is not None:
            images.encode(plan, took_s)
        if choices is not None:
            choices.step(took_s, has_readers=has_readers)

    def _carry_out(self, schedule: Schedule, now: float) -> None:
        failed = carry_out(schedule.ops, self.backend, self.scheduler.allocator)
        if failed or schedule.preempted or schedule.parked:
            self._steps.deliver()  # what was drawn before comes first
        for sequence in schedule.preempted:
            job = self._jobs.get(sequence.key.request_id)
            if job is not None and sequence.key.index in job.choices:
                self._jobs.events.append(job.ended(sequence.key.index, FinishReason.PREEMPTED))
                self._jobs.finish_if_done(job, now)
        still = [each for each in schedule.parked if each.sequence.state is not SequenceState.DONE]
        self._jobs.events.extend(_parked(each) for each in still)
        conditioner = self.backend.extensions.conditioner
        for sequence in schedule.admitted:
            try:
                if sequence.slot is not None and conditioner is not None:
                    conditioner.condition(sequence.slot, sequence.conditioning)
            except StokerError as error:
                failed.append((sequence, error))
                continue
            if (job := self._jobs.get(sequence.key.request_id)) is not None:
                is_first = job.admitted_s is None
                self._jobs.events.append(job.admitted(sequence, now))
                if is_first and job.request.return_progress:
                    self._jobs.events.append(job.progress(sequence, now))  # before anything is computed
        if schedule.hindered:
            self._jobs.publish_hindrances(schedule.hindered)
        self._fail(failed, now)

    def _fail(self, failed: Iterable[tuple[Sequence, StokerError]], now: float) -> None:
        """An error of one sequence ends its request alone (SPEC Q12)."""
        for sequence, error in failed:
            if (job := self._jobs.get(sequence.key.request_id)) is not None:
                log.warning("%r has failed: %s", job, error)
                self._jobs.fail(job, error, now)

    def _report_stall(self, now: float) -> None:
        """Work exists and nothing can be planned (Q15): end the head of the queue with all counters."""
        head = (*self.scheduler.queue, *self.scheduler.slots.running)[0]
        self._num_stalls_total += 1
        counters = self.stats()
        error = SchedulerStalledError(f"no step can be planned: {head!r}, {counters}", counters=counters)
        log.error("%s", error)
        self._jobs.fail(self._jobs[head.key.request_id], error, now)


def _parked(parking: Parking) -> Parked:
    sequence = parking.sequence
    return Parked(
        request_id=sequence.key.request_id,
        index=sequence.key.index,
        form=sequence.form or ParkForm.TOKENS,
        reason=parking.reason,
        by=parking.by or None,
    )


def scheduler_limits(spec: ModelSpec, backend: Backend) -> SchedulerLimits:
    """What the loaded model and the settings allow its scheduler."""
    limits, kv_bytes = backend.capabilities, backend.memory().get("kv", 0)
    is_recurrent = limits.model_class is ModelClass.RECURRENT
    return SchedulerLimits(
        num_slots=min(spec.num_slots, limits.num_sequences),
        num_sequences=limits.num_sequences,
        num_cells=limits.num_cells,
        n_batch=limits.n_batch,
        max_queue=spec.max_queue,
        max_prompt_rows=max(1, PROMPT_ROWS_BYTES // (4 * limits.n_vocab)),
        can_trim=limits.can_trim,
        can_fork=limits.can_fork,
        shares_cells=limits.shares_cells,
        is_on_device=limits.is_async,
        has_streams=limits.kv_layout is KVLayout.STREAMS,
        tiles=backend.extensions.tiles,
        cell_bytes=0 if is_recurrent else kv_bytes // limits.num_cells,
        state_bytes=kv_bytes // limits.num_sequences if is_recurrent else 0,
        park_bytes=spec.park_bytes,
        policy=spec.policy,
        target_step_s=min(spec.target_step_ms, spec.max_step_ms) / 1000,
        max_step_s=spec.max_step_ms / 1000,
        background_patience_s=spec.background_patience_s,
        cache_mode=spec.cache_mode,
        model=limits.fingerprint,
        source=spec.path,
    )
