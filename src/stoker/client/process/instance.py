"""One life of an engine: from the start of its carrier to its exit.

Owns what must not survive a restart: the carrier, the watchdog's knowledge, whether it was told to leave.
A life that is over is dropped whole, so nothing late from it can reach the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from stoker.client.process.exit import EngineExit, OomCounter, judge
from stoker.client.process.watchdog import Watchdog
from stoker.errors import MachineSetupError
from stoker.ipc.commands import Suspend
from stoker.ipc.events import Delta

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.client.models.registry import ModelRegistry
    from stoker.client.process.transport import Transport
    from stoker.ipc.commands import Command
    from stoker.ipc.events import Event, Heartbeat, RequestEvent

log = logging.getLogger(__name__)

START_LIMIT_S = 60.0
SAVE_S = 1.0
"""What an engine that is told to leave may take to save what it computed (SPEC L2)."""
LEAVE_LIMIT_S = 1.7
"""What it may take in all; then it is ended by force."""


class EngineInstance:
    """Starts, watches and, where it has to, kills one engine.

    Args:
        carrier: not started yet.
        watchdog_s: silence after which it counts as hung.
        on_events: called with this life and each frame.
    """

    def __init__(
        self,
        transport: Transport,
        watchdog_s: float,
        on_events: Callable[[EngineInstance, list[Event]], None],
    ) -> None:
        now = time.monotonic()
        self._transport = transport
        self._on_events = on_events
        self._watchdog = Watchdog(watchdog_s, now)
        self._born = now
        self._serving_since: float | None = None
        self._hang: str | None = None
        self._hello = asyncio.Event()
        self._model_moved = asyncio.Event()
        self._over = asyncio.Event()
        self.is_leaving = False
        """Whether it was told to leave: its end is no death, and nothing more is given to it."""
        self.has_worked = False
        """Whether it has delivered a token."""

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
        """Whether the engine is gone and everything that it said has been heard."""
        return self._over.is_set()

    @property
    def served_s(self) -> float:
        """Seconds since it began to serve."""
        return time.monotonic() - self._serving_since if self._serving_since is not None else 0.0

    async def live(self, oom: OomCounter) -> EngineExit:
        """Run it to its end; an engine that could not be started has ended too, whatever was the matter."""
        try:
            await self._transport.start(self._receive)
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

    def _receive(self, events: list[Event]) -> None:
        self._watchdog.sign(time.monotonic())
        self._on_events(self, events)

    async def wait_until_up(self) -> None:
        """Until Hello."""
        await self._hello.wait()

    def greet(self) -> None:
        """Hello arrived."""
        self._hello.set()

    async def load_due(self, registry: ModelRegistry, *, skips_suspects: bool) -> None:
        """Load what the roster says is due, one by one, until each has come to an end, good or bad."""
        while not self.is_leaving and (due := registry.next_due(skips_suspects=skips_suspects)) is not None:
            self.send(due)
            while not registry.is_settled(due.spec.id):
                self._model_moved.clear()
                await self._model_moved.wait()

    async def leave(self) -> None:
        """Have it save what it computed and go; returns when it is over.

        One that is not up has nothing to save and is ended at once.
        """
        self.is_leaving = True
        if self.is_up:
            self.send(Suspend(SAVE_S))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), LEAVE_LIMIT_S)
        if not self._over.is_set():
            self.kill()
            await self._over.wait()

    def note_model(self) -> None:
        """A model's state is on the roster."""
        self._model_moved.set()

    def begin_serving(self) -> None:
        """Every model is there."""
        self._serving_since = time.monotonic()

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat arrived."""
        self._watchdog.beat(heartbeat, now)

    def note_progress(self, event: RequestEvent) -> None:
        """A request moved; a token shows that this engine works."""
        self.has_worked = self.has_worked or (isinstance(event, Delta) and bool(event.token_ids))

    def check(self, now: float) -> None:
        """Kill it if it hangs: before Hello by the time a start may take, then by its heartbeats."""
        complaint = self._watchdog.check(now)
        if not self.is_up:
            took_s = now - self._born - self._watchdog.stalled_s
            complaint = f"no Hello within {START_LIMIT_S:g} s" if took_s > START_LIMIT_S else None
        if complaint and self._transport.can_kill and self._hang is None:
            log.error("engine %d hangs: %s", self.pid, complaint)
            self._hang = complaint
            self._transport.kill()

    def send(self, command: Command) -> None:
        """Hand a command in.

        Raises:
            WireError: it is too large.
        """
        self._transport.send(command)

    def kill(self) -> None:
        """End it by force."""
        self._transport.kill()
