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
from pathlib import Path

from stoker.backends.device import HeldDevices
from stoker.backends.registry import OpenModels
from stoker.cache.prefix_cache import CacheLimits
from stoker.cache.store import PrefixStore, SharedPlace, StoreOutcome
from stoker.engine.inbox import (
    Closed,
    Inbox,
    Item,
    Loaded,
    LoadFailed,
    LoadMoved,
    Measured,
    Prepared,
    PrepareFailed,
    Released,
    Sized,
)
from stoker.engine.jobs.job import Job
from stoker.engine.jobs.preparations import Preparations
from stoker.engine.jobs.table import JobTable
from stoker.engine.moving import StateMoves, StateRead
from stoker.engine.report import EngineParts, EngineReport
from stoker.engine.residency.catalogue import Placement
from stoker.engine.residency.load import LoadThreads
from stoker.engine.residency.pending import PendingRequests
from stoker.engine.residency.pressure import PressureHandler
from stoker.engine.residency.residency import Residency
from stoker.engine.residency.streamed import StreamedWeights
from stoker.engine.runners.runner import ModelRunner
from stoker.engine.runners.turns import Runners
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.errors import NotReadyError, StokerError
from stoker.ipc.commands import (
    Cancel,
    CountTokens,
    Detokenize,
    ExportState,
    GetStatus,
    ImportState,
    KnowModel,
    LoadModel,
    LostDevices,
    Pause,
    PinModel,
    Resume,
    Shutdown,
    StateQuestion,
    Submit,
    Suspend,
    TextQuestion,
    Tokenize,
    UnloadModel,
    Watch,
)
from stoker.ipc.engine_config import EngineConfig
from stoker.ipc.events import Event, Failed, Goodbye, Heartbeat, Hello, Reply
from stoker.ipc.model import CacheMode
from stoker.machine import malloc
from stoker.machine.limits import DEFAULTS
from stoker.machine.monitor import MemoryMonitor, Sample, Sources, measure
from stoker.machine.thermal import heat_source
from stoker.scheduler.queue import RequestQueue, Throttle

log = logging.getLogger(__name__)


REST_AFTER_S = 0.2
"""How long nothing is to be computed before cells are copied or kernels warmed: one may come soon."""
GATHER_S = 0.012
"""How long prompts that find a device idle wait for others that are being prepared. A crowd comes within some
milliseconds; a first step with one of its prompts takes an H100 15 ms, and the others wait for the next."""
LULL_S = 0.003
"""How long after the last arrival one more is waited for: the server submits the requests of a crowd one by
one, one in each millisecond or two. Preparing a prompt takes a part of that time anyway."""
COMING_S = 0.02
"""How long people's prompts that came while a step was launched wait for others that did: preparing these
takes the interpreter, which a launch keeps for 10 to 30 ms. Of 46 that came then, three were ready for the
next step."""
COMING_SHARE = 4
"""A step waits while at most so many prompts are ready for each that is being prepared."""
TEND_EVERY_S = 0.1
"""Between steps shorter than that, what is due by time alone waits so long."""
RETRY_WHILE_LOADING_S = 5.0
SAVE_LIMIT_S = 4.0
"""What writing down what was computed may take at the end."""


class _LoopPhase(Enum):
    RUNNING = "running"
    DRAINING = "draining"
    SUSPENDING = "suspending"
    CLOSED = "closed"


class EngineLoop:
    """Runs models for the client at the other end of `inbox`.

    Args:
        inbox: where commands and workers' posts arrive.
        publish: called with each turn's events, in order, on the loop's thread.
        config: the engine's.
        take_sample: measures memory; None: this machine's.
        models: headers that were read before the engine was made.
    """

    def __init__(
        self,
        inbox: Inbox,
        publish: Callable[[list[Event]], None],
        config: EngineConfig,
        take_sample: Callable[[], Sample] | None = None,
        models: OpenModels | None = None,
    ) -> None:
        self._inbox = inbox
        self._publish = publish
        cache_dir = Path(config.cache_dir)
        leases = Path(config.lease_dir) if config.lease_dir else None
        self._devices = HeldDevices(leases, config.memory_margin)
        self._streamed = StreamedWeights()
        self._sources = _sources(config, self._devices, self._streamed)
        self._monitor: MemoryMonitor | None = None
        self._take_sample = take_sample or (lambda: measure(self._sources))
        sample = self._take_sample()
        self._cleans_eagerly = DEFAULTS[sample.tier].cleans_eagerly
        self._clock = Stopwatch(config.watchdog_s)
        self._load_threads = LoadThreads(
            inbox, cache_dir, self._devices, models or OpenModels(), reads_whole=bool(config.prefix_store)
        )
        self._preparations = Preparations(inbox, config.max_prepare_s)
        self._timer = StepTimer(self._clock, inbox.interrupt)
        limits = CacheLimits.within(
            sample.limit_bytes,
            mode=CacheMode(config.cache_mode),
            ram_bytes=config.cache_ram_bytes,
            disk_bytes=config.cache_disk_bytes,
        )
        self._is_sharing = bool(config.prefix_store)
        self._store = PrefixStore(inbox.put, cache_dir, limits, _shared_place(config))
        self._jobs = JobTable()
        self._events = self._jobs.events
        self._runners = Runners(self._timer, self._store.cache)
        self._pending = PendingRequests(self._preparations, self._jobs)
        placement = Placement(self._take_sample, self._store.ledger, self._store.cache, config.memory_margin)
        self._residency = Residency(self._load_threads, self._runners, self._pending, placement, self._jobs)
        self._residency.flush = self._flush
        self._pressure_handler = PressureHandler(self._runners, self._residency, self._store, self._events)
        self._moves = StateMoves(inbox.put, self._jobs, self._runners, self._store.cache)
        self._report = self._new_report()
        self._phase = _LoopPhase.RUNNING
        self._until_s = 0.0
        self._busy_s = 0.0
        self._nap_until_s = 0.0
        self._is_clean = True
        self._warms = config.num_restarts == 0  # an engine that ended so would end again
        self._is_stepping = False
        self._tend_s = 0.0
        self._num_changes = 0
        self._num_turns = 0
        self._holders: tuple[ModelRunner, ...] | None = ()

    def _new_report(self) -> EngineReport:
        return EngineReport(
            EngineParts(
                clock=self._clock,
                timer=self._timer,
                devices=self._devices,
                store=self._store,
                jobs=self._jobs,
                runners=self._runners,
                pending=self._pending,
                residency=self._residency,
                pressure=self._pressure_handler,
                take_sample=self._take_sample,
            )
        )

    def __repr__(self) -> str:
        return f"<EngineLoop {self._phase.value} {self._num_turns} turns, {self._runners!r}>"

    def heartbeat(self) -> Heartbeat:
        """Whether a native step is running too long; may be called from any thread."""
        step_s, limit_s = self._clock.read()
        return Heartbeat(step_s=step_s, step_limit_s=limit_s)

    def run(self) -> None:
        """Serve until Shutdown has drained or the inbox is closed; frees everything before it returns."""
        self._events.append(Hello(os.getpid()))
        self._flush()
        self._store.open()
        self._monitor = MemoryMonitor(lambda sample: self._inbox.put(Measured(sample)), self._sources)
        self._monitor.start()
        try:
            while self._phase is _LoopPhase.RUNNING or self._phase is _LoopPhase.DRAINING:
                self.turn(0.0 if self._is_stepping else self._wait_s())  # after a step the next may follow
            self._save()
        finally:
            self._monitor.close()
            self._residency.close()
            self._preparations.close()
            self._load_threads.close()
            self._free_late()
            self._moves.close()
            self._store.close()
            self._residency.free_departed()
            self._runners.close(self._preparations.uses)
            self._timer.close()
            self._devices.close()
        self._events.append(Goodbye())
        self._flush()

    def _free_late(self) -> None:
        """Close models whose load ended after the loop."""
        for item in self._inbox.take(0):
            if isinstance(item, Loaded):
                item.backend.close()

    def turn(self, wait_s: float | None) -> None:
        """One turn; waits up to `wait_s` for something to arrive (None: for ever)."""
        self._num_turns += 1
        items = self._inbox.take(wait_s)
        for item in items:
            if isinstance(item, StoreOutcome):
                self._store.handle(item, self._clock.now())
            else:
                self._handle(item)
        now = self._clock.now()
        is_due = bool(items) or not self._is_stepping or now >= self._tend_s or self._has_news
        if is_due:
            self._tend(now)
        self._step(now)
        if is_due or self._has_news:
            self._store.tend(self._clock.now(), is_busy=self._is_busy)
        if self._phase is _LoopPhase.DRAINING:
            self._drain()
        self._flush()

    @property
    def _has_news(self) -> bool:
        """Whether a request has come or ended since what hangs on that was looked at."""
        return self._jobs.num_changes != self._num_changes

    def _tend(self, now: float) -> None:
        """Whatever time and other requests bring; between short steps that follow each other, now and then.

        A step leaves nothing of it in the processor's caches, and it is several times as much code as a step.
        """
        self._tend_s, self._num_changes = now + TEND_EVERY_S, self._jobs.num_changes
        self._residency.tend(now)
        self._count_own()
        self._jobs.expire(now)
        self._preparations.expire(now)
        self._report.tend(now)

    def _count_own(self) -> None:
        """Have the devices know what of their memory is ours, which changes with the models in memory."""
        holders = self._residency.holders
        self._streamed.is_loading = self._residency.is_mapping
        if holders == self._holders:
            return
        self._holders = holders
        held: dict[str, dict[str, int]] = {}
        for runner in holders or ():
            if on_devices := runner.backend.extensions.devices:
                sizes = on_devices.memory_by_device()
                held[runner.spec.id] = {device: sum(lines.values()) for device, lines in sizes.items()}
        self._devices.hold(None if holders is None else held)
        self._streamed.hold(holders or ())

    def _step(self, now: float) -> None:
        """Give one model a turn; with nothing to compute, warm devices and store what is only in cells."""
        runner = None if now < self._nap_until_s else self._runners.next_with_work(now, self._held_until_s)
        self._is_stepping = runner is not None
        if runner is not None:
            runner.schedule(now)
            self._flush()  # admissions are published before a step that may crash
            runner.step(self._clock.now())
            runner.stepped_s = self._busy_s = self._clock.now()
            self._is_clean = False
            self._runners.served(runner, self._busy_s - now)
            if self._runners.throttle.halves_time:
                self._timer.collect()  # its time is not the nap's
                self._nap_until_s = self._busy_s + (self._busy_s - now)
        elif now >= self._rest_s and not self._runners.has_work:
            self._use_time(now)
        if runner is None or len(self._runners) > 1:
            self._settle_held(now)

    def _use_time(self, now: float) -> None:
        """Nothing is to be computed: what nobody waits for, in parts."""
        if (cold := self._cold()) is not None:
            self._flush()  # that it is ready is known before it is warm
            cold.warm(now)
        else:
            self._rest()

    @property
    def _is_busy(self) -> bool:
        """Whether something is to be computed, or was just now: who was answered may ask for more at once."""
        return self._runners.has_work or self._clock.now() < self._rest_s

    @property
    def _rest_s(self) -> float:
        """When there is time for what nobody waits for, if nothing comes."""
        return max(self._busy_s + REST_AFTER_S, self._nap_until_s)

    def _held_until_s(self, runner: ModelRunner) -> float:
        """Until when a step that would begin prompts waits for those on their way; 0: it does not.

        Where others run, which wait with it, a step waits once, and for people's requests that are new alone.
        """
        if not runner.gathers:
            return 0.0
        if runner.running and (not runner.num_new or self._runners.throttle != Throttle()):
            return 0.0
        arrivals = [sequence.arrival_s for each in runner.queues for sequence in each.queue]
        if not 0 < len(arrivals) < runner.spec.num_slots - len(runner.running):
            return 0.0
        num_coming = self._preparations.num_quick(runner.prep)
        if runner.running:
            return runner.stepped_s + COMING_S if runner.num_new <= COMING_SHARE * num_coming else 0.0
        latest_s = min(arrivals) + GATHER_S
        return latest_s if num_coming else min(latest_s, max(arrivals) + LULL_S)

    def _held_due_s(self, runner: ModelRunner, now: float) -> tuple[float, ...]:
        """When a model whose next step is held is to be looked at."""
        until_s = self._held_until_s(runner)
        return (until_s, runner.flight.due_s) if until_s > now else ()

    def _settle_held(self, now: float) -> None:
        """Finish and deliver the step in flight of each model whose next one is held, once it is over.

        Where no other model has work it is waited for.
        """
        for runner in self._runners:
            if self._held_until_s(runner) <= now:
                continue
            if runner.flight.due_s <= now or sum(each.has_work for each in self._runners) == 1:
                runner.settle(now)

    def _cold(self) -> ModelRunner | None:
        """A model whose kernels may be warmed: nothing waits, runs, is loaded or held back."""
        if not self._warms or self._phase is not _LoopPhase.RUNNING or self._runners.throttle != Throttle():
            return None
        cold = next((runner for runner in self._runners if runner.is_cold), None)
        is_busy = self._jobs.has_requests or self._runners.has_work or self._residency.is_loading
        return None if is_busy else cold

    # ------------------------------------------------------------ waiting and publishing

    def _wait_s(self) -> float | None:
        """Nothing to compute: sleep until something arrives, or is due."""
        now = self._clock.now()
        if self._runners.has_work:
            if now < self._nap_until_s:
                return self._nap_until_s - now
            looks = [at for runner in self._runners for at in self._held_due_s(runner, now)]
            return min((at - now for at in looks if at > now), default=0.0)
        due = [
            self._jobs.next_deadline_s(),
            self._preparations.next_due_s(now),
            self._residency.next_due_s(now),
            self._store.next_due_s(self._rest_s),
            self._report.next_due_s(),
        ]
        if self._phase is _LoopPhase.DRAINING:
            due.append(self._until_s)
        is_dirty = self._cleans_eagerly and not self._is_clean
        if self._runners.has_unstored or is_dirty or self._cold() is not None:
            due.append(self._rest_s)
        soonest = min((at for at in due if at is not None), default=None)
        return None if soonest is None else max(0.0, soonest - now)

    def _rest(self) -> None:
        """Nothing is to be computed: what is only in cells is stored, one sequence a turn."""
        for runner in self._runners:
            if runner.has_unstored:
                runner.rest(self._clock.now())
                return
        if self._cleans_eagerly and not self._is_clean:
            malloc.trim()
        self._is_clean = True

    def _save(self) -> None:
        """Before the end: what was computed goes to disk, as far as that is quick."""
        until_s = self._until_s if self._phase is _LoopPhase.SUSPENDING else self._clock.now() + SAVE_LIMIT_S
        while self._runners.has_unstored and self._clock.now() < until_s:
            self._rest()
        self._store.hurry()
        while True:
            self._store.tend(self._clock.now())
            wait_s = until_s - self._clock.now()
            if self._store.is_saved or wait_s <= 0:
                return
            for item in self._inbox.take(wait_s):
                if isinstance(item, StoreOutcome):
                    self._store.handle(item, self._clock.now())

    def _flush(self) -> None:
        if self._events:
            self._publish(list(self._events))
            self._events.clear()

    def _drain(self) -> None:
        now = self._clock.now()
        if self._jobs.has_requests and now < self._until_s:
            return
        self._jobs.cancel_all(now)
        self._phase = _LoopPhase.CLOSED

    # ------------------------------------------------------------ commands and posts

    def _handle(self, item: Item) -> None:
        match item:
            case Submit() | Cancel() | Pause() | Resume() | Prepared() | PrepareFailed():
                self._request(item)
            case KnowModel() | LoadModel() | UnloadModel() | PinModel() | LostDevices():
                self._residency.command(item, self._clock.now())
            case Sized() | LoadMoved() | Loaded() | LoadFailed():
                self._residency.post(item, self._clock.now())
                if isinstance(item, Loaded):
                    found = item.backend.capabilities
                    apart = _numerics() if self._is_sharing and found.is_repeatable else ""
                    self._store.model_loaded(item.path, found.fingerprint, apart)
            case Measured(sample):
                if self._pressure_handler.measured(sample, self._clock.now()) and self._monitor:
                    self._monitor.poke()
            case (
                ExportState()
                | ImportState()
                | StateRead()
                | Tokenize()
                | Watch()
                | Detokenize()
                | CountTokens()
                | GetStatus()
                | Reply()
            ):
                self._question(item)
            case Suspend() | Shutdown() | Closed():
                self._end(item)
            case Released.RELEASED:
                pass  # `tend` frees what can be

    def _question(self, item: TextQuestion | StateQuestion | StateRead | GetStatus | Watch | Reply) -> None:
        match item:
            case ExportState() | ImportState() | StateRead():
                self._moves.take(item, self._clock.now())
            case Watch():
                self._report.watch(item, self._clock.now())
            case GetStatus(call_id):
                status = self._report.status(self._num_turns)
                self._events.append(Reply(call_id=call_id, value={"status": status}))
            case Reply():
                self._events.append(item)
            case _:
                self._text(item)

    def _request(self, item: Submit | Cancel | Pause | Resume | Prepared | PrepareFailed) -> None:
        now = self._clock.now()
        match item:
            case Submit():
                self._submit(item)
            case Prepared() | PrepareFailed():
                self._prepared(item)
            case Cancel(request_id):
                self._jobs.cancel(request_id, now)
            case Pause(request_id):
                self._jobs.pause(request_id, now)
            case Resume(request_id):
                self._jobs.resume(request_id, now)

    def _end(self, item: Suspend | Shutdown | Closed) -> None:
        now = self._clock.now()
        match item:
            case Suspend(save_s):
                self._until_s = now + save_s
                self._jobs.drop_all(now)
                self._pending.drop_questions()
                self._phase = _LoopPhase.SUSPENDING
            case Shutdown(drain_s):
                self._phase, self._until_s = _LoopPhase.DRAINING, now + drain_s
                self._inbox.interrupt.close()  # the end of that time is not to find a long step
            case Closed.CLOSED:
                self._jobs.cancel_all(now)
                self._phase = _LoopPhase.CLOSED

    def _submit(self, submit: Submit) -> None:
        request = submit.request
        if self._phase is _LoopPhase.SUSPENDING:
            return  # the next engine gets it
        try:
            if self._phase is not _LoopPhase.RUNNING:
                raise NotReadyError("the engine is stopping")
            runner = self._residency.runner_for(request.model)
            if not submit.generated:
                self._check_queue(submit, runner)
        except StokerError as error:
            self._events.append(Failed(submit.request_id, error.info()))
            return
        self._residency.used(request.model, request.keep_alive_s, self._clock.now())
        self._pending.enter(submit, runner)

    def _check_queue(self, submit: Submit, runner: ModelRunner | None) -> None:
        model, priority = submit.request.model, submit.request.priority
        num_arriving = len(self._jobs.pending(model))
        if runner is not None:
            runner.check_queue(priority, num_arriving)
        else:
            queue = RequestQueue(self._residency.max_queue(model))
            queue.check_queue(priority, num_arriving, RETRY_WHILE_LOADING_S)

    def _prepared(self, post: Prepared | PrepareFailed) -> None:
        pending = self._jobs.get(post.job.request_id if isinstance(post, Prepared) else post.request_id)
        if pending is None:
            return  # cancelled meanwhile; its terminal event is out
        runner, now = self._runners.find(pending.model), self._clock.now()
        if runner is None or runner.prep is not post.context:
            self._pending.prepared_in_vain(pending, runner)
        elif isinstance(post, PrepareFailed):
            self._jobs.fail(pending, post.error, now)
        else:
            self._accept(pending, post.job, runner, now)

    def _accept(self, pending: Job, job: Job, runner: ModelRunner, now: float) -> None:
        try:
            runner.accept(job, now)
        except StokerError as error:
            job.close()
            self._jobs.fail(pending, error, now)
        else:
            if pending.is_paused:
                self._jobs.pause(job.request_id, now)

    def _text(self, ask: TextQuestion) -> None:
        try:
            runner = self._residency.runner_for(ask.model)
        except StokerError as error:
            self._events.append(Reply(call_id=ask.call_id, error=error.info()))
            return
        self._residency.wanted(ask.model)
        self._pending.ask(ask, runner)


def _shared_place(config: EngineConfig) -> SharedPlace | None:
    if not config.prefix_store:
        return None
    return SharedPlace(config.prefix_store, config.prefix_store_bytes, config.prefix_store_ttl_s)


def _numerics() -> str:
    """What the bits of a state depend on beside its model: other CPUs round otherwise."""
    from stoker.models.trials import cpu_identity  # noqa: PLC0415 - only where states go to other machines

    return repr(cpu_identity())


def _sources(config: EngineConfig, devices: HeldDevices, streamed: StreamedWeights) -> Sources:
    """What is measured: this process, the client's where that is another, and what models compute on."""
    own = os.getpid()
    pids = (os.getppid(), own) if config.has_own_process else (own,)
    heat = heat_source(Path(config.heat_trace) if config.heat_trace else None)
    return Sources(
        memory_limit=config.memory_limit,
        pids=pids,
        heat=heat,
        devices=devices.samples,
        mapped_bytes=streamed.resident_bytes,
        is_mapping=lambda: streamed.is_loading,
    )
