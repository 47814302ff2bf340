"""Choices of one loaded model on their way to scores (SPEC D5), between the model's ordinary steps.

Owns their line, which of them gets the next slice and their endings. They hold no slots and no cells of the
pool; what is computed for a candidate is the backend's business. A request stays in the line until it is
done, so that one of a higher class goes first at the next slice, and goes on from what was found of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.backends.protocol.scoring import LEAST_SLICE, ScoringLane
from stoker.engine.runners.queue import TextQueue
from stoker.errors import RequestTimeoutError, StepFailedError, StokerError, UnsupportedError
from stoker.ipc.commands import Submit
from stoker.ipc.events import Event, Failed, Paused, Queued, Resumed, StateReady
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Tensor
from stoker.kv.sequence import Sequence, SequenceState
from stoker.sampling.logprobs import Likelihoods
from stoker.scheduler.budget import MIN_SLICE_S, SliceBudget
from stoker.scheduler.cost import StepCost

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.scoring import Scoring
    from stoker.engine.jobs.candidates import ToScore
    from stoker.engine.jobs.job import Job
    from stoker.engine.threads.pace import Pace
    from stoker.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

_FLOATS = np.dtype("<f4")


@dataclass(slots=True)
class _Pass:
    """The candidates after one prompt."""

    scoring: Scoring
    found: Likelihoods


class _ChoiceJob:
    """One request: its candidates after the prompt, then, where it is calibrated, from the initial state."""

    def __init__(self, backend: Backend, live: Job, scored: ToScore) -> None:
        self.live = live
        self.num_tokens = scored.num_tokens
        self.is_begun = False
        prompts = [tuple(live.prompt)] + ([scored.initial] if scored.initial else [])
        lengths = [len(text) for text in scored.texts]
        namespace = self.sequence.conditioning.namespace
        lane = ScoringLane.BACKGROUND_CHOICES if self.sequence.is_background else ScoringLane.CHOICES
        scorer = backend.extensions.scorer
        if scorer is None:
            raise UnsupportedError(f"{backend.capabilities.description} scores no texts", param="model")
        self.passes = [
            _Pass(scorer.scoring(each, scored.texts, namespace, lane), Likelihoods(lengths))
            for each in prompts
        ]

    @property
    def sequence(self) -> Sequence:
        """What stands in the line for it."""
        (choice,) = self.live.choices.values()
        return choice.sequence

    @property
    def open(self) -> _Pass | None:
        """Where it goes on; None: it is done."""
        return next((each for each in self.passes if not each.scoring.is_done), None)

    def tensor(self) -> Tensor:
        """Mean nats of each candidate, float32 (num_passes, num_candidates)."""
        found = np.array([each.found.means() for each in self.passes], _FLOATS)
        if np.isnan(found).any():
            raise StepFailedError("the model's logits hold what is no number")
        return Tensor("choices", found.shape, found.tobytes())


class ChoiceRunner:
    """See the module.

    Args:
        backend: predicts tokens of texts.
        scheduler: of the model's ordinary work, which goes first where somebody waits for it.
        pace: surrounds native calls.
        events: where to put what has happened.
    """

    def __init__(self, backend: Backend, scheduler: Scheduler, pace: Pace, events: list[Event]) -> None:
        limits = scheduler.limits
        self.line = TextQueue(limits.max_queue, limits.background_patience_s)
        self._backend = backend
        self._scheduler = scheduler
        self._pace = pace
        self._events = events
        self._budget = SliceBudget(max(limits.target_step_s, MIN_SLICE_S))
        self._jobs: dict[str, _ChoiceJob] = {}
        self._cost = StepCost()
        self._runner = pace.join(backend, self._cost)

    def __repr__(self) -> str:
        return f"<ChoiceRunner {self.line!r}>"

    def stats(self) -> dict[str, float]:
        """Every counter."""
        return {"num_choosing": len(self.line), "num_choosing_paused": len(self.line.paused)}

    def contexts(self) -> list[int]:
        """Tokens of context that each of its requests needs."""
        return [job.live.num_context for job in self._jobs.values()]

    # ------------------------------------------------------------ commands

    def accept(self, live: Job, now: float) -> None:
        """Put a request to choose in the line."""
        assert live.to_score is not None, f"{live!r} has no candidates"
        job = self._jobs[live.request_id] = _ChoiceJob(self._backend, live, live.to_score)
        live.position = self.line.enqueue(job.sequence, now)
        self._events.append(Queued(live.request_id, live.position, None))

    def cancel(self, request_id: str, now: float) -> None:
        """End a request with `cancelled`; an unknown id is ignored."""
        if (job := self._jobs.get(request_id)) is not None:
            self._end(job, FinishReason.CANCELLED, now)

    def cancel_all(self, now: float) -> None:
        """End every request with `cancelled`."""
        for request_id in list(self._jobs):
            self.cancel(request_id, now)

    def pause(self, request_id: str, now: float) -> None:
        """Let a request stand still; an unknown id is ignored (SPEC Q17)."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        if job.sequence.state is not SequenceState.PAUSED:
            self.line.pause(job.sequence, now)
        self._events.append(Paused(request_id))

    def resume(self, request_id: str, now: float) -> None:
        """Let a paused request go on; an unknown id is ignored."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        if job.sequence.state is SequenceState.PAUSED:
            self.line.resume(job.sequence, now)
        self._events.append(Resumed(request_id))

    def evacuate(self, now: float) -> list[Submit]:
        """Every request leaves, to be computed anew elsewhere."""
        return [self._send_off(job, now) for job in tuple(self._jobs.values())]

    def _send_off(self, job: _ChoiceJob, now: float) -> Submit:
        submit = job.live.submit(now)
        self._retire(job, FinishReason.PREEMPTED, now)
        job.live.close()
        return submit

    def close(self) -> None:
        """The model goes."""
        self._pace.leave(self._runner)

    # ------------------------------------------------------------ a turn

    def expire(self, now: float) -> None:
        """End who is past its deadline."""
        for sequence in self.line.expire(now):
            job = self._jobs[sequence.key.request_id]
            waited = f"{now - job.live.arrival_s:.1f} s of its timeout_s {job.live.request.timeout_s}"
            self._fail(job, RequestTimeoutError(f"the request took {waited}", param="timeout_s"), now)

    def step(self, took_s: float, *, has_readers: bool) -> None:
        """Compute for a slice, if it is time for one, after an ordinary step that took so long.

        `has_readers`: somebody read a token of that step, so slices get a part of the time only (SPEC Q8).
        """
        if has_readers:
            self._budget.stepped(took_s)
        else:
            self._budget.idle()
        budget_s = self._budget.next_s()
        if not budget_s:  # before one is chosen, which counts as the turn that background is owed
            return
        chosen = self.line.first(self._pace.now(), lets_jobs=not self._scheduler.has_people)
        if chosen is None:
            return
        job, begun_s = self._jobs[chosen.key.request_id], self._pace.now()
        if not job.is_begun:
            job.is_begun = True
            self._events.append(job.live.admitted(job.sequence, begun_s))
        try:
            self._compute(job, budget_s)
        except StokerError as error:
            log.warning("choices failed for %r: %s", job.live, error)
            self._fail(job, error, self._pace.now())
        self._budget.spent(self._pace.now() - begun_s)

    def _compute(self, job: _ChoiceJob, budget_s: float) -> None:
        """One native call at least, and more while there is time."""
        until_s, left_s = self._pace.now() + budget_s, budget_s
        while (current := job.open) is not None:
            if left_s <= 0:
                return
            self._advance(current, max(LEAST_SLICE, self._num_tokens(left_s)))
            left_s = until_s - self._pace.now()
        ready = StateReady(
            request_id=job.live.request_id, num_tokens=len(job.live.prompt), tensors=[job.tensor()]
        )
        self._events.append(ready)
        self._end(job, FinishReason.LENGTH, self._pace.now())

    def _num_tokens(self, left_s: float) -> int:
        return self._cost.tokens_within(left_s, self._backend.capabilities.n_batch)

    def _advance(self, current: _Pass, max_tokens: int) -> None:
        num_tokens = current.scoring.num_next(max_tokens)
        if not num_tokens:  # known from an earlier call
            found = current.scoring.advance(max_tokens)
        else:
            self._pace.begin(num_tokens)
            try:
                found = current.scoring.advance(max_tokens)
            except BaseException:
                self._pace.abandon()
                raise
            self._pace.end(self._runner, num_tokens)
        for each in found:
            current.found.add(each.text, each.rows, each.tokens)

    # ------------------------------------------------------------ endings

    def _retire(self, job: _ChoiceJob, reason: FinishReason, now: float) -> None:
        self.line.retire(job.sequence, reason, now)
        del self._jobs[job.live.request_id]

    def _end(self, job: _ChoiceJob, reason: FinishReason, now: float) -> None:
        self._retire(job, reason, now)
        self._events.append(job.live.ended(0, reason))
        finished = job.live.finished(now)
        num_read = finished.usage.prompt_tokens + job.num_tokens
        usage = msgspec.structs.replace(finished.usage, prompt_tokens=num_read)
        self._events.append(msgspec.structs.replace(finished, usage=usage))

    def _fail(self, job: _ChoiceJob, error: StokerError, now: float) -> None:
        self._retire(job, FinishReason.ERROR, now)
        job.live.close()
        self._events.append(Failed(job.live.request_id, error.info()))
