"""The machine's own sleep (SPEC L2): suspends a runtime before it, resumes it after it.

Owns the lock that gives the time for that, and whether a resume is owed. `logind` talks to the system.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stoker.errors import MachineSetupError, StokerError

if TYPE_CHECKING:
    from stoker.power.logind import Logind, SleepLock

log = logging.getLogger(__name__)

WHY = "save the state of running requests"
BUS_SOCKET = Path("/run/dbus/system_bus_socket")
BUS_VARIABLE = "DBUS_SYSTEM_BUS_ADDRESS"
"""Where the system's bus is, unless this variable says otherwise (D-Bus specification)."""


class Sleeper(Protocol):
    """A runtime, as far as sleep needs it."""

    @property
    def is_suspended(self) -> bool:
        """Whether it is suspended now."""
        ...

    async def suspend(self, reason: str = "sleep", *, grace_s: float | None = None) -> None:
        """Free everything; returns when that is done."""
        ...

    async def resume(self) -> None:
        """Load everything again; returns when it serves."""
        ...


class SleepWatch:
    """Suspends and resumes a runtime with the machine; one that was suspended before stays so.

    Args:
        runtime: what is suspended and resumed.
        bus_address: of the bus that logind is on; None: the system's.
    """

    def __init__(self, runtime: Sleeper, bus_address: str | None = None) -> None:
        self._runtime = runtime
        self._bus_address = bus_address
        self._lock: SleepLock | None = None
        self._owes_resume = False

    def __repr__(self) -> str:
        return f"<SleepWatch lock={self._lock} owes_resume={self._owes_resume}>"

    async def run(self) -> None:
        """Follow the machine's sleep until cancelled; returns where the system does not report it."""
        if self._bus_address is None and not _has_bus():
            log.debug("the machine's sleep is not followed: there is no bus")
            return
        try:
            from stoker.power.logind import Logind  # noqa: PLC0415 - Linux only, where there is a bus
        except ImportError as error:
            log.debug("the machine's sleep is not followed: %s", error)
            return
        try:
            async with Logind(self._bus_address) as logind:
                await self._follow(logind)
        except MachineSetupError as error:
            log.debug("the machine's sleep is not followed: %s", error)
        else:
            log.warning("the system's bus is gone: the machine's sleep is not followed any more")
        finally:
            self._release()

    async def _follow(self, logind: Logind) -> None:
        """Act on each signal at once: a sleep must not wait for the end of a resume."""
        acts: set[asyncio.Task[None]] = set()
        try:
            self._lock = await logind.hold_back_sleep(WHY)
            async with aclosing(logind.sleeps()) as sleeps:
                async for is_asleep in sleeps:
                    act = asyncio.create_task(self._sleep() if is_asleep else self._wake())
                    acts.add(act)
                    act.add_done_callback(acts.discard)
                    if not is_asleep:
                        await self._hold_again(logind)
            if self._owes_resume:
                await self._wake()  # no signal will come
        finally:
            for act in list(acts):
                act.cancel()
            await asyncio.gather(*acts, return_exceptions=True)

    async def _hold_again(self, logind: Logind) -> None:
        self._release()
        try:
            self._lock = await logind.hold_back_sleep(WHY)
        except MachineSetupError as error:
            log.warning("the next sleep of the machine will leave no time to save states: %s", error)

    async def _sleep(self) -> None:
        lock, self._lock = self._lock, None
        self._owes_resume = self._owes_resume or not self._runtime.is_suspended
        log.info("the machine is going to sleep: suspending")
        try:
            await self._runtime.suspend("sleep", grace_s=0.0)
        except StokerError as error:
            log.warning("could not suspend before the machine sleeps: %s", error)
        except Exception:
            log.exception("suspending before the machine sleeps failed")
        finally:
            if lock is not None:
                lock.release()

    async def _wake(self) -> None:
        if not self._owes_resume:
            log.info("the machine woke; it was suspended before and stays so")
            return
        log.info("the machine woke: resuming")
        try:
            await self._runtime.resume()
        except StokerError as error:
            log.warning("could not resume after the machine woke: %s", error)
        except Exception:
            log.exception("resuming after the machine woke failed")
        self._owes_resume = self._runtime.is_suspended

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _has_bus() -> bool:
    """Whether the system has a bus; what talks to one takes megabytes, and containers seldom have any."""
    return BUS_VARIABLE in os.environ or BUS_SOCKET.exists()
