"""The front's side of the engine: starts it, restarts it, replays what it was doing, ends it.

Owns the engine's state and the task that supervises one engine instance after the other, with suspensions
between them. What waits for an engine (requests, questions, models) is in `dispatcher`, what to replay and
whom to charge in `requests.replay`, which models to load in `models.registry`, one instance and its watchdog
in `process.instance`, how an engine is reached in `process.transport`.

Everything runs on one event loop. Where the engine died or was suspended clients see a pause; every request
gets exactly one terminal event, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from stoker.client.dispatcher import Dispatcher
from stoker.client.models.registry import ModelRegistry
from stoker.client.process.descriptors import DescriptorReserve
from stoker.client.process.exit import EngineExit, OomCounter
from stoker.client.process.instance import EngineInstance
from stoker.client.process.lifecycle import EngineState, Lifecycle
from stoker.client.process.suspend import Suspension
from stoker.client.process.transport import NewTransport, ProcessTransport
from stoker.client.process.watchdog import Backoff
from stoker.client.requests.calls import Question
from stoker.client.requests.table import EventSink, Requests
from stoker.client.watcher import Nobody, StoresRequests, Watcher
from stoker.errors import EngineError, ErrorInfo, MachineSetupError, NotReadyError, error_from_info
from stoker.ipc.commands import GetStatus, Shutdown, Submit
from stoker.ipc.model import ModelSpec
from stoker.ipc.status import EngineHealth
from stoker.settings import EngineSettings

if TYPE_CHECKING:
    from stoker.client.models.loading import ModelLoading
    from stoker.client.requests.group import RequestGroup
    from stoker.errors import StokerError
    from stoker.ipc.request import GenerateRequest
    from stoker.ipc.status import ModelStatus

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""After so many failed starts in a row requests fail at once; further starts are tried all the same."""
EXIT_LIMIT_S = 10.0
"""What an engine may take, after its drain, to save what it computed, free everything and leave."""


class EngineSupervisor:
    """One engine, kept alive.

    Args:
        settings: the engine's.
        specs: models to serve.
        watcher: is told of what happens.
        keeper: keeps the requests of a suspended engine.
        new_transport: makes the transport of each engine; None: of child processes.
    """

    def __init__(
        self,
        settings: EngineSettings,
        specs: list[ModelSpec],
        *,
        watcher: Watcher | None = None,
        keeper: StoresRequests | None = None,
        new_transport: NewTransport | None = None,
    ) -> None:
        self._settings = settings
        watcher = Nobody() if watcher is None else watcher
        self._request_store = Nobody() if keeper is None else keeper
        self._reserve = DescriptorReserve()
        self._new_transport = new_transport or self._new_process
        self._lifecycle = Lifecycle(watcher.engine_moved)
        self.registry = ModelRegistry(specs)
        self._dispatcher = Dispatcher(settings.max_queue, self.registry, watcher)
        self._rest = Suspension()
        self._backoff = Backoff()
        self._oom = OomCounter()
        self._life: EngineInstance | None = None
        self._num_restarts = 0
        self._num_failed_starts = 0
        self._last_end = ""  # why the engine is not there
        self._next_start_s: float | None = None
        self._failure: ErrorInfo | None = None
        self._has_served = False
        self._is_closed = False
        self._is_kept = False  # what a suspension left is on disk, until an engine serves again
        self._releasing: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<EngineSupervisor {self._lifecycle!r} {self._life!r} {self._dispatcher!r}>"

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
        return self._rest.is_wanted and not self._is_closed

    @property
    def has_engine(self) -> bool:
        """Whether an engine serves now that was not told to leave."""
        return self._dispatcher.has_engine

    @property
    def pid(self) -> int:
        """The engine's process, or that of its last life; 0 before the first."""
        return self._life.pid if self._life else 0

    @property
    def num_restarts(self) -> int:
        """Lives that ended without being asked to."""
        return self._num_restarts

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
            reason=self._failure.message if self._failure else self._last_end if is_away else "",
        )

    @property
    def _health_state(self) -> str:
        if self._failure is not None:
            return "failed"
        if self.state is EngineState.CLOSED:
            return "closing" if self._task is not None and not self._task.done() else "closed"
        is_failing = self._is_failing and self.state is not EngineState.SUSPENDED
        return "failing" if is_failing else str(self.state)

    def statuses(self) -> list[ModelStatus]:
        """Every served model as it was last heard of; needs no engine."""
        return self._dispatcher.statuses()

    @property
    def requests(self) -> Requests:
        """The live requests and groups of them."""
        return self._dispatcher.requests

    @property
    def loads(self) -> ModelLoading:
        """Who waits for models to come or to go."""
        return self._dispatcher.loads

    def stats(self) -> dict[str, int]:
        """What the host holds now."""
        return {**self._dispatcher.stats(), "num_restarts": self._num_restarts}

    # ------------------------------------------------------------ life of the host

    async def start(self) -> None:
        """Start the engine and load every model that fits beside those before it.

        Raises:
            MachineSetupError: the engine process does not come up.
            ModelError: a model cannot be loaded (the first one that failed); nothing is left running.
            MachineError: not one could be, for want of memory or for heat.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._reserve.fill()
        self._task = asyncio.create_task(self._run(), name="stoker-engine-host")
        try:
            await self._started
        except BaseException:
            await self.close(0.0)
            raise

    async def ended(self) -> None:
        """Wait until the host has ended, after `close` or by a fault of its own.

        Raises:
            EngineError: it ended by such a fault, and no engine will be started any more.
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

    async def _close(self, drain_s: float) -> None:
        life = self._life
        was_serving = self._dispatcher.has_engine
        self._stop_intake("close")
        if self._task is None:
            return
        if life and was_serving:
            self.requests.close_held(NotReadyError("the engine is shutting down"))
            life.send(Shutdown(drain_s))
            await asyncio.wait({self._task}, timeout=drain_s + EXIT_LIMIT_S)
        if self._leaving and not self._leaving.done():  # it saves what it computed
            await asyncio.wait({self._leaving})
        elif self._life:
            self._life.kill()
        await asyncio.wait({self._task}, timeout=EXIT_LIMIT_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _stop_intake(self, why: str) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._lifecycle.move(EngineState.CLOSED, why)
            self._rest.ring()

    async def _run(self) -> None:
        """The one task: every life in turn, and the clock beside it."""
        try:
            async with asyncio.TaskGroup() as group:
                clock = group.create_task(self._tick())
                await self._supervise()
                clock.cancel()
        except Exception as error:
            log.exception("the engine host failed: %r", self)
            self._failure = _host_failure(error)
        finally:
            if self._life:
                self._life.kill()
            self._end_everything()
            self._reserve.close()

    async def _supervise(self) -> None:
        while not self._is_closed:
            if self._rest.is_wanted:
                await self._stay_away("suspended while no engine ran")
                continue
            transport = self._new_transport(self._settings)
            life = self._life = EngineInstance(transport, self._settings.watchdog_s, self._dispatcher.take)
            self._dispatcher.meet(life)
            async with asyncio.TaskGroup() as group:
                boot = group.create_task(self._boot(life))
                death = await life.live(self._oom)
                boot.cancel()
            if life.is_leaving:
                await self._stay_away("suspended")
            elif not self._is_closed:
                await self._pause_after(life, death)

    def _new_process(self, settings: EngineSettings) -> ProcessTransport:
        return ProcessTransport(settings, reserve=self._reserve)

    async def _pause_after(self, life: EngineInstance, death: EngineExit) -> None:
        """The back-off between an unexpected death and the next start."""
        if life.has_worked:
            self._backoff.reset()
        delay_s = self._backoff.after_life(life.served_s)
        self._next_start_s = time.monotonic() + delay_s
        self._bury(life, death, delay_s)
        await self._rest.until(lambda: self._is_closed or self._rest.is_wanted, delay_s)
        self._next_start_s = None

    async def _boot(self, life: EngineInstance) -> None:
        """From Hello to serving. Models load one by one: if the engine dies, this one did it."""
        await life.wait_until_up()
        if self._is_failing:
            log.warning("engine %d has come up after %d failed starts", life.pid, self._num_failed_starts)
        self._num_failed_starts = 0
        for known in self.registry.known():
            life.send(known)
        await life.load_due(self.registry, skips_suspects=self._has_served)
        if self.state is EngineState.STARTING and (failure := self.registry.start_failure()):
            self._fail_start(failure)
        elif not life.is_leaving:
            self._serve(life)

    def _serve(self, life: EngineInstance) -> None:
        life.begin_serving()
        self._has_served = True
        self._lifecycle.move(EngineState.SERVING, f"pid {life.pid}")
        if self._started and not self._started.done():
            self._started.set_result(None)
        self._dispatcher.serve()
        for suspect in self.registry.suspects_due():  # only now: the other models are served meanwhile
            life.send(suspect)
        if self._is_kept:  # from here on the engine's end is no end of a suspension
            self._is_kept = False
            self._releasing = asyncio.create_task(self._request_store.release(), name="stoker-release-kept")
        self._rest.ring()

    def _bury(self, life: EngineInstance, death: EngineExit, delay_s: float) -> None:
        """Draw the consequences of a death that nobody asked for."""
        self._num_restarts += 1
        self._last_end = death.reason
        if not life.is_up and death.is_blamable:
            self._num_failed_starts += 1
        num_failed = self._num_failed_starts
        if num_failed & (num_failed - 1) == 0:  # 0, 1, 2, 4, 8 ...: a cause that lasts fills no log
            failed = f" ({num_failed} failed starts in a row)" if num_failed else ""
            log.warning(
                "engine %d %s%s; the next start is in %.1f s", life.pid, death.reason, failed, delay_s
            )
        if life.is_up and death.is_blamable:
            death = death.beside(*(f"the load of {model}" for model in self.registry.charge(death)))
        self._dispatcher.bury(death)
        if self.state is EngineState.SERVING:
            self._lifecycle.move(EngineState.RESTARTING, death.reason)
        if self._is_failing:
            self._give_up(death)
        elif self.state is EngineState.STARTING and (failure := self.registry.start_failure()):
            self._fail_start(failure)

    def _fail_start(self, failure: ErrorInfo) -> None:
        """A model of the first start failed: `start` raises its error and closes."""
        if self._started and not self._started.done():
            self._started.set_exception(error_from_info(failure))

    def _give_up(self, death: EngineExit) -> None:
        """The engine does not come up: nobody is kept waiting, though starting is tried on."""
        error = self._setup_error(death.reason)
        if self._started and not self._started.done():
            self._started.set_exception(error)
        self._dispatcher.fail_all(error)
        self._rest.ring()

    def _setup_error(self, reason: str) -> MachineSetupError:
        return MachineSetupError(self._failing_text(reason), retry_after_s=self._retry_after_s)

    def _failing_text(self, reason: str) -> str:
        return f"the engine process does not start ({self._num_failed_starts} times), last: {reason}"

    @property
    def _retry_after_s(self) -> float:
        """When an engine may be back: not before the next start."""
        return max(1.0, self.health().next_start_s or 0.0)

    def _end_everything(self) -> None:
        """Whatever has not ended yet ends here, exactly once."""
        self._stop_intake("the host's task ended")
        error: StokerError = NotReadyError("the engine has shut down")
        if self._failure is not None:
            error = error_from_info(self._failure)
        if self._is_kept:
            error = NotReadyError("the program ends while suspended; its next start goes on with this")
        else:
            self.requests.close(error)
        self._dispatcher.fail_all(error)
        if self._started and not self._started.done():
            self._started.set_exception(error)

    async def _tick(self) -> None:
        """Look after what no message announces: a hung engine, a deadline that passes without an engine."""
        while True:
            await asyncio.sleep(min(0.5, self._settings.watchdog_s / 4))
            self._reserve.fill()
            if self._life and not self._life.is_over:
                self._life.check(time.monotonic())
            self.requests.expire()

    # ------------------------------------------------------------ sleep

    async def suspend(self, grace_s: float = 0.0) -> None:
        """Have the engine save what it computed and go, and keep every request; returns when that is done.

        Args:
            grace_s: first wait so long; `wake` meanwhile, and nothing changes.

        Raises:
            NotReadyError: not started, or closed.
        """
        self._check_running()
        if not await self._rest.grace(grace_s, lambda: self._is_closed):
            return
        self._check_running()
        if not self._rest.is_wanted:
            life = self._life
            if life and not (life.is_over or life.is_leaving):
                self._dispatcher.note_models()
                self._leaving = asyncio.create_task(life.leave(), name="stoker-engine-leave")
            self._rest.want()
        await self._rest.until(lambda: self._rest.is_on or self._is_closed or not self._rest.is_wanted)

    async def wake(self) -> None:
        """Start an engine again with the models there were, and let every request go on.

        Returns when it serves, or at once where it does; also when it was suspended again meanwhile.

        Raises:
            NotReadyError: not started, or closed meanwhile.
            MachineSetupError: the engine process does not come up.
        """
        self._check_running()
        if self._rest.is_wanted:  # what failed before says nothing of now
            self._num_failed_starts = 0
            self._backoff.reset()
        self._rest.wake()
        await self._rest.until(
            lambda: self._dispatcher.has_engine or self._rest.is_wanted or self._is_closed or self._is_failing
        )
        self._check_running()
        if self._is_failing:
            raise self._setup_error(self._last_end)

    async def _stay_away(self, why: str) -> None:
        """Between two lives, until `wake` or `close`; a `wake` that came already ends it at once."""
        self._dispatcher.sleep()
        if not self._is_closed:
            self._lifecycle.move(EngineState.SUSPENDED, why)
        await self._request_store.keep(self.requests.portable())
        self._is_kept = True
        self._rest.begin()
        await self._rest.until(lambda: self._is_closed or not self._rest.is_wanted)
        if self._is_closed:
            await self._request_store.keep(self.requests.portable())  # with those that came meanwhile
            return
        self._rest.end()
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

    def take_up(self, kept: Submit, sink: EventSink) -> None:
        """Go on with a request that another program kept.

        Raises:
            NotReadyError: not started, or closed.
            InvalidRequestError: a live request has that id.
        """
        self.check_open()
        self.requests.take_up(kept, sink)
        self._dispatcher.hand_out()

    def submit(
        self, request_id: str, request: GenerateRequest, sink: EventSink, group: RequestGroup | None = None
    ) -> None:
        """Run a request; `sink` is called with each of its events, last a `Finished` or a `Failed`.

        Raises:
            NotReadyError: not started, or closed.
            QueueFullError: as many requests of its model wait as may for one of its class; said at once,
                whatever the engine does.
            InvalidRequestError: a live request has that id.
        """
        self.check_open()
        self.requests.submit(request_id, request, sink, group)
        self._dispatcher.hand_out()

    def cancel(self, request_id: str) -> None:
        """End a request or a group of them; open choices finish as `cancelled`.

        Raises:
            RequestNotFoundError: no live request or group has that id.
        """
        self.requests.cancel(request_id)
        self._dispatcher.hand_out()

    def pause(self, request_id: str) -> None:
        """Let a request stand still until `resume`; the engine's end does not change that. Idempotent.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self.requests.pause(request_id)
        self._dispatcher.hand_out()

    def resume(self, request_id: str) -> None:
        """Let a paused request go on. Idempotent.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self.requests.resume(request_id)
        self._dispatcher.hand_out()

    async def ask(self, question: Question) -> dict[str, Any]:
        """The engine's answer to `question`, whatever call id it carries.

        Raises:
            NotReadyError: closed, or the engine is away and the question is about its present state.
            StokerError: what the engine answered.
        """
        self.check_open()
        if isinstance(question, GetStatus) and not self._dispatcher.has_engine:
            raise NotReadyError(f"the engine is {self.state}", retry_after_s=self._retry_after_s)
        answer = self._dispatcher.calls.open(question)
        self._dispatcher.hand_out()
        return await answer

    def check_open(self) -> None:
        """Refuse requests before the first engine serves, while starts keep failing, and after the end.

        Raises:
            NotReadyError: not started, closed, or starts fail one after the other.
            EngineError: the host ended by a fault of ours.
        """
        if self._failure is not None:
            raise error_from_info(self._failure)
        if self._is_failing and not self._rest.is_wanted:
            raise NotReadyError(self._failing_text(self._last_end), retry_after_s=self._retry_after_s)
        if self.state in {EngineState.STARTING, EngineState.CLOSED}:
            raise NotReadyError(f"the engine is {self.state}", retry_after_s=1.0)


def _host_failure(error: Exception) -> ErrorInfo:
    """What callers are told from here on; of several at once the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    text = f"the engine's host has failed and starts no other: {type(error).__name__}: {error}"
    return EngineError(text).info()
