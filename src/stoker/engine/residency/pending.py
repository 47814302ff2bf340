"""Requests on their way into a model: they wait until it is in memory, or are being tokenised.

Owns them from their arrival until they stand in the model's line, and again where the model has to go while
they run. Whether and when a model is loaded is residency's business; what it does with them its resident's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker.engine.jobs.prepare import arrival_of
from stoker.errors import InsufficientMemoryError, RequestTimeoutError, TooHotError
from stoker.ipc.commands import Cancel, Pause, Resume, Submit
from stoker.ipc.events import Delta, Failed, Finished, Paused, Preparing, Queued, Resumed
from stoker.ipc.request import FinishReason, Priority
from stoker.ipc.status import WaitStatus
from stoker.ipc.usage import Timings, Usage
from stoker.kv.sequence import ParkForm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stoker.engine.jobs.preparations import Preparation
    from stoker.engine.residency.workers import Workers
    from stoker.engine.runners.runner import ModelRunner
    from stoker.errors import StokerError
    from stoker.ipc.commands import TextQuestion
    from stoker.ipc.events import Event


@dataclass(slots=True, eq=False)
class Pending:
    """One request that is not in a model's line.

    Attributes:
        preparation: its model is there, and a worker tokenises it.
        is_paused: it is to stand still, so it needs no model for now.
    """

    submit: Submit
    arrival_s: float
    is_paused: bool = False
    preparation: Preparation | None = None

    @property
    def is_preparing(self) -> bool:
        """Whether a worker tokenises it."""
        return self.preparation is not None

    @property
    def has_begun(self) -> bool:
        """Whether it has been in a model's line before: it is not refused any more."""
        return bool(self.submit.generated)

    @property
    def is_interactive(self) -> bool:
        """Whether somebody waits for its answer."""
        return self.submit.request.priority is Priority.INTERACTIVE

    @property
    def deadline_s(self) -> float | None:
        """When it has to have ended, on the engine's clock."""
        timeout_s = self.submit.request.timeout_s
        return None if timeout_s is None else self.arrival_s + timeout_s


class PendingRequests:
    """Every request that is on its way.

    Args:
        workers: tokenise.
        events: what happens is told here.
    """

    def __init__(self, workers: Workers, events: list[Event]) -> None:
        self._workers = workers
        self._events = events
        self._visitors: dict[str, Pending] = {}
        self._asks: dict[str, list[TextQuestion]] = {}

    def __repr__(self) -> str:
        return f"<PendingRequests {len(self._visitors)}, questions {sum(map(len, self._asks.values()))}>"

    # ------------------------------------------------------------ questions

    def waiting(self, model: str) -> list[Pending]:
        """Those that wait for that model to be loaded, in order of arrival."""
        return [v for v in self._of(model) if not v.is_preparing and not v.is_paused]

    def wants(self, model: str) -> bool:
        """Whether anybody waits for that model."""
        return bool(self._asks.get(model)) or bool(self.waiting(model))

    @property
    def has_requests(self) -> bool:
        """Whether anybody is on the way; those that are paused are not counted."""
        return any(not visitor.is_paused for visitor in self._visitors.values())

    def num_preparing(self, model: str) -> int:
        """Requests that use the model's vocabulary on a worker just now."""
        return sum(visitor.is_preparing for visitor in self._of(model))

    def num_total(self, model: str) -> int:
        """Requests on their way into that model."""
        return len(list(self._of(model)))

    def contexts(self, model: str) -> list[int]:
        """Tokens of context that each request on its way into that model may come to hold; 0: not known."""
        return [visitor.submit.num_context for visitor in self._of(model)]

    def num_being_prepared(self) -> int:
        """The same over all models."""
        return sum(visitor.is_preparing for visitor in self._visitors.values())

    def status(self) -> list[WaitStatus]:
        """Those that wait for their model, for status pages: each with its place among those of its model."""
        places: dict[str, int] = {}
        told = []
        for visitor in self._visitors.values():
            request = visitor.submit.request
            if not (visitor.is_preparing or visitor.is_paused):
                places[request.model] = places.get(request.model, -1) + 1
                told.append(
                    WaitStatus(
                        request_id=visitor.submit.request_id,
                        priority=request.priority,
                        model=request.model,
                        position=places[request.model],
                        form=ParkForm.TOKENS if visitor.has_begun else None,
                    )
                )
        return told

    def next_deadline_s(self) -> float | None:
        """When the first passes its deadline."""
        deadlines = (visitor.deadline_s for visitor in self._visitors.values())
        return min((at for at in deadlines if at is not None), default=None)

    def _of(self, model: str) -> Iterator[Pending]:
        return (v for v in self._visitors.values() if v.submit.request.model == model)

    # ------------------------------------------------------------ coming and going

    def enter(self, submit: Submit, runner: ModelRunner | None) -> None:
        """Take a request in: to be tokenised, or, without a resident, to wait for its model."""
        visitor = Pending(submit, arrival_of(submit), submit.is_paused)
        self._visitors[submit.request_id] = visitor
        if runner is not None:
            self._prepare(visitor, runner)
            return
        place = self.num_total(submit.request.model) - 1
        self._events.append(Queued(submit.request_id, place))

    def come_back(self, submits: Iterable[Submit]) -> None:
        """Their model has gone: they wait for it with what they had."""
        for submit in submits:
            self._visitors[submit.request_id] = Pending(submit, arrival_of(submit), submit.is_paused)

    def ask(self, ask: TextQuestion) -> None:
        """A question that needs the vocabulary of a model that is not there."""
        self._asks.setdefault(ask.model, []).append(ask)

    def let_in(self, runner: ModelRunner) -> list[TextQuestion]:
        """A model is there: those that waited for it are tokenised; returns the questions that waited too."""
        for visitor in list(self._of(runner.spec.id)):
            if not visitor.is_preparing:
                self._prepare(visitor, runner)
        return self._asks.pop(runner.spec.id, [])

    def _prepare(self, visitor: Pending, runner: ModelRunner) -> None:
        self._events.append(Preparing(visitor.submit.request_id))
        submit = msgspec.structs.replace(visitor.submit, is_paused=visitor.is_paused)
        visitor.preparation = self._workers.prepare(submit, runner.prep, visitor.arrival_s)

    def leave(self, request_id: str) -> Pending | None:
        """It has been tokenised, or could not be; None: it was cancelled meanwhile."""
        return self._visitors.pop(request_id, None)

    def send_back(self, visitor: Pending, runner: ModelRunner | None) -> None:
        """Its model went while it was tokenised: it waits for it, or is tokenised for the new one."""
        visitor.preparation = None
        self._visitors[visitor.submit.request_id] = visitor
        if runner is not None:
            self._prepare(visitor, runner)

    def turn_away(self, model: str, error: StokerError) -> list[TextQuestion]:
        """Its model cannot be had: those that wait fail, the questions are returned to be answered.

        What has begun waits on where only room is missing (SPEC M4): its output is not thrown away.
        """
        may_pass = isinstance(error, InsufficientMemoryError | TooHotError)
        for visitor in list(self._of(model)):
            if not (visitor.is_preparing or (visitor.has_begun and may_pass)):
                self._fail(visitor, error)
        return self._asks.pop(model, [])

    # ------------------------------------------------------------ what callers want

    def steer(self, command: Cancel | Pause | Resume) -> bool:
        """Cancel, pause or resume one that is on its way; False: it is not."""
        visitor = self._visitors.get(command.request_id)
        if visitor is None:
            return False
        match command:
            case Cancel():
                self._cancel(visitor)
            case Pause(request_id):
                visitor.is_paused = True
                if not visitor.is_preparing:  # else it is told where it enters the line
                    self._events.append(Paused(request_id))
            case Resume(request_id):
                visitor.is_paused = False
                if not visitor.is_preparing:
                    self._events.append(Resumed(request_id))
        return True

    def expire(self, now: float) -> None:
        """End those that are past their deadline, waiting or being tokenised."""
        for visitor in list(self._visitors.values()):
            deadline_s = visitor.deadline_s
            if deadline_s is not None and deadline_s <= now:
                timeout_s = visitor.submit.request.timeout_s
                waited = f"{now - visitor.arrival_s:.1f} s of its timeout_s {timeout_s}"
                how = "being tokenised" if visitor.is_preparing else "waiting"
                text = f"the request took {waited}, {how} for {visitor.submit.request.model}"
                self._fail(visitor, RequestTimeoutError(text, param="timeout_s"))

    def cancel_all(self) -> None:
        """End every one with `cancelled`."""
        for visitor in list(self._visitors.values()):
            self._cancel(visitor)

    def drop_all(self) -> None:
        """Forget every one; somebody else keeps them."""
        for visitor in list(self._visitors.values()):
            self._remove(visitor)
        self._asks.clear()

    def _remove(self, visitor: Pending) -> None:
        del self._visitors[visitor.submit.request_id]
        if visitor.preparation is not None:
            visitor.preparation.give_up()

    def _cancel(self, visitor: Pending) -> None:
        submit = visitor.submit
        self._remove(visitor)
        for index in range(submit.request.n):
            if not (submit.is_finished and submit.is_finished[index]):
                ended = Delta(request_id=submit.request_id, index=index, finish_reason=FinishReason.CANCELLED)
                self._events.append(ended)
        usage = Usage(completion_tokens=sum(map(len, submit.generated)))
        self._events.append(Finished(request_id=submit.request_id, usage=usage, timings=Timings()))

    def _fail(self, visitor: Pending, error: StokerError) -> None:
        self._remove(visitor)
        self._events.append(Failed(visitor.submit.request_id, error.info()))
