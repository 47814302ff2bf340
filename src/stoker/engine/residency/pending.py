"""Requests that no runner holds: they wait until their model is in memory, or are being tokenised.

Owns what happens to them until they are placed, and the questions about text that need a model. The requests
themselves stand in the engine's table; which model is loaded and when is residency's decision.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stoker.engine.jobs.job import Job
from stoker.errors import BackendChangedError, InsufficientMemoryError, TooHotError
from stoker.ipc.events import Preparing, Queued
from stoker.ipc.status import WaitStatus
from stoker.kv.sequence import ParkForm
from stoker.wording import count_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from stoker.engine.jobs.preparations import Preparations
    from stoker.engine.jobs.prepare import PrepContext
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.residency.load import Load
    from stoker.engine.runners.runner import ModelRunner
    from stoker.errors import StokerError
    from stoker.ipc.commands import Submit, TextQuestion


def arrival_of(submit: Submit) -> float:
    """When the caller submitted it, on this process's clock."""
    return time.monotonic() - submit.age_s


class PendingRequests:
    """Every request that is on its way into a model.

    Args:
        preparations: tokenise.
        jobs: the engine's requests.
    """

    def __init__(self, preparations: Preparations, jobs: JobTable) -> None:
        self._preparations = preparations
        self._jobs = jobs
        self._asks: dict[str, list[TextQuestion]] = {}

    def __repr__(self) -> str:
        num_pending = sum(job.queue is None for job in self._jobs)
        return f"<PendingRequests {num_pending}, questions {sum(map(len, self._asks.values()))}>"

    # ------------------------------------------------------------ questions

    def of(self, model: str) -> Collection[Job]:
        """The requests for that model, in order of arrival."""
        return self._jobs.pending(model)

    def waiting(self, model: str) -> list[Job]:
        """Those that wait for it to be loaded."""
        return [job for job in self.of(model) if job.is_waiting]

    def wants(self, model: str) -> bool:
        """Whether a request or a question waits for that model."""
        return bool(self._asks.get(model)) or any(job.is_waiting for job in self.of(model))

    def num_preparing(self, model: str) -> int:
        """Requests that use the model's vocabulary on a worker now."""
        return sum(job.preparation is not None for job in self.of(model))

    def uses(self, context: PrepContext) -> bool:
        """Whether a worker still reads that model's vocabulary, for a request that was given up too."""
        return self._preparations.uses(context)

    def waiting_status(self) -> list[WaitStatus]:
        """Those that wait for their model, each with its place among those of its model."""
        places: dict[str, int] = {}
        found = []
        for job in self._jobs:
            if job.is_waiting:
                places[job.model] = places.get(job.model, -1) + 1
                found.append(_status(job, places[job.model]))
        return found

    def paused_status(self) -> list[WaitStatus]:
        """Those that are paused."""
        return [_status(job, None) for job in self._jobs if job.queue is None and job.is_paused]

    # ------------------------------------------------------------ coming and going

    def enter(self, submit: Submit, runner: ModelRunner | None) -> None:
        """Take a request in: to be tokenised, or, without a runner, to wait for its model."""
        job = Job(submit, arrival_of(submit))
        self._jobs.add(job)
        if runner is not None:
            self._prepare(job, runner)
        else:
            place = len(self.of(job.model)) - 1
            self._jobs.events.append(Queued(job.request_id, place, awaits_model=True))

    def ask(self, ask: TextQuestion, runner: ModelRunner | None) -> None:
        """A question that needs a model's vocabulary; without a runner it waits for the model."""
        if runner is None:
            self._asks.setdefault(ask.model, []).append(ask)
        else:
            self._preparations.answer(ask, runner.prep)

    def let_in(self, runner: ModelRunner) -> None:
        """A model is in memory: what waited for it is tokenised and answered."""
        for job in tuple(self.of(runner.spec.id)):
            if job.preparation is None:
                self._jobs.events.append(Preparing(job.request_id))
                self._prepare(job, runner)
        for ask in self._asks.pop(runner.spec.id, []):
            self._preparations.answer(ask, runner.prep)

    def _prepare(self, job: Job, runner: ModelRunner) -> None:
        load = runner.load
        if (error := cannot_go_on(job.submit, load)) is not None:
            self._jobs.fail(job, error, time.monotonic())
            return
        if job.submit.made_for and load is not None:  # from here on its tokens are this way's
            job.submit = replace(job.submit, made_for=load.way.served_by, vocabulary=load.vocabulary.whole)
        job.preparation = self._preparations.prepare(job.submit, runner.prep, job.arrival_s)

    def prepared_in_vain(self, job: Job, runner: ModelRunner | None) -> None:
        """Its model went while it was tokenised: it waits for it, or is tokenised for the new one."""
        job.preparation = None
        if runner is not None:
            self._prepare(job, runner)

    def turn_away(self, model: str, error: StokerError, now: float) -> list[TextQuestion]:
        """The model cannot be had: those that wait fail, the questions are returned to be answered.

        What has begun waits on where only memory is missing (SPEC M4): its output is not thrown away.
        """
        may_pass = isinstance(error, InsufficientMemoryError | TooHotError)
        for job in tuple(self.of(model)):
            if job.preparation is None and not (job.has_begun and may_pass):
                self._jobs.fail(job, error, now)
        return self._asks.pop(model, [])

    def drop_questions(self) -> None:
        """Forget the questions: the engine ends, and the client asks the next one."""
        self._asks.clear()


def _status(job: Job, position: int | None) -> WaitStatus:
    return WaitStatus(
        request_id=job.request_id,
        priority=job.request.priority,
        model=job.model,
        position=position,
        form=ParkForm.TOKENS if job.has_begun else None,
    )


def cannot_go_on(submit: Submit, load: Load | None) -> StokerError | None:
    """Why a request ends, as another backend or file serves its model than it was made for; None: it goes on.

    Token ids mean the same where the vocabulary is the same. Text can be tokenised again, but that of a chat
    holds what one model's template wrote (docs/adr/0032).

    Args:
        submit: the request.
        load: how its model came into memory; None: nothing is known of that.
    """
    if load is None or submit.made_for in {"", load.way.served_by}:
        return None
    if submit.vocabulary and submit.vocabulary == load.vocabulary.whole:
        return None
    num_tokens = sum(map(len, submit.generated))
    if num_tokens:
        what = f"{count_text(num_tokens, 'token')} were delivered, which it cannot continue"
    elif _has_ids(submit):
        what = "the request holds token ids, which mean something else to it"
    elif submit.request.is_chat and not _has_same_template(submit, load):
        what = "the conversation was laid out for another chat template"
    else:
        return None
    text = f"{submit.request.model} is served by {load.way.served_by} now, not by {submit.made_for}"
    return BackendChangedError(
        f"{text}: {what}; ask again",
        retry_after_s=1.0,
        before=submit.made_for,
        after=load.way.served_by,
        num_tokens=num_tokens,
    )


def _has_ids(submit: Submit) -> bool:
    return not isinstance(submit.request.prompt, str) or bool(submit.request.sampling.logit_bias)


def _has_same_template(submit: Submit, load: Load) -> bool:
    """Whether the way that it was made for has the template of the one that serves."""
    made_for = [way for way in load.spec.ways if way.served_by == submit.made_for]
    return bool(made_for) and made_for[0].chat_template == load.way.chat_template
