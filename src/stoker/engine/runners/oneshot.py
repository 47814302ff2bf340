"""One-shot work: requests that hold no slot and end with one `StateReady` (SPEC D5, K2, K4, Q13).

`OneShotRunner` is an encoder or reranker in memory: a call carries as many whole texts as the step target
allows, so that an interactive request for another model waits no longer than one step. `ChoiceSteps` are the
requests to choose of a generating model, computed slice by slice between its steps. Both keep their requests
in a `OneShotQueue`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.protocol.scoring import LEAST_SLICE, ScoringLane
from stoker.engine.jobs.candidates import ScoringPass
from stoker.engine.jobs.prepare import PrepContext
from stoker.engine.runners.queue import OneShotQueue, shared_text
from stoker.engine.runners.runner import Contender, Flight
from stoker.errors import (
    ContextLengthError,
    InvalidRequestError,
    StepFailedError,
    StokerError,
    UnsupportedError,
)
from stoker.ipc.events import StateReady
from stoker.ipc.model import Policy, Pooling
from stoker.ipc.request import FinishReason, StateOutput
from stoker.ipc.usage import Tensor
from stoker.sampling.logprobs import Likelihoods
from stoker.sampling.truncation import Workspace
from stoker.scheduler.cost import StepCost, StepTally
from stoker.scheduler.slice_budget import MIN_SLICE_S, SLICE_SHARE, SliceBudget

if TYPE_CHECKING:
    from collections.abc import Sequence as Several

    from stoker.backends.protocol.backend import Backend, Rows
    from stoker.backends.protocol.encoding import Encoder
    from stoker.engine.jobs.job import Job, JobQueue
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.residency.load import Load
    from stoker.engine.threads.timer import StepTimer
    from stoker.ipc.model import ModelSpec
    from stoker.ipc.request import Priority
    from stoker.ipc.status import ModelRoom, SlotStatus
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.queue import Throttle
    from stoker.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

_TARGETS = {Policy.LATENCY: 1.0, Policy.BALANCED: 3.0, Policy.THROUGHPUT: float("inf")}
_NO_BOUND = 2**31  # preparation leaves room for an answer, which a text to embed has none of
_FLOATS = np.dtype("<f4")


def _time_of(num_tokens: int, cost: StepCost, n_batch: int) -> float | None:
    """Seconds that so many tokens take, in full calls; None: nothing was measured yet."""
    call_s = cost.predict(n_batch)
    return None if call_s is None else call_s * num_tokens / n_batch


def _finish(jobs: JobTable, job: Job, tensor: Tensor, now: float) -> None:
    """The result, and the end of its request."""
    ready = StateReady(request_id=job.request_id, num_tokens=len(job.prompt), tensors=[tensor])
    jobs.events.append(ready)
    jobs.end_choice(job, 0, FinishReason.LENGTH, now)


class OneShotRunner:
    """An encoder in memory; see `ModelRunner`. It keeps nothing of a text from one call to the next.

    Attributes:
        load: how it came into memory.
        degraded: what it was given less of than was asked for.
        allowance_s: what a call may take beside readers of another model's text; None: its own target.
        tally: what its calls did since that was asked last.
    """

    def __init__(self, spec: ModelSpec, encoder: Encoder, timer: StepTimer, jobs: JobTable) -> None:
        self.spec = spec
        self.backend = encoder
        self.load: Load | None = None
        self.degraded: tuple[str, ...] = ()
        self.allowance_s: float | None = None
        self.flight = Flight()
        self.stepped_s, self.num_new = 0.0, 0  # nothing is counted, as it never gathers
        self.gathers = False  # texts of a call are together as it is
        self._timer = timer
        self._jobs = jobs
        self.tally = StepTally()
        self._cost = StepCost()
        self._timed = timer.join(encoder, self._cost)
        limits = encoder.capabilities
        self.queue = OneShotQueue(
            spec.max_queue,
            spec.background_patience_s,
            wait_s=lambda num_tokens: _time_of(num_tokens, self._cost, limits.n_batch),
            num_tokens=lambda sequence: len(sequence.tokens),
        )
        self.prep = PrepContext(
            encoder.vocabulary,
            limits.n_vocab,
            _NO_BOUND,
            Workspace(limits.n_vocab),
            model=spec.id,
            fingerprint=limits.fingerprint,
            scores_pairs=self._is_reranker,
            max_text_tokens=limits.n_ctx,
        )

    def __repr__(self) -> str:
        return f"<OneShotRunner {self.spec.id} {self.queue!r}>"

    @property
    def _is_reranker(self) -> bool:
        return self.backend.pooling == Pooling.RANK

    # ------------------------------------------------------------ questions

    @property
    def queues(self) -> tuple[JobQueue, ...]:
        """The texts."""
        return (self.queue,)

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        return self.queue.has_work

    @property
    def has_people(self) -> bool:
        """Whether an interactive request waits for an answer of it."""
        return self.queue.has_people

    @property
    def has_unstored(self) -> bool:
        """It keeps nothing that could be stored."""
        return False

    @property
    def is_cold(self) -> bool:
        """Its calls are of any length: there is nothing to warm."""
        return False

    @property
    def num_cells(self) -> tuple[int, int]:
        """It has none."""
        return 0, 0

    @property
    def running(self) -> list[Sequence]:
        """What it keeps of texts goes on from nothing stored."""
        return []

    @property
    def num_computing(self) -> tuple[int, int]:
        """Texts of the call under way; none writes."""
        return len(self.queue.chosen), 0

    def contender(self) -> Contender:
        """How it takes part in the choice of the next turn."""
        return Contender(self.spec.id, is_encoder=True)

    def is_owed(self, now: float) -> bool:
        """Whether background of it has waited longer than its patience."""
        return self.queue.is_owed(now)

    def check_queue(self, priority: Priority, num_arriving: int) -> None:
        """Raises QueueFullError when its queue is at its bound; `num_arriving` are on their way."""
        self.queue.check_queue(priority, num_arriving)

    def stats(self) -> dict[str, float]:
        """Every counter, for status pages and bug reports."""
        return self.queue.stats()

    def activity(self, now: float) -> dict[str, float]:  # noqa: ARG002 - as `ModelRunner` has it
        """It has no steps."""
        return {}

    def room(self) -> ModelRoom | None:
        """It has no cells."""
        return None

    def slot_status(self, now: float) -> list[SlotStatus]:  # noqa: ARG002 - as `ModelRunner` has it
        """It has no slots."""
        return []

    # ------------------------------------------------------------ commands

    def accept(self, job: Job, now: float) -> None:
        """Put a prepared request in its queue.

        Raises:
            UnsupportedError: it asks for text, or the model gives no vectors.
            ContextLengthError: its text is too long.
        """
        if job.choices:
            self._check(job)
        self._jobs.place(job, self.queue, self, now)

    def _check(self, job: Job) -> None:
        name, n_ctx = self.spec.id, self.backend.capabilities.n_ctx
        wanted = job.request.state_output
        if wanted not in {StateOutput.EMBED, StateOutput.SCORE}:
            raise UnsupportedError(f"{name} is an encoder: it embeds texts and generates none", param="model")
        if self._is_reranker and wanted is StateOutput.EMBED:
            raise UnsupportedError(
                f"{name} is a reranker: it scores texts, it gives no vectors", param="model"
            )
        if job.request.n > 1:
            raise InvalidRequestError(f"a text has one vector, {job.request.n} were asked for", param="n")
        if len(job.prompt) > n_ctx:
            param = "documents" if wanted is StateOutput.SCORE else "input"
            raise ContextLengthError.over("the text", len(job.prompt), n_ctx, param=param)

    def settle(self, now: float) -> None:
        """Nothing is in flight between turns."""

    def hold_back(self, throttle: Throttle) -> None:
        """Let only some of its requests run from the next turn on (SPEC M4, M6)."""
        self.queue.throttle = throttle

    def drop_idle(self, now: float) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        """Free the native model."""
        self._timer.leave(self._timed)
        self.backend.close()

    # ------------------------------------------------------------ a turn

    def schedule(self, now: float) -> None:
        """Choose the texts of the next call."""
        limits, target_s = self.backend.capabilities, self.spec.target_step_ms / 1000
        target_s *= _TARGETS[self.spec.policy]
        max_tokens = self._cost.tokens_now(self.spec.max_step_ms / 1000, limits.n_batch)
        if self.allowance_s is not None:
            target_s = min(target_s, self.allowance_s)
        if target_s != float("inf"):
            max_tokens = min(max_tokens, self._cost.tokens_within(target_s, limits.n_batch))
        for sequence in self.queue.choose(max_tokens, limits.num_sequences, now):
            job = self._jobs[sequence.key.request_id]
            self._jobs.events.append(job.admitted(sequence, now))
        self._jobs.publish_hindrances(self.queue.hinder_rest())
        self._jobs.publish_positions(self.spec.id, self.queues, now)

    def step(self, now: float) -> None:
        """Compute the texts that were chosen."""
        if self.queue.chosen:
            self._run(list(self.queue.chosen), now)

    def rest(self, now: float) -> None:
        """It has nothing to store."""

    def warm(self, now: float) -> None:
        """It has nothing to warm."""

    def _run(self, texts: Several[Sequence], now: float) -> None:
        """One call; a failing one is halved until it fails its culprit alone (SPEC Q12)."""
        different = list(dict.fromkeys(map(shared_text, texts)))
        num_tokens = sum(len(tokens) for _, tokens in different)
        self._timer.begin(num_tokens)
        try:
            found = self.backend.encode([tokens for _, tokens in different])
        except StepFailedError as error:
            self._timer.abandon()
            if len(texts) == 1:
                job = self._jobs[texts[0].key.request_id]
                log.warning("encoding failed for %r: %s", job, error)
                self._jobs.fail(job, error, now)
                return
            middle = len(texts) // 2
            self._run(texts[:middle], now)
            self._run(texts[middle:], now)
        else:
            self.tally.took(self._timer.end(self._timed, num_tokens))
            self.tally.num_prompt_tokens += num_tokens
            vectors = dict(zip(different, found, strict=True))
            for sequence in texts:
                self._deliver(sequence, vectors[shared_text(sequence)], self._timer.now())

    def _deliver(self, sequence: Sequence, vector: Rows, now: float) -> None:
        job = self._jobs[sequence.key.request_id]
        if not np.isfinite(vector).all():
            error = StepFailedError("the model's vector holds what is no finite number")
            self._jobs.fail(job, error, now)
            return
        name = "scores" if self._is_reranker else "embedding"
        _finish(self._jobs, job, Tensor(name, vector.shape, vector.astype(_FLOATS).tobytes()), now)


class ChoiceSteps:
    """The requests to choose of one generating model (SPEC D5).

    They hold no slots and no cells of the pool. A request stays in the queue until it is done, so that one of
    a higher class goes first at the next slice, and goes on from what was found of it.

    Args:
        backend: predicts tokens of texts.
        scheduler: of the model's ordinary work, which goes first where an interactive request waits for it.
        pace: surrounds native calls.
        jobs: the engine's requests.
    """

    def __init__(self, backend: Backend, scheduler: Scheduler, timer: StepTimer, jobs: JobTable) -> None:
        limits = scheduler.limits
        self._backend = backend
        self._scheduler = scheduler
        self._timer = timer
        self._jobs = jobs
        self._budget = SliceBudget(max(limits.target_step_s, MIN_SLICE_S))
        self._has_readers = False
        self._cost = StepCost()
        self._timed = timer.join(backend, self._cost)
        self.queue = OneShotQueue(
            limits.max_queue,
            limits.background_patience_s,
            wait_s=self._wait_s,
            num_tokens=lambda sequence: jobs[sequence.key.request_id].num_to_read,
        )
        self.queue.throttle = scheduler.throttle

    def __repr__(self) -> str:
        return f"<ChoiceSteps {self.queue!r}>"

    def stats(self) -> dict[str, float]:
        """Every counter."""
        own = {"num_choosing": len(self.queue), "num_choosing_paused": len(self.queue.paused)}
        return self.queue.stats() | own

    def _wait_s(self, num_tokens: int) -> float | None:
        """Seconds that so many tokens take; beside readers slices get a part of the time only."""
        alone_s = _time_of(num_tokens, self._cost, self._backend.capabilities.n_batch)
        return alone_s / SLICE_SHARE if alone_s is not None and self._has_readers else alone_s

    def begin(self, job: Job) -> None:
        """Prepare its passes: after its prompt, and where it is calibrated from the initial state.

        Raises:
            UnsupportedError: the model predicts no tokens of a prompt.
        """
        assert job.to_score is not None, f"{job!r} has no candidates"
        assert job.leader is not None, f"{job!r} has ended"
        texts, sequence = job.to_score.texts, job.leader
        lane = ScoringLane.BACKGROUND_CHOICES if sequence.is_background else ScoringLane.CHOICES
        lengths, namespace = [len(text) for text in texts], sequence.conditioning.namespace
        scorer = self._backend.extensions.scorer
        if scorer is None:
            description = self._backend.capabilities.description
            raise UnsupportedError(f"{description} scores no texts", param="model")
        prompts = [tuple(job.prompt)] + ([job.to_score.initial] if job.to_score.initial else [])
        job.passes = [
            ScoringPass(scorer.scoring(each, texts, namespace, lane), Likelihoods(lengths))
            for each in prompts
        ]

    def close(self) -> None:
        """The model is unloaded."""
        self._timer.leave(self._timed)

    # ------------------------------------------------------------ a turn

    def step(self, took_s: float, *, has_readers: bool) -> None:
        """Compute for a slice, if it is time for one, after an ordinary step that took so long.

        `has_readers`: a caller read a token of that step, so slices get a part of the time only (SPEC Q8).
        """
        self._has_readers = has_readers
        if has_readers:
            self._budget.stepped(took_s)
        else:
            self._budget.idle()
        budget_s = self._budget.next_s()
        if not budget_s:  # before one is chosen, which counts as the turn that background is owed
            return
        chosen = self.queue.first(self._timer.now(), lets_background=not self._scheduler.has_people)
        if chosen is None:
            self._jobs.publish_hindrances(self.queue.hinder_rest())
            return
        job, begun_s = self._jobs[chosen.key.request_id], self._timer.now()
        if self.queue.begin(chosen, begun_s):
            self._jobs.events.append(job.admitted(chosen, begun_s))
        self._jobs.publish_hindrances(self.queue.hinder_rest())
        try:
            self._compute(job, budget_s)
        except StokerError as error:
            log.warning("choices failed for %r: %s", job, error)
            self._jobs.fail(job, error, self._timer.now())
        self._budget.spent(self._timer.now() - begun_s)

    def _compute(self, job: Job, budget_s: float) -> None:
        """One native call at least, and more while there is time."""
        until_s, left_s = self._timer.now() + budget_s, budget_s
        while current := next((each for each in job.passes if not each.scoring.is_done), None):
            if left_s <= 0:
                return
            num_tokens = self._cost.tokens_within(left_s, self._num_most)
            self._advance(current, max(LEAST_SLICE, num_tokens))
            left_s = until_s - self._timer.now()
        found = np.array([each.found.means() for each in job.passes], _FLOATS)
        if np.isnan(found).any():
            raise StepFailedError("the model's logits hold what is no number")
        _finish(self._jobs, job, Tensor("choices", found.shape, found.tobytes()), self._timer.now())

    @property
    def _num_most(self) -> int:
        """Tokens of a native call, whatever it is for."""
        n_batch = self._backend.capabilities.n_batch
        return self._cost.tokens_now(self._scheduler.limits.max_step_s, n_batch)

    def _advance(self, current: ScoringPass, max_tokens: int) -> None:
        num_tokens = current.scoring.num_next(max_tokens)
        if not num_tokens:  # known from an earlier call
            found = current.scoring.advance(max_tokens)
        else:
            self._timer.begin(num_tokens)
            try:
                found = current.scoring.advance(max_tokens)
            except BaseException:
                self._timer.abandon()
                raise
            self._scheduler.tally.took(self._timer.end(self._timed, num_tokens))
            self._scheduler.tally.num_prompt_tokens += num_tokens
        for each in found:
            current.found.add(each.text, each.rows, each.tokens)
