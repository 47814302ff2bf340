"""One engine instance, from the start of its transport to its exit; its watchdog, and the next start.

Owns what must not survive a restart: the transport, the watchdog's state, whether it is to leave. The
supervisor drops an instance that is over as a whole, so that nothing late from it reaches the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING

from stoker.client.process.exit import EngineExit, OomCounter, judge
from stoker.errors import MachineSetupError
from stoker.ipc.commands import Suspend

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.client.models.registry import ModelRegistry
    from stoker.client.process.transport import Transport
    from stoker.ipc.events import Event, Heartbeat

log = logging.getLogger(__name__)

START_LIMIT_S = 60.0
SAVE_S = 1.0
"""What an engine that is to leave may take to save what it computed (SPEC L2)."""
LEAVE_LIMIT_S = 1.7
"""What it may take in all; then it is killed."""
CLIENT_STALL_S = 1.0
"""A check this late means that the client itself stood still, and says nothing about the engine."""

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 2.0
HEALTHY_S = 10.0


def check_period_s(limit_s: float) -> float:
    """Seconds between two checks by a watchdog of that limit."""
    return min(0.5, limit_s / 4)


class Watchdog:
    """Tells a hung engine from a busy one by its heartbeats. Pure: time arrives as an argument.

    Args:
        limit_s: silence after which the engine counts as hung.
        now: seconds on a monotonic clock.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._last_sign = now
        self._last_check = now
        self._step_excess_s = 0.0
        self.stalled_s = 0.0
        """How long the client itself stood still, as shown by checks that came late."""

    def __repr__(self) -> str:
        return f"<Watchdog limit_s={self._limit_s} excess_s={self._step_excess_s:.1f}>"

    def sign(self, now: float) -> None:
        """Something arrived from the engine."""
        self._last_sign = now

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat arrived; it also says how long the running step takes."""
        self._last_sign = now
        over_s = heartbeat.step_s - heartbeat.step_limit_s
        self._step_excess_s = over_s if heartbeat.step_s > 0 else 0.0

    def check(self, now: float) -> str | None:
        """Why the engine has to be killed, or None."""
        late_s = now - self._last_check - check_period_s(self._limit_s)
        self._last_check = now
        if late_s > CLIENT_STALL_S:  # earlier signs say nothing any more
            self.stalled_s += late_s
            self._last_sign, self._step_excess_s = now, 0.0
            return None
        silence_s = now - self._last_sign
        if silence_s > self._limit_s:
            return f"no sign of life for {silence_s:.1f} s (limit {self._limit_s:g} s)"
        if self._step_excess_s > 0:
            return f"a step is {self._step_excess_s:.1f} s over its limit"
        return None


class Backoff:
    """Seconds to wait before a restart: none once the engine proved healthy, else doubling."""

    def __init__(self) -> None:
        self._delay_s = FIRST_DELAY_S

    def __repr__(self) -> str:
        return f"<Backoff delay_s={self._delay_s}>"

    def reset(self) -> None:
        """The engine delivered a token: it works, and who reads waits for the next one."""
        self._delay_s = 0.0

    def after_serving(self, served_s: float) -> float:
        """The delay after an engine that served for `served_s` seconds."""
        if served_s >= HEALTHY_S:
            self.reset()
        delay_s = self._delay_s
        self._delay_s = min(LAST_DELAY_S, delay_s * 2 or FIRST_DELAY_S)
        return delay_s


class EngineInstance:
    """Starts and watches one engine, and kills it when it hangs.

    Args:
        transport: not started yet.
        watchdog_s: silence after which it counts as hung.
        on_events: called with this instance and each frame.
    """

    def __init__(
        self,
        transport: Transport,
        watchdog_s: float,
        on_events: Callable[[EngineInstance, list[Event]], None],
    ) -> None:
        now = time.monotonic()
        self._transport = transport
        self.send = transport.send
        """Sends a command; raises WireError where it is too large."""
        self.kill = transport.kill
        """Ends the engine by force where the transport can."""
        self._on_events = on_events
        self._watchdog = Watchdog(watchdog_s, now)
        self.sign = self._watchdog.sign
        """Notes that a frame arrived, with the time on a monotonic clock."""
        self._born = now
        self._serving_since: float | None = None
        self._hang: str | None = None
        self._hello = asyncio.Event()
        self._model_moved = asyncio.Event()
        self._answers: dict[str, int] = {}  # by model: the last load or unload that is answered
        self._over = asyncio.Event()
        self.is_leaving = False
        """Whether it is to leave: its exit was asked for, and it gets no more work."""

    def __repr__(self) -> str:
        return f"<EngineInstance {self.pid} hello={self.is_up} leaving={self.is_leaving} hang={self._hang}>"

    @property
    def pid(self) -> int:
        """The process the engine runs in."""
        return self._transport.pid

    @property
    def is_up(self) -> bool:
        """Whether it has said Hello."""
        return self._hello.is_set()

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended and all its events have been taken."""
        return self._over.is_set()

    @property
    def served_s(self) -> float:
        """Seconds since it began to serve."""
        return time.monotonic() - self._serving_since if self._serving_since is not None else 0.0

    async def run(self, oom: OomCounter) -> EngineExit:
        """Run it to its exit; one that could not be started has ended too, for whatever reason."""
        try:
            await self._transport.start(functools.partial(self._on_events, self))
        except MachineSetupError as error:
            self._over.set()
            return EngineExit(error.message, is_blamable=True)
        except Exception as error:
            self._over.set()
            log.exception("an engine could not be started")
            return EngineExit(f"could not be started: {type(error).__name__}: {error}", is_blamable=True)
        try:
            end = await self._transport.wait()
        finally:
            self._over.set()
        return judge(end, self._hang, oom)

    async def wait_until_up(self) -> None:
        """Until Hello."""
        await self._hello.wait()

    def greet(self) -> None:
        """Hello arrived."""
        self._hello.set()

    async def load_due(self, registry: ModelRegistry, *, skips_suspects: bool) -> None:
        """Load what the registry says is due, one by one, each until it is ready or has failed."""
        while not self.is_leaving and (due := registry.next_due(skips_suspects=skips_suspects)) is not None:
            self.send(due)
            while self._answers.get(due.spec.id, 0) < due.ask_id:
                self._model_moved.clear()
                await self._model_moved.wait()

    async def leave(self) -> None:
        """Have it save what it computed and exit; returns when it is over. One that is not up is killed."""
        self.is_leaving = True
        if self.is_up:
            self.send(Suspend(SAVE_S))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), LEAVE_LIMIT_S)
        if not self._over.is_set():
            self.kill()
            await self._over.wait()

    def note_model(self, model: str, answers: int) -> None:
        """The registry has a model's new state; `answers` is that of the event."""
        self._answers[model] = max(answers, self._answers.get(model, 0))
        self._model_moved.set()

    def begin_serving(self) -> None:
        """Every model that was due is settled."""
        self._serving_since = time.monotonic()

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat arrived."""
        self._watchdog.beat(heartbeat, now)

    def check(self, now: float) -> None:
        """Kill it if it hangs: before Hello after START_LIMIT_S, then by its heartbeats."""
        complaint = self._watchdog.check(now)
        if not self.is_up:
            took_s = now - self._born - self._watchdog.stalled_s
            complaint = f"no Hello within {START_LIMIT_S:g} s" if took_s > START_LIMIT_S else None
        if complaint and self._transport.can_kill and self._hang is None:
            log.error("engine %d hangs: %s", self.pid, complaint)
            self._hang = complaint
            self._transport.kill()
