"""The engine's loop: one thread, the single writer of every slot, cell and model.

Each turn drains the inbox, gives a turn to a model that has work, and publishes one frame of events.
With nothing to do it blocks on the inbox. It knows nothing of processes or sockets: commands come from an
`Inbox`, events leave through a callable.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import Enum

from stoker.engine.inbox import (
    Closed,
    DiskPost,
    Inbox,
    Item,
    Loaded,
    LoadFailed,
    LoadMoved,
    Prepared,
    PrepareFailed,
)
from stoker.engine.pace import Pace
from stoker.engine.prefix_store import PrefixStore
from stoker.engine.preparation import arrival_of
from stoker.engine.resident import Resident
from stoker.engine.residents import Residents
from stoker.engine.step_clock import StepClock
from stoker.engine.workers import Workers
from stoker.errors import NotReadyError, StokerError
from stoker.messages import (
    Cancel,
    Delta,
    Detokenize,
    Event,
    Failed,
    Finished,
    GetStatus,
    Goodbye,
    Heartbeat,
    Hello,
    LoadModel,
    ModelState,
    Pause,
    Reply,
    Resume,
    Shutdown,
    Submit,
    Tokenize,
    UnloadModel,
)
from stoker.request import FinishReason
from stoker.scheduler.sequence import SequenceState
from stoker.settings import EngineSettings
from stoker.status import EngineStatus
from stoker.values import Timings, Usage

log = logging.getLogger(__name__)


REST_AFTER_S = 0.2
"""How long nothing is to be computed before cells are copied: the next request may be on its way."""
SAVE_LIMIT_S = 4.0
"""What writing down what was computed may take at the end."""


class _Phase(Enum):
    RUNNING = "running"
    DRAINING = "draining"
    CLOSED = "closed"


class EngineLoop:
    """Runs models for whoever holds the other end of `inbox`.

    Args:
        inbox: where commands and workers' posts arrive.
        publish: called with each turn's events, in order, on the loop's thread.
        settings: the engine's.
    """

    def __init__(
        self, inbox: Inbox, publish: Callable[[list[Event]], None], settings: EngineSettings
    ) -> None:
        self._inbox = inbox
        self._publish = publish
        self._clock = StepClock(settings.watchdog_s)
        self._workers = Workers(inbox, settings.cache_dir)
        self._pace = Pace(self._clock)
        self._store = PrefixStore(inbox, settings)
        self._residents = Residents()
        self._preparing: dict[str, Submit] = {}
        self._paused_early: set[str] = set()
        self._events: list[Event] = []
        self._phase = _Phase.RUNNING
        self._drain_until_s = 0.0
        self._busy_s = 0.0
        self._num_turns = 0

    def __repr__(self) -> str:
        return f"<EngineLoop {self._phase.value} {self._num_turns} turns, {self._residents!r}>"

    def heartbeat(self) -> Heartbeat:
        """Whether a native step is running too long; may be called from any thread."""
        step_s, limit_s = self._clock.read()
        return Heartbeat(step_s=step_s, step_limit_s=limit_s)

    def run(self) -> None:
        """Serve until Shutdown has drained or the inbox is closed; frees everything before it returns."""
        self._events.append(Hello(os.getpid()))
        self._flush()
        self._store.open()
        try:
            while self._phase is not _Phase.CLOSED:
                self.turn(self._wait_s())
            self._save()
        finally:
            self._workers.close()
            self._store.close()
            self._residents.close()
            self._pace.close()
        self._events.append(Goodbye())
        self._flush()

    def turn(self, wait_s: float | None) -> None:
        """One turn; waits up to `wait_s` for something to arrive (None: for ever)."""
        self._num_turns += 1
        for item in self._inbox.take(wait_s):
            if isinstance(item, DiskPost):
                self._store.handle(item, self._clock.now())
            else:
                self._handle(item)
        resident = self._residents.next_with_work(self._clock.now())
        self._expire_without(resident)
        if resident is not None:
            resident.schedule(self._clock.now())
            self._flush()  # who is admitted must be known before a step that may crash
            resident.step(self._clock.now())
            self._busy_s = self._clock.now()
        elif self._clock.now() >= self._busy_s + REST_AFTER_S:
            self._rest()
        self._store.tend(self._clock.now(), is_busy=self._residents.has_work)
        if self._phase is _Phase.DRAINING:
            self._drain()
        self._flush()

    # ------------------------------------------------------------ waiting and publishing

    def _wait_s(self) -> float | None:
        """Nothing to compute: sleep until something arrives, a deadline passes or a drain's time is up."""
        if self._residents.has_work:
            return 0
        due = [self._residents.next_deadline_s(), self._store.next_due_s()]
        if self._phase is _Phase.DRAINING:
            due.append(self._drain_until_s)
        if self._residents.has_unstored:
            due.append(self._busy_s + REST_AFTER_S)
        soonest = min((at for at in due if at is not None), default=None)
        return None if soonest is None else max(0.0, soonest - self._clock.now())

    def _rest(self) -> None:
        """Nothing is to be computed: what is only in cells is stored, one sequence a turn."""
        for resident in self._residents:
            if resident.has_unstored:
                resident.rest(self._clock.now())
                return

    def _save(self) -> None:
        """Before the end: what was computed goes to disk, as far as that is quick."""
        while self._residents.has_unstored:
            self._rest()
        self._store.hurry()
        until_s = self._clock.now() + SAVE_LIMIT_S
        while True:
            self._store.tend(self._clock.now())
            wait_s = until_s - self._clock.now()
            if self._store.is_saved or wait_s <= 0:
                return
            for item in self._inbox.take(wait_s):
                if isinstance(item, DiskPost):
                    self._store.handle(item, self._clock.now())

    def _expire_without(self, chosen: Resident | None) -> None:
        """Deadlines pass also in models that get no turn: all is paused there, or others are more urgent."""
        now = self._clock.now()
        for resident in self._residents:
            if resident is not chosen:
                deadline_s = resident.next_deadline_s()
                if deadline_s is not None and deadline_s <= now:
                    resident.expire(now)

    def _flush(self) -> None:
        for resident in self._residents:
            self._events += resident.events
            resident.events.clear()
        if self._events:
            self._publish(self._events)
            self._events = []

    def _drain(self) -> None:
        now = self._clock.now()
        if (self._residents.has_requests or self._preparing) and now < self._drain_until_s:
            return
        self._end_everything(now)
        self._phase = _Phase.CLOSED

    def _end_everything(self, now: float) -> None:
        for submit in list(self._preparing.values()):
            self._cancel_early(submit)
        for resident in self._residents:
            resident.cancel_all(now)

    # ------------------------------------------------------------ commands and posts

    def _handle(self, item: Item) -> None:
        match item:
            case Submit():
                self._submit(item)
            case Cancel() | Pause() | Resume():
                self._steer(item)
            case Prepared() | PrepareFailed():
                self._prepared(item)
            case LoadModel() | UnloadModel() | LoadMoved() | Loaded() | LoadFailed():
                self._model(item)
            case Tokenize() | Detokenize():
                self._text(item)
            case GetStatus(call_id):
                self._events.append(Reply(call_id=call_id, value={"status": self._status()}))
            case Reply():
                self._events.append(item)
            case Shutdown(drain_s):
                self._phase = _Phase.DRAINING
                self._drain_until_s = self._clock.now() + drain_s
            case Closed.CLOSED:
                self._end_everything(self._clock.now())
                self._phase = _Phase.CLOSED

    def _submit(self, submit: Submit) -> None:
        try:
            if self._phase is not _Phase.RUNNING:
                raise NotReadyError("the engine is stopping")
            resident = self._residents.get(submit.request.model)
            if not submit.generated:
                waiting = sum(s.request.model == submit.request.model for s in self._preparing.values())
                resident.scheduler.check_room(submit.request.priority, waiting)
        except StokerError as error:
            self._events.append(Failed(submit.request_id, error.info()))
            return
        self._preparing[submit.request_id] = submit
        if submit.is_paused:
            self._paused_early.add(submit.request_id)
        self._workers.prepare(submit, resident.prep, arrival_of(submit))

    def _prepared(self, post: Prepared | PrepareFailed) -> None:
        request_id = post.live.request_id if isinstance(post, Prepared) else post.request_id
        submit = self._preparing.pop(request_id, None)
        if submit is None:
            return  # cancelled meanwhile; its terminal event is out
        try:
            if isinstance(post, PrepareFailed):
                raise post.error
            resident = self._residents.get(submit.request.model)
            resident.accept(post.live, self._clock.now())
            if request_id in self._paused_early:
                resident.pause(request_id, self._clock.now())
        except StokerError as error:
            self._events.append(Failed(request_id, error.info()))
        self._paused_early.discard(request_id)

    def _steer(self, command: Cancel | Pause | Resume) -> None:
        """Now, or for one that is still being tokenised as soon as it has a place in the line."""
        submit = self._preparing.get(command.request_id)
        if submit is not None:
            self._steer_early(submit, command)
            return
        now = self._clock.now()
        for resident in self._residents:
            match command:
                case Cancel(request_id):
                    resident.cancel(request_id, now)
                case Pause(request_id):
                    resident.pause(request_id, now)
                case Resume(request_id):
                    resident.resume(request_id, now)

    def _steer_early(self, submit: Submit, command: Cancel | Pause | Resume) -> None:
        match command:
            case Cancel():
                self._cancel_early(submit)
            case Pause(request_id):
                self._paused_early.add(request_id)
            case Resume(request_id):
                self._paused_early.discard(request_id)

    def _cancel_early(self, submit: Submit) -> None:
        """End a request that is still being tokenised."""
        del self._preparing[submit.request_id]
        self._paused_early.discard(submit.request_id)
        for index in range(submit.request.n):
            if not (submit.is_finished and submit.is_finished[index]):
                ended = Delta(request_id=submit.request_id, index=index, finish_reason=FinishReason.CANCELLED)
                self._events.append(ended)
        self._events.append(Finished(request_id=submit.request_id, usage=Usage(), timings=Timings()))

    def _text(self, ask: Tokenize | Detokenize) -> None:
        try:
            prep = self._residents.get(ask.model).prep
        except StokerError as error:
            self._events.append(Reply(call_id=ask.call_id, error=error.info()))
            return
        if isinstance(ask, Tokenize):
            self._workers.tokenize(ask, prep.vocabulary)
        else:
            self._workers.detokenize(ask, prep)

    # ------------------------------------------------------------ models

    def _model(self, item: LoadModel | UnloadModel | LoadMoved | Loaded | LoadFailed) -> None:
        match item:
            case LoadModel(spec):
                self._events.append(ModelState(model=spec.id, state="loading"))
                self._workers.load(spec)
            case LoadMoved(model, stage, fraction):
                moved = ModelState(model=model, state="loading", stage=stage, fraction=fraction)
                self._events.append(moved)
            case Loaded(spec, backend):
                self._unload(spec.id)
                resident = self._residents.add(Resident(spec, backend, self._pace, self._store.cache))
                self._store.model_loaded(spec.path, backend.capabilities.fingerprint)
                ready = ModelState(model=spec.id, state="ready", fraction=1.0, info=resident.info())
                self._events.append(ready)
            case LoadFailed(model, error):
                self._events.append(ModelState(model=model, state="failed", error=error.info()))
            case UnloadModel(model):
                self._unload(model)

    def _unload(self, model: str) -> None:
        resident = self._residents.remove(model)
        if resident is None:
            return
        resident.cancel_all(self._clock.now())
        while resident.has_unstored:
            resident.rest(self._clock.now())
        self._events += resident.events
        resident.close()
        self._events.append(ModelState(model=model, state="absent"))

    # ------------------------------------------------------------ status

    def _status(self) -> EngineStatus:
        residents, now = list(self._residents), self._clock.now()
        counters = {
            "num_turns": float(self._num_turns),
            "num_steps": float(self._clock.num_steps),
            "step_busy_s": self._clock.busy_s,
            "num_preparing": float(len(self._preparing)),
        }
        for resident in residents:
            for name, value in resident.scheduler.stats().items():
                counters[name] = counters.get(name, 0.0) + value
        counters |= self._store.cache.stats()
        counters["step_target_ms"] = max((r.spec.target_step_ms for r in residents), default=0.0)
        return EngineStatus(
            slots=[status for resident in residents for status in resident.slot_status(now)],
            queue=[s for r in residents for s in r.line_status(SequenceState.QUEUED, now)],
            parked=[s for r in residents for s in r.line_status(SequenceState.PARKED, now)],
            paused=[s for r in residents for s in r.paused_status(now)],
            num_threads=self._pace.num_threads,
            threads_reason=self._pace.reason,
            counters=counters,
            cache=self._store.cache.status(),
            kv_cells_total=sum(r.scheduler.cells.total for r in residents),
            kv_cells_used=sum(r.scheduler.cells.used for r in residents),
        )
