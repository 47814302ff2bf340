"""One life of an engine: from the start of its carrier to its exit.

Owns what must not survive a restart: the carrier, the watchdog's knowledge, which model is loading.
A life that is over is dropped whole, so nothing late from it can reach the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from stoker.engine.death import Death, OomCounter, judge
from stoker.engine.watchdog import Watchdog
from stoker.errors import MachineSetupError
from stoker.messages import LoadModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.engine.carrier import Carrier
    from stoker.engine.roster import Roster
    from stoker.messages import Command, Event, Heartbeat
    from stoker.values import ModelSpec

log = logging.getLogger(__name__)

START_LIMIT_S = 60.0


class Life:
    """Starts, watches and, where it has to, kills one engine.

    Args:
        carrier: not started yet.
        watchdog_s: silence after which it counts as hung.
        on_events: called with this life and each frame.
    """

    def __init__(
        self, carrier: Carrier, watchdog_s: float, on_events: Callable[[Life, list[Event]], None]
    ) -> None:
        now = time.monotonic()
        self._carrier = carrier
        self._on_events = on_events
        self._watchdog = Watchdog(watchdog_s, now)
        self._born = now
        self._serving_since: float | None = None
        self._hang: str | None = None
        self._hello = asyncio.Event()
        self._model_moved = asyncio.Event()
        self.loading: str | None = None
        """Id of the model that this engine is loading for the host."""

    def __repr__(self) -> str:
        return f"<Life pid={self.pid} hello={self.is_up} loading={self.loading} hang={self._hang}>"

    @property
    def pid(self) -> int:
        """The process the engine runs in."""
        return self._carrier.pid

    @property
    def is_up(self) -> bool:
        """Whether it has said Hello."""
        return self._hello.is_set()

    @property
    def served_s(self) -> float:
        """Seconds since it began to serve."""
        return time.monotonic() - self._serving_since if self._serving_since is not None else 0.0

    async def live(self, oom: OomCounter) -> Death:
        """Run it to its end."""
        try:
            await self._carrier.start(self._receive)
        except MachineSetupError as error:
            return Death(error.message, is_blamable=True)
        end = await self._carrier.wait()
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

    async def load(self, spec: ModelSpec, roster: Roster) -> None:
        """Load a model; `roster` tells when that has come to an end, good or bad."""
        self.loading = spec.id
        self.send(LoadModel(spec))
        while not roster.is_settled(spec.id):
            self._model_moved.clear()
            await self._model_moved.wait()
        self.loading = None

    def note_model(self) -> None:
        """A model's state is on the roster."""
        self._model_moved.set()

    def begin_serving(self) -> None:
        """Every model is there."""
        self._serving_since = time.monotonic()

    def beat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat arrived."""
        self._watchdog.beat(heartbeat, time.monotonic())

    def check(self, now: float) -> None:
        """Kill it if it hangs: before Hello by the time a start may take, then by its heartbeats."""
        complaint = self._watchdog.check(now)
        if not self.is_up:
            complaint = f"no Hello within {START_LIMIT_S:g} s" if now - self._born > START_LIMIT_S else None
        if complaint and self._carrier.can_kill and self._hang is None:
            log.error("engine %d hangs: %s", self.pid, complaint)
            self._hang = complaint
            self._carrier.kill()

    def send(self, command: Command) -> None:
        """Hand a command in.

        Raises:
            WireError: it is too large.
        """
        self._carrier.send(command)

    def kill(self) -> None:
        """End it by force."""
        self._carrier.kill()
