"""The front's side of the engine: starts it, restarts it, replays what it was doing, ends it.

Owns the engine's state and the task that supervises one life after the other. The live requests are
`requests`', what to replay and whom to charge is `replay`'s, which models to load `roster`'s, open questions
are `calls`', one life and its watchdog `life`'s, how an engine is carried `carrier`'s.

Everything runs on one event loop. Where the engine died clients see a pause; every request gets exactly
one terminal event, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stoker.engine.calls import Calls, Question
from stoker.engine.carrier import NewCarrier, carrier_for
from stoker.engine.death import Death, OomCounter
from stoker.engine.life import Life
from stoker.engine.requests import EventSink, Requests
from stoker.engine.roster import Roster
from stoker.engine.state import EngineState, Lifecycle
from stoker.engine.watchdog import Backoff
from stoker.engine.wire import WireError
from stoker.errors import ErrorInfo, MachineSetupError, NotReadyError, error_from_info
from stoker.messages import (
    Command,
    Delta,
    Event,
    GetStatus,
    Goodbye,
    Heartbeat,
    HeatMoved,
    Hello,
    ModelState,
    PressureMoved,
    Reply,
    RungTaken,
    Shutdown,
    Submit,
)
from stoker.settings import EngineSettings
from stoker.values import ModelSpec

if TYPE_CHECKING:
    from stoker.request import GenerateRequest

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
EXIT_LIMIT_S = 10.0
"""What an engine may take, after its drain, to save what it computed, free everything and leave."""

OnModelState = Callable[[ModelState], None]


def ignore_state(state: ModelState) -> None:
    """Watch no loads."""


class EngineHost:
    """One engine, kept alive.

    Args:
        settings: the engine's.
        specs: models to serve, loaded again after every restart.
        on_load: called with every state a model reports.
        new_carrier: makes the carrier of each life.
    """

    def __init__(
        self,
        settings: EngineSettings,
        specs: list[ModelSpec],
        *,
        on_load: OnModelState = ignore_state,
        new_carrier: NewCarrier = carrier_for,
    ) -> None:
        self._settings = settings
        self._on_load = on_load
        self._new_carrier = new_carrier
        self._lifecycle = Lifecycle()
        self.roster = Roster(specs)
        self._requests = Requests(settings.max_queue, self.roster, self._send)
        self._calls = Calls()
        self._backoff = Backoff()
        self._oom = OomCounter()
        self._life: Life | None = None
        self._num_restarts = 0
        self._num_failed_starts = 0
        self._closed = asyncio.Event()
        self._started: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<EngineHost {self._lifecycle!r} {self._life!r} live={len(self._requests)}>"

    # ------------------------------------------------------------ questions

    @property
    def state(self) -> EngineState:
        """Where the engine is in its lifecycle."""
        return self._lifecycle.state

    @property
    def is_taking(self) -> bool:
        """Whether `submit` takes requests: serving, or away and expected back."""
        is_away = self.state is EngineState.RESTARTING and self._num_failed_starts < MAX_FAILED_STARTS
        return self.state is EngineState.SERVING or is_away

    @property
    def pid(self) -> int:
        """The engine's process, or that of its last life; 0 before the first."""
        return self._life.pid if self._life else 0

    @property
    def num_restarts(self) -> int:
        """Lives that ended without being asked to."""
        return self._num_restarts

    def stats(self) -> dict[str, int]:
        """What the host holds now."""
        return {
            **self._requests.stats(),
            "num_open_calls": len(self._calls),
            "num_restarts": self._num_restarts,
        }

    # ------------------------------------------------------------ life of the host

    async def start(self) -> None:
        """Start the engine and load every model.

        Raises:
            MachineSetupError: the engine process does not come up.
            ModelError: a model cannot be loaded (the first one that failed); nothing is left running.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="stoker-engine-host")
        try:
            await self._started
        except BaseException:
            await self.close(0.0)
            raise

    async def close(self, drain_s: float | None = None) -> None:
        """Take no more requests, let those that run finish for `drain_s`, end the rest, end the engine.

        Idempotent: a second call waits for the first. `drain_s` None takes the settings'.
        """
        if self._closing is None:
            drain_s = self._settings.drain_s if drain_s is None else drain_s
            self._closing = asyncio.create_task(self._close(drain_s), name="stoker-engine-close")
        await asyncio.shield(self._closing)

    async def _close(self, drain_s: float) -> None:
        was_serving = self.state is EngineState.SERVING
        self._stop_intake("close")
        if self._task is None:
            return
        if self._life and was_serving:
            self._requests.close_held(NotReadyError("the engine is shutting down"))
            self._life.send(Shutdown(drain_s))
            await asyncio.wait({self._task}, timeout=drain_s + EXIT_LIMIT_S)
        if self._life:
            self._life.kill()
        await asyncio.wait({self._task}, timeout=EXIT_LIMIT_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _stop_intake(self, why: str) -> None:
        if not self._closed.is_set():
            self._lifecycle.move(EngineState.CLOSED, why)
            self._closed.set()

    async def _run(self) -> None:
        """The one task: every life in turn, and the clock beside it."""
        try:
            async with asyncio.TaskGroup() as group:
                clock = group.create_task(self._tick())
                await self._supervise()
                clock.cancel()
        except Exception:
            log.exception("the engine host failed: %r", self)
        finally:
            if self._life:
                self._life.kill()
            self._end_everything()

    async def _supervise(self) -> None:
        while not self._closed.is_set():
            life = Life(self._new_carrier(self._settings), self._settings.watchdog_s, self._take)
            self._life = life
            async with asyncio.TaskGroup() as group:
                boot = group.create_task(self._boot(life))
                death = await life.live(self._oom)
                boot.cancel()
            if self._closed.is_set():
                return
            self._bury(life, death)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), self._backoff.after_life(life.served_s))

    async def _boot(self, life: Life) -> None:
        """From Hello to serving. Models load one by one: if the engine dies, this one did it."""
        await life.wait_until_up()
        self._num_failed_starts = 0
        for spec in self.roster.to_load():
            await life.load(spec, self.roster)
        if self.state is EngineState.STARTING and self.roster.failures():
            self._fail_start()
            return
        self._serve(life)

    def _serve(self, life: Life) -> None:
        life.begin_serving()
        self._lifecycle.move(EngineState.SERVING, f"pid {life.pid}")
        if self._started and not self._started.done():
            self._started.set_result(None)
        self._requests.fail_unservable()
        self._hand_out()

    def _bury(self, life: Life, death: Death) -> None:
        """Draw the consequences of a death that nobody asked for."""
        self._num_restarts += 1
        log.warning("engine %d %s; starting another", life.pid, death.reason)
        if not life.is_up and death.is_blamable:
            self._num_failed_starts += 1
        elif life.loading and death.is_blamable:
            self.roster.charge(life.loading, death.reason)
        self.roster.begin_life()
        self._requests.bury(death)
        self._calls.bury(death)
        if self.state is EngineState.SERVING:
            self._lifecycle.move(EngineState.RESTARTING, death.reason)
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            self._give_up(death)
        elif self.state is EngineState.STARTING and self.roster.failures():
            self._fail_start()

    def _fail_start(self) -> None:
        """A model of the first start failed: `start` raises its error and closes."""
        if self._started and not self._started.done():
            self._started.set_exception(error_from_info(next(iter(self.roster.failures().values()))))

    def _give_up(self, death: Death) -> None:
        """The engine does not come up: nobody is kept waiting, though starting is tried on."""
        error = MachineSetupError(
            f"the engine process does not start ({self._num_failed_starts} times), last: {death.reason}",
            retry_after_s=2.0,
        )
        if self._started and not self._started.done():
            self._started.set_exception(error)
        self._requests.fail_all(error)
        self._calls.fail_all(error)

    def _end_everything(self) -> None:
        """Whatever has not ended yet ends here, exactly once."""
        self._stop_intake("the host's task ended")
        error = NotReadyError("the engine has shut down")
        self._requests.close(error)
        self._calls.fail_all(error)
        if self._started and not self._started.done():
            self._started.set_exception(error)

    async def _tick(self) -> None:
        """Look after what no message announces: a hung engine, a deadline that passes without an engine."""
        while True:
            await asyncio.sleep(min(0.5, self._settings.watchdog_s / 4))
            if self._life:
                self._life.check(time.monotonic())
            self._requests.expire()

    # ------------------------------------------------------------ requests

    def submit(self, request_id: str, request: GenerateRequest, sink: EventSink) -> None:
        """Run a request; `sink` is called with each of its events, last a `Finished` or a `Failed`.

        Raises:
            NotReadyError: not started, or closed.
            QueueFullError: as many requests of its model wait as may for one of its class; said at once,
                whatever the engine does.
            InvalidRequestError: a live request has that id.
        """
        self._check_open()
        self._requests.submit(request_id, request, sink)
        self._hand_out()

    def cancel(self, request_id: str) -> None:
        """End a request; its open choices finish as `cancelled`.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self._requests.cancel(request_id)
        self._hand_out()

    def pause(self, request_id: str) -> None:
        """Let a request stand still until `resume`; the engine's end does not change that. Idempotent.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self._requests.pause(request_id)
        self._hand_out()

    def resume(self, request_id: str) -> None:
        """Let a paused request go on. Idempotent.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self._requests.resume(request_id)
        self._hand_out()

    async def ask(self, question: Question) -> dict[str, Any]:
        """The engine's answer to `question`, whatever call id it carries.

        Raises:
            NotReadyError: closed, or the engine is away and the question is about its present state.
            StokerError: what the engine answered.
        """
        self._check_open()
        if isinstance(question, GetStatus) and self.state is not EngineState.SERVING:
            raise NotReadyError(f"the engine is {self.state}", retry_after_s=1.0)
        answer = self._calls.open(question)
        self._hand_out()
        return await answer

    def _check_open(self) -> None:
        if self.state in {EngineState.STARTING, EngineState.CLOSED}:
            raise NotReadyError(f"the engine is {self.state}", retry_after_s=1.0)

    # ------------------------------------------------------------ to and from the engine

    def _hand_out(self) -> None:
        """Give the serving engine what it may have by now."""
        if self.state is not EngineState.SERVING:
            return
        commands: list[Submit | Question] = [*self._requests.release()]
        if not self._requests.is_on_trial:
            commands += self._calls.take_unsent()
        for command in commands:
            try:
                self._send(command)
            except WireError as error:
                self._refuse(command, error.info())

    def _refuse(self, command: Submit | Question, error: ErrorInfo) -> None:
        """It is too large to be sent."""
        if isinstance(command, Submit):
            self._requests.fail(command.request_id, error)
        else:
            self._calls.settle(Reply(call_id=command.call_id, error=error))

    def _send(self, command: Command) -> None:
        if self._life:
            self._life.send(command)

    def _take(self, life: Life, events: list[Event]) -> None:
        """One frame from an engine; what a former life still says is not heard."""
        if life is not self._life:
            return
        for event in events:
            self._take_one(life, event)
        self._hand_out()

    def _take_one(self, life: Life, event: Event) -> None:
        match event:
            case Hello():
                life.greet()
            case Heartbeat():
                life.beat(event)
            case ModelState():
                self.roster.record(event)
                life.note_model()
                asyncio.get_running_loop().call_soon(self._on_load, event)  # its errors are its own
            case Reply():
                self._calls.settle(event)
            case Goodbye() | PressureMoved() | RungTaken() | HeatMoved():
                pass
            case _:
                self._requests.take(event)
                if isinstance(event, Delta) and event.token_ids:
                    self._backoff.reset()
