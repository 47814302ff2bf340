"""Keeps one engine running: starts it, restarts it, suspends it, ends it.

Owns the engine's lifecycle and the task that runs one engine instance after the other. What waits for an
engine is in `dispatcher`, what is replayed and charged in `requests.replay`, which models to load in
`models.registry`, one instance with its watchdog in `process.instance`.

Everything runs on one event loop. While the engine is away, requests are held; each gets exactly one terminal
event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from importlib import metadata
from typing import TYPE_CHECKING, Any

from stoker.client.dispatcher import Dispatcher
from stoker.client.engine_view import EngineView
from stoker.client.event_bus import EventBus
from stoker.client.model_rows import ModelRows
from stoker.client.models.registry import ModelRegistry
from stoker.client.process.exit import DeviceLosses, EngineExit, OomCounter, UnreadFiles
from stoker.client.process.instance import Backoff, EngineInstance, check_period_s
from stoker.client.process.lifecycle import EngineState, Lifecycle, Suspension
from stoker.client.process.transport import DescriptorReserve, NewTransport, ProcessTransport, Transport
from stoker.client.requests.calls import Question
from stoker.client.requests.table import RequestTable
from stoker.client.snapshot import KnownEngine, snapshot_of
from stoker.errors import EngineError, ErrorInfo, MachineSetupError, NotReadyError, error_from_info
from stoker.ipc.commands import ExportState, GetStatus, Shutdown, StateQuestion
from stoker.ipc.model import ModelLife
from stoker.ipc.status import EngineHealth, ExitStatus, RuntimeStatus
from stoker.settings import EngineSettings

if TYPE_CHECKING:
    from stoker.client.models.specs import ModelSource
    from stoker.client.requests.record import RequestRecord
    from stoker.errors import StokerError

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""After so many failed starts in a row requests fail at once; further starts are tried all the same."""
EXIT_LIMIT_S = 10.0
"""What an engine may take, after its drain, to save what it computed, free everything and exit."""
HURRY_S = 0.2
"""What it may take for that where the user does not wait."""
MAX_EXITS = 16
"""Ends of engines that are still shown; past this the oldest goes."""


class EngineSupervisor:
    """One engine, kept running.

    Args:
        source: the settings, the models to serve, and those that can be had besides.
        bus: gets what happens.
        table: of requests; None: one without files, whose requests end with this program.
        new_transport: makes the transport of each engine; None: of child processes.
        first: transport of the first engine, which may have been spawned already; None: it is made as others.

    Attributes:
        registry: the models.
        requests: the live ones, and groups of them.
        loads: loads and unloads of models.
        takeover: models of settings that were read again.
        num_restarts: engines that ended without being asked to.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        bus: EventBus | None = None,
        table: RequestTable | None = None,
        new_transport: NewTransport | None = None,
        first: Transport | None = None,
    ) -> None:
        self._first = first
        self._settings = source.settings
        bus = EventBus() if bus is None else bus
        self._table = RequestTable() if table is None else table
        self._reserve = DescriptorReserve()
        self._new_transport = new_transport or self._new_process
        self._lifecycle = Lifecycle(bus.engine_moved)
        self.registry = ModelRegistry(source.served)
        self._dispatcher = Dispatcher(self._table, self.registry, source, bus)
        self.requests = self._dispatcher.requests
        self.loads = self._dispatcher.loads
        self.takeover = self._dispatcher.takeover
        self._models = ModelRows(self.loads, self.registry, self._table, self._dispatcher.figures, bus)
        self.num_restarts = 0
        self._suspension = Suspension()
        self._backoff = Backoff()
        self._losses = DeviceLosses()
        self._unread = UnreadFiles()
        self._oom = OomCounter()
        self._instance: EngineInstance | None = None
        self._num_failed_starts = 0
        self._last_exit = ""  # why the engine is not there
        self._next_start_s: float | None = None
        self._failure: ErrorInfo | None = None
        self._exits: deque[ExitStatus] = deque(maxlen=MAX_EXITS)
        self._view = EngineView(self._table, self.registry, self._dispatcher)
        self._began_s = time.monotonic()
        self._version = metadata.version("stoker")  # reads a file
        self._has_served = False
        self._is_closed = False
        self._is_hurried = False
        self._is_stored = False  # what a suspension left is on disk, until an engine serves again
        self._releasing: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<EngineSupervisor {self._lifecycle!r} {self._instance!r} {self._dispatcher!r}>"

    # ------------------------------------------------------------ questions

    @property
    def state(self) -> EngineState:
        """Where the engine is in its lifecycle."""
        return self._lifecycle.state

    @property
    def is_taking(self) -> bool:
        """Whether `submit` takes requests: serving, suspended, or away and expected back."""
        is_away = self.state is EngineState.RESTARTING and not self._is_failing
        return self.state in {EngineState.SERVING, EngineState.SUSPENDED} or is_away

    @property
    def is_suspended(self) -> bool:
        """Whether the engine is away, or leaving, until `wake`."""
        return self._suspension.is_wanted and not self._is_closed

    @property
    def pid(self) -> int:
        """The engine's process, or that of the last one; 0 before the first."""
        return self._instance.pid if self._instance else 0

    def health(self) -> EngineHealth:
        """Whether an engine serves, or what is done about it."""
        now = time.monotonic()
        is_away = self.state in {EngineState.STARTING, EngineState.RESTARTING}
        next_start_s = None
        if is_away and self._next_start_s is not None:
            next_start_s = max(0.0, self._next_start_s - now)
        return EngineHealth(
            state=self._health_state,
            for_s=now - self._lifecycle.since_s,
            num_failed_starts=self._num_failed_starts if is_away else 0,
            next_start_s=next_start_s,
            reason=self._failure.message if self._failure else self._last_exit if is_away else "",
        )

    @property
    def _health_state(self) -> str:
        if self._failure is not None:
            return "failed"
        if self.state is EngineState.CLOSED:
            return "closing" if self._task is not None and not self._task.done() else "closed"
        is_failing = self._is_failing and self.state is not EngineState.SUSPENDED
        return "failing" if is_failing else str(self.state)

    async def status(self) -> RuntimeStatus:
        """What `/v1/runtime` shows; the engine's part is empty where none serves."""
        engine = await self._view.status(self.ask)
        now = time.monotonic()
        default = next(iter(self.registry.infos()), None)
        return RuntimeStatus(
            pid=self.pid,
            state=self.state.value,
            restarts=self.num_restarts,
            label=self._models.label,
            threads=engine.num_threads or (default.num_threads if default else 0),
            engine=engine,
            health=self.health(),
            groups=[group.status(engine.queue) for group in self._table.groups.values()],
            requests=[live.status(now) for live in self._table.live() if live.group is None]
            + self.requests.history.loads.rows(),
            recent=list(self.requests.history.recent),
            exits=list(self._exits),
            as_of_s=0.0 if engine is self._view.last else self._view.age_s(),
            up_s=now - self._began_s,
            version=self._version,
            settings=self._settings.model_dump(mode="json"),
        )

    def snapshot(self) -> tuple[dict[str, Any], dict[str, str]]:
        """See `snapshot_of`."""
        health, last = self.health(), self._view.last
        default = next(iter(self.registry.infos()), None)
        engine = {
            "state": health.state,
            "for_s": health.for_s,
            "reason": health.reason,
            "pid": self.pid,
            "restarts": self.num_restarts,
            "label": self._models.label,
            "threads": last.num_threads or (default.num_threads if default else 0),
            "threads_reason": last.threads_reason,
        }
        figures, models = self._dispatcher.figures, self._models.rows()
        known = KnownEngine(self._version, engine, last, figures, models, self._view.slots(), self._exits)
        return snapshot_of(known, self._table, self.requests.history)

    def stats(self) -> dict[str, int]:
        """What waits now, and restarts so far."""
        return {**self._dispatcher.stats(), "num_restarts": self.num_restarts}

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Start the engine and load every model that fits beside those before it.

        Raises:
            MachineSetupError: the engine process does not come up.
            ModelError: a model cannot be loaded (the first one that failed); nothing is left running.
            MachineError: not one could be, for want of memory or for heat.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._reserve.fill()
        self._task = asyncio.create_task(self._run(), name="stoker-engine-supervisor")
        try:
            await self._started
        except BaseException:
            await self.close(0.0)
            raise

    async def ended(self) -> None:
        """Until no engine will be started any more, after `close` or by a fault of this class.

        Raises:
            EngineError: such a fault.
        """
        if self._task is not None:
            await asyncio.wait({self._task})
        if self._failure is not None:
            raise error_from_info(self._failure)

    async def close(self, drain_s: float | None = None) -> None:
        """Take no more requests, let those that run finish for `drain_s`, end the rest, end the engine.

        Idempotent: a second call waits for the first. `drain_s` None takes the settings'.
        """
        if self._closing is None:
            drain_s = self._settings.drain_s if drain_s is None else drain_s
            self._closing = asyncio.create_task(self._close(drain_s), name="stoker-engine-close")
        await asyncio.shield(self._closing)

    def hurry(self) -> None:
        """Cut the drain of a `close`, under way or to come, short; an engine that stays on is killed."""
        self._is_hurried = True
        if self._closing is not None:
            self._cut_short()

    def _cut_short(self) -> None:
        """One that is leaving for a suspension has its own, short limit."""
        if self._instance and not self._instance.is_leaving:
            self._instance.send(Shutdown(0.0))
            asyncio.get_running_loop().call_later(HURRY_S, self._instance.kill)

    async def _close(self, drain_s: float) -> None:
        instance = self._instance
        was_serving = self._dispatcher.has_engine
        self._stop_intake("close")
        if self._task is None:
            return
        if instance and was_serving:
            self.requests.close_held(NotReadyError("the engine is shutting down"))
            instance.send(Shutdown(drain_s))
            if self._is_hurried:
                self._cut_short()
            await asyncio.wait({self._task}, timeout=drain_s + EXIT_LIMIT_S)
        if self._leaving and not self._leaving.done():  # it saves what it computed
            await asyncio.wait({self._leaving})
        elif self._instance:
            self._instance.kill()
        await asyncio.wait({self._task}, timeout=EXIT_LIMIT_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _stop_intake(self, why: str) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._lifecycle.move(EngineState.CLOSED, why)
            self._suspension.ring()

    async def _run(self) -> None:
        """The one task: every instance in turn, and the clock beside it."""
        try:
            async with asyncio.TaskGroup() as group:
                clock = group.create_task(self._tick())
                await self._supervise()
                clock.cancel()
        except Exception as error:
            log.exception("the supervisor of the engine failed: %r", self)
            self._failure = _own_failure(error)
        finally:
            if self._instance:
                self._instance.kill()
            self._end_everything()
            self._reserve.close()

    async def _supervise(self) -> None:
        while not self._is_closed:
            if self._suspension.is_wanted:
                await self._stay_away("suspended while no engine ran")
                continue
            transport, self._first = self._first or self._new_transport(self._settings), None
            instance = self._instance = EngineInstance(
                transport, self._settings.watchdog_s, self._dispatcher.take
            )
            self._dispatcher.begin_instance(instance)
            async with asyncio.TaskGroup() as group:
                boot = group.create_task(self._boot(instance))
                ended = await instance.run(self._oom)
                boot.cancel()
            if instance.is_leaving:
                await self._stay_away("suspended")
            elif not self._is_closed:
                await self._pause_after(instance, ended)

    def _new_process(self, settings: EngineSettings) -> ProcessTransport:
        return ProcessTransport(settings, reserve=self._reserve, num_restarts=self.num_restarts)

    async def _pause_after(self, instance: EngineInstance, ended: EngineExit) -> None:
        """The back-off between an unexpected exit and the next start."""
        if self._dispatcher.has_delivered:
            self._backoff.reset()
        delay_s = self._backoff.after_serving(instance.served_s)
        self._next_start_s = time.monotonic() + delay_s
        self._take_exit(instance, ended, delay_s)
        await self._suspension.until(lambda: self._is_closed or self._suspension.is_wanted, delay_s)
        self._next_start_s = None

    async def _boot(self, instance: EngineInstance) -> None:
        """From Hello to serving. Models load one by one, so that a crash is charged to the right one."""
        await instance.wait_until_up()
        if self._is_failing:
            log.warning("engine %d has come up after %d failed starts", instance.pid, self._num_failed_starts)
        self._num_failed_starts = 0
        self._losses.tell(instance.send)
        for known in self.registry.known():
            instance.send(known)
        await instance.load_due(self.registry, skips_suspects=self._has_served)
        if self.state is EngineState.STARTING and (failure := self.registry.start_failure()):
            self._answer_start(error_from_info(failure))
        elif not instance.is_leaving:
            self._serve(instance)

    def _serve(self, instance: EngineInstance) -> None:
        instance.begin_serving()
        self._has_served = True
        self._lifecycle.move(EngineState.SERVING, f"pid {instance.pid}")
        self._answer_start(None)
        self._dispatcher.serve()
        for suspect in self.registry.suspects_due():  # only now: the other models are served meanwhile
            instance.send(suspect)
        if self._is_stored:
            self._releasing = asyncio.create_task(self._table.release(), name="stoker-release-stored")
        self._is_stored = False  # from here on the engine's end is no end of a suspension
        self._suspension.ring()

    def _take_exit(self, instance: EngineInstance, ended: EngineExit, delay_s: float) -> None:
        """Charge, report and answer for an exit that was not asked for."""
        ended = self._unread.explain(self._losses.note(ended), self._mapped_files())
        self.num_restarts += 1
        self._last_exit = ended.reason
        if not instance.is_up and ended.is_blamable:
            self._num_failed_starts += 1
        num_failed = self._num_failed_starts
        if num_failed & (num_failed - 1) == 0:  # 0, 1, 2, 4, 8 ...: a cause that lasts fills no log
            failed = f" ({num_failed} failed starts in a row)" if num_failed else ""
            log.warning(
                "engine %d %s%s; the next start is in %.1f s", instance.pid, ended.reason, failed, delay_s
            )
        if instance.is_up and ended.is_blamable:
            loading = self.registry.charge(ended, self.requests.running_models())
            ended = ended.beside(*(f"the load of {model}" for model in loading))
        num_before = len(list(self._table.live()))
        self._dispatcher.engine_exited(ended)
        num_survived = len(list(self._table.live()))
        self._exits.append(
            ExitStatus(
                at=time.time(),
                pid=instance.pid,
                reason=ended.reason,
                served_s=instance.served_s,
                num_survived=num_survived,
                num_failed=num_before - num_survived,
                next_start_s=delay_s,
            )
        )
        if self.state is EngineState.SERVING:
            self._lifecycle.move(EngineState.RESTARTING, ended.reason)
        if self._is_failing:
            self._give_up(ended)
        elif self.state is EngineState.STARTING and (failure := self.registry.start_failure()):
            self._answer_start(error_from_info(failure))

    def _mapped_files(self) -> dict[str, str]:
        """Paths of the files that the engine had mapped, by model."""
        specs = (known.spec for known in self.registry.known())
        in_memory = {ModelLife.LOADING, ModelLife.READY}
        return {
            spec.id: spec.path
            for spec in specs
            if spec.placement.mmap and self.registry.state(spec.id) in in_memory
        }

    def _answer_start(self, error: StokerError | None) -> None:
        """Have `start` return, or close and raise the error; once."""
        if self._started is None or self._started.done():
            return
        if error is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(error)

    def _give_up(self, ended: EngineExit) -> None:
        """Fail everything that waits: the engine does not come up, though further starts are tried."""
        error = self._setup_error(ended.reason)
        self._answer_start(error)
        self._dispatcher.fail_all(error)
        self._suspension.ring()

    def _setup_error(self, reason: str) -> MachineSetupError:
        return MachineSetupError(self._failing_text(reason), retry_after_s=self._retry_after_s)

    def _failing_text(self, reason: str) -> str:
        return f"the engine process does not start ({self._num_failed_starts} times), last: {reason}"

    @property
    def _retry_after_s(self) -> float:
        """Seconds until an engine may be back: not before the next start."""
        return max(1.0, self.health().next_start_s or 0.0)

    def _end_everything(self) -> None:
        """End what has not ended yet, exactly once."""
        self._stop_intake("the supervisor's task ended")
        error: StokerError = NotReadyError("the engine has shut down")
        if self._failure is not None:
            error = error_from_info(self._failure)
        if self._is_stored:
            error = NotReadyError("the program ends while suspended; its next start goes on with this")
        else:
            self.requests.close(error)
        self._dispatcher.fail_all(error)
        self._answer_start(error)

    async def _tick(self) -> None:
        """Find what no message announces: a hung engine, a deadline that passes without an engine."""
        while True:
            await asyncio.sleep(check_period_s(self._settings.watchdog_s))
            self._reserve.fill()
            if self._instance and not self._instance.is_over:
                self._instance.check(time.monotonic())
            self.requests.expire()
            self.requests.tell_progress()
            self._models.tell_changes()

    # ------------------------------------------------------------ suspension

    async def suspend(self, grace_s: float = 0.0) -> None:
        """Have the engine save what it computed and exit; every request is kept. Returns when that is done.

        Args:
            grace_s: seconds to wait first; a `wake` meanwhile calls it off.

        Raises:
            NotReadyError: not started, or closed.
        """
        self._check_running()
        if not await self._suspension.grace(grace_s, lambda: self._is_closed):
            return
        self._check_running()
        if not self._suspension.is_wanted:
            instance = self._instance
            if instance and not (instance.is_over or instance.is_leaving):
                self._dispatcher.note_models()
                self._leaving = asyncio.create_task(instance.leave(), name="stoker-engine-leave")
            self._suspension.want()
        await self._suspension.until(
            lambda: self._suspension.is_on or self._is_closed or not self._suspension.is_wanted
        )

    async def wake(self) -> None:
        """Start an engine with the models there were, and let every request go on.

        Returns when it serves, at once where it does, or when it was suspended again meanwhile.

        Raises:
            NotReadyError: not started, or closed meanwhile.
            MachineSetupError: the engine process does not come up.
        """
        self._check_running()
        if self._suspension.is_wanted:  # earlier failures say nothing of now
            self._num_failed_starts = 0
            self._backoff.reset()
            self._losses.forgive()
        self._suspension.wake()
        await self._suspension.until(
            lambda: (
                self._dispatcher.has_engine
                or self._suspension.is_wanted
                or self._is_closed
                or self._is_failing
            )
        )
        self._check_running()
        if self._is_failing:
            raise self._setup_error(self._last_exit)

    async def _stay_away(self, why: str) -> None:
        """Be suspended until `wake` or `close`; a `wake` that came already ends it at once."""
        self._dispatcher.sleep()
        if not self._is_closed:
            self._lifecycle.move(EngineState.SUSPENDED, why)
        await self._table.keep()
        self._is_stored = True
        self._suspension.begin()
        await self._suspension.until(lambda: self._is_closed or not self._suspension.is_wanted)
        if self._is_closed:
            await self._table.keep()  # with those that came meanwhile
            return
        self._suspension.end()
        self.requests.wake()
        if not self._is_closed:
            back = EngineState.RESTARTING if self._has_served else EngineState.STARTING
            self._lifecycle.move(back, "resumed")

    @property
    def _is_failing(self) -> bool:
        return self._num_failed_starts >= MAX_FAILED_STARTS

    def _check_running(self) -> None:
        if self._failure is not None:
            raise error_from_info(self._failure)
        if self._task is None or self._is_closed:
            raise NotReadyError(f"the engine is {self.state}")

    # ------------------------------------------------------------ requests

    def submit(self, record: RequestRecord) -> None:
        """Run a request; its sinks are called with each of its events, last a `Finished` or a `Failed`.

        Raises:
            NotReadyError: not started, or closed.
            QueueFullError: as many requests of its model wait as may for one of its class; raised at once,
                whatever the engine does.
            InvalidRequestError: its id is in use.
        """
        self.check_open()
        self.requests.submit(record)

    async def ask(self, question: Question) -> dict[str, Any]:
        """The engine's answer to `question`, whose call id is replaced.

        Raises:
            NotReadyError: closed, or the engine is away and the question is about its present state.
            StokerError: what the engine answered.
        """
        if not isinstance(question, ExportState):  # which is for an engine that drains
            self.check_open()
        if isinstance(question, GetStatus | StateQuestion) and not self._dispatcher.has_engine:
            raise NotReadyError(f"the engine is {self.state}", retry_after_s=self._retry_after_s)
        answer = self._dispatcher.calls.open(question)
        self._dispatcher.hand_out()
        return await answer

    def check_open(self) -> None:
        """Refuse requests before the first engine serves, while starts keep failing, and after the end.

        Raises:
            NotReadyError: not started, closed, or starts fail one after the other.
            EngineError: the supervisor ended by a fault of its own.
        """
        if self._failure is not None:
            raise error_from_info(self._failure)
        if self._is_failing and not self._suspension.is_wanted:
            raise NotReadyError(self._failing_text(self._last_exit), retry_after_s=self._retry_after_s)
        if self.state in {EngineState.STARTING, EngineState.CLOSED}:
            raise NotReadyError(f"the engine is {self.state}", retry_after_s=1.0)


def _own_failure(error: Exception) -> ErrorInfo:
    """The error of every call from here on; of several at once the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    text = f"the engine's supervisor has failed and starts no other: {type(error).__name__}: {error}"
    return EngineError(text).info()
