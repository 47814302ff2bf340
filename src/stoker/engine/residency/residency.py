"""Which models are in memory: loads those that are needed, unloads idle ones (SPEC R1 to R8).

Owns every served model's life in this engine and the one load that goes on at a time. States and order are
the catalogue's, what fits is placement's, requests that wait for a model are the pending ones; what runs on a
model is its runner's.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from stoker.backends.protocol.encoding import Encoder
from stoker.engine.inbox import Loaded, LoadFailed, LoadMoved, LoadStop, Sized
from stoker.engine.residency.catalogue import (
    ASKED_TO,
    Catalogue,
    Departed,
    MemoryShare,
    Missing,
    Placement,
    ServedModel,
    Swaps,
    model_state,
)
from stoker.engine.residency.load import Load, conflict, in_its_own_way
from stoker.engine.residency.streamed import streaming_status
from stoker.engine.runners.oneshot import OneShotRunner
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.status import model_status
from stoker.errors import InsufficientMemoryError, NotReadyError, StokerError
from stoker.ipc.commands import KnowModel, LoadModel, LostDevices, PinModel, UnloadModel
from stoker.ipc.events import Reply
from stoker.ipc.model import ModelLife
from stoker.models.memory_estimate.fit import Fit

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.protocol.backend import Backend
    from stoker.engine.inbox import LoadPost
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.residency.load import LoadThreads
    from stoker.engine.residency.pending import PendingRequests
    from stoker.engine.runners.runner import ModelRunner
    from stoker.engine.runners.turns import Runners
    from stoker.ipc.model import ModelSpec
    from stoker.ipc.status import ModelStatus
    from stoker.models.memory_estimate.fit import FittedSpec

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""When a model that could not be had is tried again for requests that have begun."""
LOOK_AGAIN_S = 0.25
"""How often a load that waits for memory looks again."""
ModelCommand = KnowModel | LoadModel | UnloadModel | PinModel | LostDevices


def _publish_later() -> None:
    """Events leave at the end of the turn."""


class Residency:
    """Every served model of one engine.

    Args:
        threads: read headers and load, off the loop.
        runners: the models in memory.
        pending: requests that wait for one.
        placement: knows how much fits.
        jobs: the engine's requests.

    Attributes:
        flush: publishes the events now: that a load begins must be known before it may crash.
        refusal: why nothing may be loaded for now; None: it may (SPEC M6).
        is_barred: loads wait, for want of memory (SPEC M4).
    """

    def __init__(
        self,
        threads: LoadThreads,
        runners: Runners,
        pending: PendingRequests,
        placement: Placement,
        jobs: JobTable,
    ) -> None:
        self._threads = threads
        self._runners = runners
        self._pending = pending
        self._placement = placement
        self._jobs = jobs
        self._events = jobs.events
        self.flush: Callable[[], None] = _publish_later
        self._catalogue = Catalogue()
        self._load: Load | None = None
        self._retry_s: dict[str, float] = {}
        self._swaps = Swaps()
        self._departed = Departed(pending, placement)
        self.refusal: StokerError | None = None
        self.is_barred = False

    def __repr__(self) -> str:
        return f"<Residency {self._catalogue!r} {self._load!r}>"

    # ------------------------------------------------------------ questions

    @property
    def is_loading(self) -> bool:
        """Whether a model is loaded now, or waits for room."""
        return self._load is not None

    def runner_for(self, model: str) -> ModelRunner | None:
        """Where a new request for that model goes; None: it waits until the model is there.

        Raises:
            ModelNotFoundError: no such model is served.
        """
        served = self._catalogue.get(model)
        return self._runners.find(model) if served.life is ModelLife.READY else None

    def max_queue(self, model: str) -> int:
        """Requests that may wait for that model."""
        return self._catalogue.get(model).spec.max_queue

    def next_due_s(self, now: float) -> float | None:
        """When there is something to tend to that nothing else announces."""
        due = [at for s in self._catalogue if (at := s.due_s()) is not None and not self._leases(s)]
        due += [now for s in self._catalogue if s.life is ModelLife.UNLOADING and self._is_free(s)]
        if self._load is None:
            due += [self._retry_s.get(s.spec.id, now) for s in self._catalogue if self._may_begin(s)]
        elif not self._is_wanted(self._load.served):
            due.append(now)
        elif self._load.waits_for_room:
            due.append(self._load.look_s)
        return min(due, default=None)

    def status(self, now: float) -> list[ModelStatus]:
        """Every served model, for status pages."""
        return [
            model_status(
                served, self._leases(served), now, streaming_status(self._runners.find(served.spec.id))
            )
            for served in self._catalogue
        ]

    def _leases(self, served: ServedModel) -> int:
        """Requests that need it: on it, or on their way to it."""
        model = served.spec.id
        return self._jobs.num_leases(model) + len(self._jobs.pending(model))

    # ------------------------------------------------------------ commands

    def command(self, command: ModelCommand, now: float) -> None:
        """What the client wants of a model."""
        match command:
            case KnowModel(spec, is_suspect):
                self._know(spec).is_suspect = is_suspect
            case LostDevices(times):
                self._threads.lost = times
            case LoadModel():
                self._ask(command, now)
            case UnloadModel():
                self._unask(command, now)
            case PinModel(model, is_pinned):
                if (served := self._catalogue.find(model)) is not None:
                    served.is_pinned = is_pinned
                    if is_pinned:
                        self._swaps.gone(model)
                        self._stay(model)

    def _know(self, spec: ModelSpec) -> ServedModel:
        """Serve a model; one that is known is loaded so the next time, and stays for as long as that says."""
        served = self._catalogue.know(spec)
        is_loading = self._load is not None and self._load.served is served
        if served.is_in_memory or is_loading or served.is_asked:
            served.keep_for(spec.keep_alive_s)
        else:
            served.settle(spec)
        served.keep_alive_s = spec.keep_alive_s
        return served

    def _ask(self, command: LoadModel, now: float) -> None:
        served, spec = self._catalogue.know(command.spec), command.spec
        served.ask_id = command.ask_id
        if error := self._conflict(spec, spec.most_tokens):
            self._refuse(served, error, now)
            return
        served.keep_alive_s, served.is_pinned = spec.keep_alive_s, served.is_pinned or spec.is_pinned
        if self._load is not None and self._load.served is served and served.spec != spec:
            self._end_load(self._load, "it is to be loaded otherwise")
        served.spec, served.is_asked, served.may_evict = spec, True, command.may_evict
        served.refused = None
        served.is_suspect = command.is_suspect
        served.used_s = now
        self._retry_s.pop(spec.id, None)

    def _conflict(self, spec: ModelSpec, n_ctx: int) -> StokerError | None:
        """Why what is in memory cannot give way to `spec` with a context of `n_ctx` now; 0: its own."""
        runner = self._runners.find(spec.id)
        return None if runner is None else conflict(spec, n_ctx, runner, self._contexts(spec.id, runner))

    def _unask(self, command: UnloadModel, now: float) -> None:
        served = self._catalogue.find(command.model)
        if served is None:
            return
        served.ask_id, served.is_asked = command.ask_id, False
        if self._load is not None and self._load.served is served:
            self._end_load(self._load, ASKED_TO)  # it begins anew where requests need it
            self._call_off(command.model)
        served.settle(served.settled)
        if served.life is ModelLife.READY:
            served.move(ModelLife.UNLOADING, ASKED_TO)
        elif served.life is ModelLife.UNLOADING:  # it goes, though what it was to go for may not need it
            served.reason = ASKED_TO
        self._tell(served)
        self._let_go(now)

    def used(self, model: str, keep_alive_s: float | None, now: float) -> None:
        """A request came for it; it may say how long the model is to stay (SPEC R8)."""
        served = self._catalogue.get(model)
        served.used_s, served.has_served, served.may_evict = now, True, True
        served.keep_alive_s = served.spec.keep_alive_s if keep_alive_s is None else keep_alive_s
        self.wanted(model)

    def wanted(self, model: str) -> None:
        """A new request waits for it: it is tried at once, though it could not be loaded a moment ago."""
        self._retry_s.pop(model, None)

    @property
    def holders(self) -> tuple[ModelRunner, ...] | None:
        """The models in memory; None: one is half loaded or half freed."""
        is_loading = self._load is not None and self._load.fitted is not None
        return None if is_loading or self._departed else tuple(self._runners)

    @property
    def is_mapping(self) -> bool:
        """Whether a model is loaded whose experts are read as they are needed."""
        fitted = self._load.fitted if self._load is not None else None
        return fitted is not None and fitted.fit is Fit.STREAMS

    # ------------------------------------------------------------ a turn

    def tend(self, now: float) -> None:
        """Load, free memory and unload, whatever is due; called each turn."""
        self.free_departed()
        for served in self._catalogue:
            if served.is_in_memory and self._leases(served):
                served.used_s = now
        self._let_go(now)
        if self._load is not None and not self._is_wanted(self._load.served):
            self._drop_load(self._load, "no request needs it any more")
        if self._load is None:
            self._begin_next(now)
        elif self._load.waits_for_room and now >= self._load.look_s:
            self._place(self._load, now)

    def _let_go(self, now: float) -> None:
        """Unload what is not in use: asked to, for another model, or idle for as long as it may."""
        for served in self._catalogue:
            if served.life is ModelLife.UNLOADING and self._is_free(served):
                self._unload(served, served.reason, now)
        for served in self._catalogue.overdue(now):
            if not self._leases(served):
                self._unload(served, f"idle for {served.keep_alive_s:g} s", now)
        for model, other in self._swaps.overdue(now):
            self._unload(self._catalogue.get(model), f"gives way to {other}", now)

    def _is_free(self, served: ServedModel) -> bool:
        """Whether nothing runs on it: those that wait for it again do not count."""
        model = served.spec.id
        num_users = self._jobs.num_leases(model) + self._pending.num_preparing(model)
        return num_users == 0 or self._runners.find(model) is None

    def _is_wanted(self, served: ServedModel) -> bool:
        return served.is_asked or self._pending.wants(served.spec.id)

    def _begin_next(self, now: float) -> None:
        wanted = [s for s in self._catalogue if self._may_begin(s)]
        wanted = [s for s in wanted if self._retry_s.get(s.spec.id, now) <= now]
        if not wanted:
            return
        served = min(wanted, key=self._urgency)
        if self.refusal is not None:
            self._refuse(served, self.refusal, now)
            return
        self._load = Load(served, served.spec, LoadStop(), now, is_reload=served.life is ModelLife.READY)
        if not self._load.is_reload:
            served.move(ModelLife.LOADING)
        self._size(self._load)

    def _size(self, load: Load) -> None:
        """Look at the way that is tried now."""
        self._come_to(load, "header")
        self._threads.size(load.stop, load.way, may_pass_on=bool(load.rest))

    def _come_to(self, load: Load, stage: str) -> None:
        """A load enters a stage; published at once, so that a crash in it is charged to it."""
        load.told(stage, 0.0)
        self._tell(load.served, stage=stage)
        self.flush()

    def _may_begin(self, served: ServedModel) -> bool:
        if self.is_barred:
            return False
        if served.life is ModelLife.READY:
            return served.is_asked
        return served.life in {ModelLife.ABSENT, ModelLife.FAILED} and self._is_wanted(served)

    def _urgency(self, served: ServedModel) -> tuple[bool, float]:
        """Interactive before background, then by the time of waiting."""
        waiting = self._pending.waiting(served.spec.id)
        has_people = served.is_asked or any(job.is_interactive for job in waiting)
        return not has_people, min((job.arrival_s for job in waiting), default=served.used_s)

    # ------------------------------------------------------------ a load

    def post(self, post: LoadPost, now: float) -> None:
        """What the loader says; of a load that was given up nothing is taken."""
        load = self._load
        if load is None or load.stop is not post.load:
            if isinstance(post, Loaded):
                post.backend.close()
            return
        match post:
            case Sized(_, estimator, fingerprint, spec, missing, held):
                load.estimator, load.fingerprint = estimator, fingerprint
                load.looked_at, load.missing, load.held = spec, missing, held
                if load.is_reload and self._is_the_same(load):
                    self._load = None
                    self._keep(load.served, None)
                else:
                    self._place(load, now)
            case LoadMoved(_, stage, fraction) if not load.is_reload:  # that model is ready all the while
                load.told(stage, fraction)
                self._tell(load.served)
            case Loaded(_, _, backend, vocabulary):
                load.vocabulary = vocabulary
                self._take_in(load, backend, now)
            case LoadFailed(_, InsufficientMemoryError() as error) if load.learn(error):
                log.warning("%s is tried with less: %s", load.spec.id, error)
                load.fitted = None
                self._place(load, now)
            case LoadFailed(_, error):
                log.warning("%s could not be loaded as %s: %s", load.spec.id, load.way.served_by, error)
                if load.pass_on(error):
                    self._size(load)
                else:
                    self._refuse(load.served, load.failure, now)

    def _is_the_same(self, load: Load) -> bool:
        """Same file, same settings: there is nothing to do (SPEC R5)."""
        runner = self._runners.find(load.spec.id)
        return runner is not None and runner.load is not None and load.is_like(runner.load)

    def _keep(self, served: ServedModel, error: StokerError | None) -> None:
        """The model stays as it was loaded before, which is as it was asked for where there is no error."""
        served.is_asked = False
        served.settle(served.spec if error is None else served.settled)
        self._tell(served, error)

    def _place(self, load: Load, now: float) -> None:
        """Start it if it fits; else free memory, wait for some, or refuse it."""
        others = [s for s in self._catalogue.in_memory() if s is not load.served and not s.is_pinned]
        share = MemoryShare(models=tuple(others) if load.served.may_evict else ())
        load.look_s = now + LOOK_AGAIN_S
        load.least_n_ctx = self._least_context(load)
        if load.is_reload and (error := self._conflict(load.wanted, load.spec.most_tokens)):
            self._refuse(load.served, error, now)
            return
        if load.is_reload and not self._departed and self._placement.stands_in_its_own_way(load, share):
            self._go_before_itself(load.served, now)
            return
        try:
            fitted, missing = self._placement.weigh(load, share)
        except StokerError as error:
            self._refuse(load.served, load.explained(error), now)
            return
        if missing.is_nothing:
            load.fitted = fitted
            self._call_off(load.spec.id)
            self._come_to(load, "weights")
            is_suspect = load.served.is_suspect and not load.errors  # of the way that ended an engine
            self._threads.load(load.stop, fitted.spec, is_suspect=is_suspect, has_ways=load.has_ways)
            return
        if load.stage != "waiting":
            self._come_to(load, "waiting")
        if self._departed:
            return  # what they give back is not free yet
        if missing.host_bytes > 0 and self._placement.shed(missing.host_bytes, now):
            load.look_s = now
        elif load.served.may_evict:  # else what is stored is in use for now
            self._make_room(load, missing, others, now)

    def _go_before_itself(self, served: ServedModel, now: float) -> None:
        """Unused it goes, to be loaded anew at once or come back; else it stays as it is (SPEC L5)."""
        if not self._is_free(served):
            self._refuse(served, in_its_own_way(served.spec, self._jobs.num_leases(served.spec.id)), now)
            return
        served.has_gone = True
        served.move(ModelLife.UNLOADING, "is loaded otherwise")
        self._tell(served)  # and not that it is out: who asked for it waits on
        self._leave(served, served.reason, now)

    def _make_room(self, load: Load, missing: Missing, others: list[ServedModel], now: float) -> None:
        """Have a model go that holds some of what is missing: an idle one at once, else a busy one."""
        helpful = [s for s in others if missing.is_eased_by(s)]
        idle = [s for s in helpful if not self._leases(s)]
        busy = [s for s in helpful if self._leases(s)]
        why = f"gives way to {load.spec.id}"
        if idle:
            self._unload(idle[0], why, now)
            load.look_s = now
        elif going := self._swaps.choose(self._disturbable(busy, load, now), load.spec.id, load.begun_s, now):
            self._make_yield(going, why, now)

    def _least_context(self, load: Load) -> int:
        """Tokens of context that requests need which have begun on the model: it comes back with no less."""
        return max(self._contexts(load.spec.id, self._runners.find(load.spec.id)), default=0)

    def _contexts(self, model: str, runner: ModelRunner | None) -> list[int]:
        """Tokens that each of its requests may come to hold; not known of one that is not tokenised yet."""
        most = runner.backend.capabilities.n_ctx if runner is not None else 0
        jobs = [*self._jobs.placed(model), *self._jobs.pending(model)]
        return [job.num_context or most for job in jobs]

    def _disturbable(self, busy: list[ServedModel], load: Load, now: float) -> list[ServedModel]:
        """Those that may have to go for it: background lets interactive requests be (SPEC Q3, Q7)."""
        if not self._urgency(load.served)[0] or now - load.begun_s >= load.spec.background_patience_s:
            return busy
        return [s for s in busy if not ((r := self._runners.find(s.spec.id)) and r.has_people)]

    def _make_yield(self, served: ServedModel, reason: str, now: float) -> None:
        """It takes no newcomers until what runs on it has ended (SPEC R3)."""
        if served.life is ModelLife.READY:
            served.move(ModelLife.UNLOADING, reason)
            self._tell(served)
        self._jobs.evacuate_waiting(served.spec.id, reason, now)

    def _take_in(self, load: Load, backend: Backend | Encoder, now: float) -> None:
        served, fitted = load.served, load.fitted
        assert fitted is not None, f"{load!r} was loaded without a fit"
        if error := self._conflict(load.wanted, backend.capabilities.n_ctx):  # of those that came meanwhile
            backend.close()
            self._refuse(served, error, now)
            return
        if load.is_reload:
            self._free(served, "replaced", now)
        self._load, served.is_asked, served.may_evict, served.is_suspect = None, False, True, False
        runner = self._runner_of(load, fitted, backend)
        self._runners.add(runner)
        if not load.is_reload:
            served.move(ModelLife.READY)
        served.reason = load.passed_over_text
        served.size, served.on_devices = self._placement.settle(fitted, runner)
        served.degraded = runner.degraded
        served.used_s = served.loaded_s = now
        served.load_took_s, served.error = now - load.begun_s, None
        served.has_served = self._pending.wants(load.spec.id)
        refused = served.refused
        served.settle(load.spec)
        self._tell(served, refused)
        self._pending.let_in(runner)

    def _runner_of(self, load: Load, fitted: FittedSpec, backend: Backend | Encoder) -> ModelRunner:
        """What runs on a loaded model: generations in slots, or an encoder's work."""
        spec, timer, cache = fitted.spec, self._runners.timer, self._runners.cache
        runner: ModelRunner
        if isinstance(backend, Encoder):
            runner = OneShotRunner(spec, backend, timer, self._jobs)
        else:
            runner = SlotRunner(spec, backend, timer, cache, self._jobs)
        runner.load = load
        runner.prep = dataclasses.replace(runner.prep, vocabulary_sample=load.vocabulary.sample)
        runner.degraded = load.less(backend.capabilities.trial_token_s)
        return runner

    def _refuse(self, served: ServedModel, error: StokerError, now: float) -> None:
        """It cannot be loaded: what waits for it fails; what is in memory stays (SPEC R4)."""
        if self._load is not None and self._load.served is served:
            self._load.stop.set()
            self._load = None
            self._call_off(served.spec.id)
        if served.is_in_memory:  # it was to be loaded otherwise
            self._keep(served, error)
            return
        if served.is_to_change and (served.has_gone or self._pending.wants(served.spec.id)):
            self._come_back(served, error)
            return
        served.settle(served.settled)
        was_optional, served.is_asked = served.is_asked and not served.may_evict, False
        served.may_evict = True  # requests may ask for more than a load that was only welcome
        served.error = error.info()
        if was_optional and served.life is ModelLife.LOADING:
            served.move(ModelLife.ABSENT)
        elif served.life is not ModelLife.FAILED:  # of one that has failed before, it may not even be begun
            served.move(ModelLife.FAILED)
        served.reason = error.message
        self._retry_s[served.spec.id] = now + RETRY_S
        self._tell(served, error)
        for ask in self._pending.turn_away(served.spec.id, error, now):
            self._events.append(Reply(call_id=ask.call_id, error=error.info()))

    def _come_back(self, served: ServedModel, error: StokerError) -> None:
        """A load of it otherwise has failed: it is loaded as it was, and who asked is told why then."""
        log.warning("%s is loaded as it was before: %s", served.spec.id, error)
        served.spec, served.refused, served.is_asked = served.settled, error, True
        if served.life is ModelLife.LOADING:
            served.move(ModelLife.ABSENT, error.message)

    def _drop_load(self, load: Load, why: str) -> None:
        """End a load that is not needed, as soon as the native library asks whether to go on."""
        self._end_load(load, why)
        if load.is_reload:
            text = f"{load.spec.id} is in memory as before: its load otherwise was ended, {why}"
            self._keep(load.served, NotReadyError(text, retry_after_s=1.0))
        else:
            load.served.is_asked = False
            load.served.settle(load.served.settled)
            self._tell(load.served)
        self._call_off(load.spec.id)

    def _end_load(self, load: Load, why: str) -> None:
        self._load = None
        load.stop.set()
        if not load.is_reload:
            load.served.move(ModelLife.ABSENT, why)

    def _call_off(self, newcomer: str) -> None:
        """That model is not to be loaded now: what was to go for it stays."""
        for model in self._swaps.called_off(newcomer):
            self._stay(model)

    def _stay(self, model: str) -> None:
        """It need not go any more."""
        served, runner = self._catalogue.get(model), self._runners.find(model)
        if served.life is ModelLife.UNLOADING and not served.is_leaving and runner is not None:
            served.move(ModelLife.READY, runner.load.passed_over_text if runner.load else "")
            self._tell(served)
            self._pending.let_in(runner)

    # ------------------------------------------------------------ going

    def unload_idle(self, now: float) -> int:
        """Let every idle model go that is not pinned (SPEC M4); returns the bytes that frees."""
        going = [s for s in self._catalogue.in_memory() if not s.is_pinned]
        return self._unload_all([s for s in going if not self._leases(s)], now)

    def step_aside(self, now: float) -> int:
        """Let every model go that is not pinned; what ran on it goes on later (SPEC M4)."""
        if self._load is not None:
            self._drop_load(self._load, "memory is short")
        return self._unload_all([s for s in self._catalogue.in_memory() if not s.is_pinned], now)

    def _unload_all(self, going: list[ServedModel], now: float) -> int:
        for served in going:
            self._unload(served, "memory is short", now)
        return sum(served.size_bytes for served in going)

    def _unload(self, served: ServedModel, why: str, now: float) -> None:
        self._leave(served, why, now)
        self._tell(served)

    def _leave(self, served: ServedModel, why: str, now: float) -> None:
        if self._load is not None and self._load.served is served:
            self._end_load(self._load, why)  # a reload; where it is asked for, it begins anew
        if served.life is ModelLife.READY:
            served.move(ModelLife.UNLOADING, why)
        self._free(served, why, now)
        served.move(ModelLife.ABSENT, why)

    def _free(self, served: ServedModel, why: str, now: float) -> None:
        """Give its memory back (SPEC R10); what ran on it is pending again."""
        self._swaps.gone(served.spec.id)
        self._jobs.evacuate(served.spec.id, why, now)
        runner = self._runners.remove(served.spec.id)
        if runner is None:
            return
        while runner.has_unstored:
            runner.rest(now)
        self._departed.add(runner, served.size, served.on_devices)

    def free_departed(self) -> None:
        """Give back the memory of models that have gone, once no worker reads their vocabulary any more."""
        self._departed.free()

    def close(self) -> None:
        """The engine ends: a load that goes on ends with it."""
        if self._load is not None:
            self._load.stop.set()
            self._load = None

    # ------------------------------------------------------------ telling

    def _tell(self, served: ServedModel, error: StokerError | None = None, stage: str = "") -> None:
        """Where a model is; `stage` is that of another load of one that is ready."""
        runner = self._runners.find(served.spec.id) if served.life is ModelLife.READY else None
        load = self._load if self._load is not None and self._load.served is served else None
        self._events.append(model_state(served, load, runner, error, stage))
