"""One loaded model and everything that runs on it.

Owns the backend, its scheduler and its live requests; a turn is `schedule`, then `step`.
Which model's turn it is, and what arrives from outside, is the loop's business.
"""

from __future__ import annotations

import logging

from stoker.backends.protocol.backend import Backend
from stoker.cache.prefix_cache import PrefixCache
from stoker.engine.jobs.job import Job
from stoker.engine.jobs.prepare import PrepContext
from stoker.engine.jobs.table import JobTable
from stoker.engine.residency.loading import Load
from stoker.engine.runners import status as report
from stoker.engine.runners.apply_ops import carry_out
from stoker.engine.runners.choices import ChoiceRunner
from stoker.engine.runners.description import model_info, scheduler_limits
from stoker.engine.runners.image_steps import ImageSteps
from stoker.engine.runners.steps import StepRunner
from stoker.engine.runners.turns import Contender
from stoker.engine.threads.pace import Pace
from stoker.errors import (
    RequestTimeoutError,
    SchedulerStalledError,
)
from stoker.grammar.compiler import GrammarCompiler
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.commands import Submit
from stoker.ipc.events import Event, Parked, Paused, Queued, Resumed
from stoker.ipc.model import ModelInfo, ModelSpec
from stoker.ipc.request import FinishReason, Priority
from stoker.ipc.status import SlotStatus, WaitStatus
from stoker.kv.ops import Parking, Schedule
from stoker.kv.sequence import ParkForm, Sequence, SequenceState
from stoker.sampling.workspace import Workspace
from stoker.scheduler.scheduler import Scheduler
from stoker.scheduler.throttle import Throttle
from stoker.speculation.speculator import Speculator

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
"""How often waiting requests hear of their place in the line at most."""


class SlotRunner:
    """A model in memory.

    Attributes:
        load: how it came into memory.
        degraded: what it was given less of than was asked for.
        allowance_s: not used: a step is bounded by the model's own policy.
    """

    def __init__(self, spec: ModelSpec, backend: Backend, pace: Pace, cache: PrefixCache) -> None:
        self.spec = spec
        self.backend = backend
        self.load: Load | None = None
        self.degraded: tuple[str, ...] = ()
        self.allowance_s: float | None = None
        self._pace = pace
        self._told_s = 0.0
        self._num_stalls_total = 0
        limits = backend.capabilities
        self.scheduler = Scheduler(scheduler_limits(spec, backend), cache)
        self._live = JobTable(self.scheduler)
        self._image_steps = ImageSteps(backend, self.scheduler, pace, cache)
        self._speculator = Speculator(backend, self.scheduler, self._live, spec.speculation, pace.now)
        self._steps = StepRunner(backend, self.scheduler, self._live, self._speculator, pace, self._carry_out)
        self._choosing = ChoiceRunner(backend, self.scheduler, pace, self._live.events)
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
            vision=backend.extensions.vision,
            decoder_start=limits.decoder_start,
            grammars=GrammarCompiler(lambda: GrammarTokenizer(backend.vocabulary, limits.n_vocab)),
        )

    def __repr__(self) -> str:
        return f"<SlotRunner {self.spec.id} {self.scheduler!r} {len(self._live)} live>"

    # ------------------------------------------------------------ questions

    @property
    def events(self) -> list[Event]:
        """What has happened, for the loop to publish."""
        return self._live.events

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        has_own = self.scheduler.has_work or self._steps.is_in_flight
        return has_own or self._image_steps.has_work or self._choosing.line.has_work

    def info(self) -> ModelInfo:
        """What was loaded and the limits that resulted."""
        return model_info(self.spec, self.backend, self.scheduler.limits.num_slots, self.degraded)

    @property
    def has_requests(self) -> bool:
        """Whether anybody waits or runs; those that are paused are not counted."""
        return self.scheduler.has_requests or len(self._choosing.line) > 0

    @property
    def num_leases(self) -> int:
        """Requests that need it to be in memory: those that are paused do not."""
        paused = {sequence.key.request_id for sequence in self.scheduler.paused}
        return len(self._live) - len(paused) + len(self._choosing.line)

    @property
    def n_ctx(self) -> int:
        """Tokens that one request may hold."""
        return self.prep.n_ctx

    def contexts(self) -> list[int]:
        """Tokens of context that each of its requests may come to hold, those that are paused too."""
        return [live.num_context for live in self._live] + self._choosing.contexts()

    @property
    def num_cells(self) -> tuple[int, int]:
        """Cells there are, and cells in use."""
        return self.scheduler.cells.total, self.scheduler.cells.used

    def memory(self) -> dict[str, int]:
        """Bytes it takes, by line."""
        return self.backend.memory()

    def stats(self) -> dict[str, float]:
        """Every counter, for status pages and bug reports."""
        parts = (self.scheduler, self._image_steps, self._speculator, self._choosing)
        counters = {name: value for part in parts for name, value in part.stats().items()}
        return counters | {"num_stalls_total": self._num_stalls_total}

    def check_queue(self, priority: Priority, num_arriving: int) -> None:
        """Raises QueueFullError when its line is at its bound; `num_arriving` are on their way."""
        self.scheduler.check_queue(priority, num_arriving + len(self._choosing.line))

    @property
    def has_people(self) -> bool:
        """Whether somebody waits for an answer of it."""
        return self.scheduler.has_people or self._choosing.line.has_people

    @property
    def has_readers(self) -> bool:
        """Whether somebody reads what it writes, token by token."""
        running = self.scheduler.slots.running
        return any(not each.is_background and each.state is SequenceState.DECODE for each in running)

    def contender(self) -> Contender:
        """How it takes part in the choice of the next turn."""
        return Contender(self.spec.id, has_readers=self.has_readers)

    def is_owed(self, now: float) -> bool:
        """Whether background of it has waited over its patience."""
        return self.scheduler.is_owed(now) or self._choosing.line.is_owed(now)

    def next_deadline_s(self) -> float | None:
        """When the first of its requests passes its deadline."""
        deadlines = (self.scheduler.next_deadline_s(), self._choosing.line.next_deadline_s())
        return min((at for at in deadlines if at is not None), default=None)

    def slot_status(self, now: float) -> list[SlotStatus]:
        """Each slot as it is now."""
        return report.slots_of(self.scheduler, self.spec.id, now)

    def queue_status(self, state: SequenceState, now: float) -> list[WaitStatus]:
        """The sequences in the line that are in `state`, next first."""
        line = report.line_of(self.scheduler, self.spec.id, state, now)
        if state is SequenceState.QUEUED:
            line += report.waiting_of(self._choosing.line.waiting(), self.spec.id, now)
        return line

    def paused_status(self, now: float) -> list[WaitStatus]:
        """The sequences that are paused."""
        paused = [*self.scheduler.paused, *self._choosing.line.paused]
        return report.waiting_of(paused, self.spec.id, now)

    # ------------------------------------------------------------ commands

    def accept(self, live: Job, now: float) -> None:
        """Put a prepared request in the line."""
        if live.to_score is not None and live.choices:
            self._choosing.accept(live, now)
            return
        self._live.add(live)
        if not live.choices:
            self._live.finish(live, now)
            return
        positions = [self.scheduler.enqueue(choice.sequence, now) for choice in live.choices.values()]
        live.position = positions[0]
        self.events.append(Queued(live.request_id, positions[0], self.scheduler.eta_s(positions[0])))
        if live.request.return_progress and (leader := live.leader) is not None:
            self.events.append(live.progress(leader, now))  # how long it is, before anything is computed
        if live.request.echo and live.request.prompt_logprobs is None:
            self.events.append(live.echo())
        for index, choice in list(live.choices.items()):
            if len(choice.sequence.tokens) >= self.prep.n_ctx:  # it began where there was more context
                self._live.end_choice(live, index, FinishReason.LENGTH, now)

    def cancel(self, request_id: str, now: float) -> None:
        """End a request with `cancelled`; an unknown id is ignored."""
        self._steps.settle(now)
        self._choosing.cancel(request_id, now)
        live = self._live.get(request_id)
        if live is None:
            return
        for index in list(live.choices):
            self._live.end_choice(live, index, FinishReason.CANCELLED, now)

    def pause(self, request_id: str, now: float) -> None:
        """Let a request stand still; an unknown id is ignored (SPEC Q17)."""
        self._steps.settle(now)
        self._choosing.pause(request_id, now)
        for sequence in self._open_sequences(request_id):
            if sequence.state is not SequenceState.PAUSED:
                self.scheduler.pause(sequence, now)
        if request_id in self._live:
            self.events.append(Paused(request_id))

    def resume(self, request_id: str, now: float) -> None:
        """Let a paused request go on; an unknown id is ignored."""
        self._steps.settle(now)
        self._choosing.resume(request_id, now)
        for sequence in self._open_sequences(request_id):
            if sequence.state is SequenceState.PAUSED:
                self.scheduler.resume(sequence, now)
        if request_id in self._live:
            self.events.append(Resumed(request_id))

    def _open_sequences(self, request_id: str) -> list[Sequence]:
        live = self._live.get(request_id)
        return [] if live is None else [choice.sequence for choice in live.choices.values()]

    def cancel_all(self, now: float) -> None:
        """End every request with `cancelled`."""
        self._steps.settle(now)
        self._choosing.cancel_all(now)
        for live in self._live:
            self.cancel(live.request_id, now)

    def evacuate(self, reason: str, now: float) -> list[Submit]:
        """It has to go: every request leaves it, to go on later from the tokens it has (SPEC M4, L5).

        What was computed of them stays in cells for `rest` to store. Clients of those that ran hear `Parked`.
        """
        self._steps.settle(now)
        return [self._send_off(live, reason, now) for live in self._live] + self._choosing.evacuate(now)

    def evacuate_waiting(self, reason: str, now: float) -> list[Submit]:
        """The same for requests of which nothing runs."""
        self._steps.settle(now)
        waiting = [live for live in self._live if not live.is_running]
        return [self._send_off(live, reason, now) for live in waiting] + self._choosing.evacuate(now)

    def _send_off(self, live: Job, reason: str, now: float) -> Submit:
        submit = live.submit(now)
        for index, choice in live.choices.items():
            if choice.sequence.is_running:
                parked = Parked(request_id=live.request_id, index=index, form=ParkForm.TOKENS, reason=reason)
                self.events.append(parked)
            self.scheduler.retire(choice.sequence, FinishReason.PREEMPTED, now)
        self._live.remove(live)
        return submit

    def hold_back(self, throttle: Throttle) -> None:
        """Let only some of its requests run from the next turn on (SPEC M4, M6)."""
        self.scheduler.throttle = self._choosing.line.throttle = throttle

    def drop_idle(self, now: float) -> None:
        """Give up every cell that nobody who runs or waits needs, and what the backend can make again."""
        self._steps.settle(now)
        self._carry_out(self.scheduler.drop_idle(now), now)
        if (scratch := self.backend.extensions.scratch) is not None:
            scratch.give_back()

    def close(self) -> None:
        """Free the native model."""
        self._steps.close()
        self._choosing.close()
        self._image_steps.close()
        self.backend.close()

    # ------------------------------------------------------------ a turn

    def schedule(self, now: float) -> None:
        """Decide who runs: deadlines, room, free slots."""
        self._choosing.expire(now)
        self._steps.finish(now)
        self._carry_out(self.scheduler.schedule(now), now)
        self._tell_positions(now)

    @property
    def has_unstored(self) -> bool:
        """Whether cells of what has ended are stored nowhere else yet."""
        return self.scheduler.allocator.has_unstored

    def rest(self, now: float) -> None:
        """There is time: store something that is only in cells."""
        self._steps.settle(now)
        self._carry_out(self.scheduler.store_idle(now), now)

    def expire(self, now: float) -> None:
        """End who is past its deadline, without a turn."""
        self._steps.settle(now)
        self._choosing.expire(now)
        self._carry_out(self.scheduler.expire(now), now)

    def step(self, now: float) -> None:
        """Plan one step over who runs, compute it and draw from its rows."""
        for sequence, error in self._image_steps.tend(now):
            if (live := self._live.get(sequence.key.request_id)) is not None:
                self._live.fail(live, error, now)
        has_readers = self.has_readers
        is_for_looking = self._image_steps.goes_first and not self.scheduler.is_owed(now)
        plan = None if is_for_looking else self.scheduler.plan()
        if plan is not None:
            self._steps.run(plan, now)
        elif self.scheduler.has_work and not self._image_steps.is_awaited:
            self._report_stall(now)
        if self._image_steps.has_work or self._choosing.line.has_work:
            self._steps.collect()  # they need the device, and how long the step took
        took_s = self._pace.now() - now
        self._steps.deliver()
        self._image_steps.look(plan, took_s)
        self._choosing.step(took_s, has_readers=has_readers)

    def _carry_out(self, schedule: Schedule, now: float) -> None:
        carry_out(schedule.ops, self.backend, self.scheduler.allocator)
        if schedule.expired or schedule.preempted or schedule.parked:
            self._steps.deliver()  # what was drawn before comes first
        for sequence in schedule.expired:
            live = self._live.get(sequence.key.request_id)
            if live is not None:
                waited = f"{now - live.arrival_s:.1f} s of its timeout_s {live.request.timeout_s}"
                error = RequestTimeoutError(f"the request took {waited}", param="timeout_s")
                self._live.fail(live, error, now)
        for sequence in schedule.preempted:
            live = self._live.get(sequence.key.request_id)
            if live is not None and sequence.key.index in live.choices:
                self.events.append(live.ended(sequence.key.index, FinishReason.PREEMPTED))
                self._live.finish_if_done(live, now)
        still = [each for each in schedule.parked if each.sequence.state is not SequenceState.DONE]
        self.events.extend(_parked(each) for each in still)
        for sequence in schedule.admitted:
            conditioner = self.backend.extensions.conditioner
            if sequence.slot is not None and conditioner is not None:
                conditioner.condition(sequence.slot, sequence.conditioning)
            if (live := self._live.get(sequence.key.request_id)) is not None:
                self.events.append(live.admitted(sequence, now))

    def _tell_positions(self, now: float) -> None:
        """Those whose place in the line has changed hear of it, now and then (SPEC Q14)."""
        if not self.scheduler.queue or now - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now
        etas_s = self.scheduler.etas_s()
        for position, sequence in enumerate(self.scheduler.queue):
            live = self._live[sequence.key.request_id]
            is_told_of = sequence.state is SequenceState.QUEUED and sequence is live.leader
            if is_told_of and live.position != position:
                live.position = position
                self.events.append(Queued(live.request_id, position, etas_s[position]))

    def _report_stall(self, now: float) -> None:
        """Work exists and nothing can be planned (Q15): end the head of the line with all counters."""
        head = (*self.scheduler.queue, *self.scheduler.slots.running)[0]
        self._num_stalls_total += 1
        counters = self.stats()
        error = SchedulerStalledError(f"no step can be planned: {head!r}, {counters}", counters=counters)
        log.error("%s", error)
        self._live.fail(self._live[head.key.request_id], error, now)


def _parked(parking: Parking) -> Parked:
    sequence = parking.sequence
    return Parked(
        request_id=sequence.key.request_id,
        index=sequence.key.index,
        form=sequence.form or ParkForm.TOKENS,
        reason=parking.reason,
    )
