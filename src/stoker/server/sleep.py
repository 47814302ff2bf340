"""Suspend and resume that no client waits for (SPEC L2): by signals, and with the machine's own sleep.

Owns the tasks that carry them out. What they do is the runtime's business; those by HTTP are routes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from stoker.errors import StokerError
from stoker.power.sleep import SleepWatch

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from stoker.power.sleep import Sleeper

log = logging.getLogger(__name__)


class SleepSwitch:
    """Suspends and resumes one runtime when told to; errors go to the log.

    Args:
        runtime: what is suspended and resumed.
    """

    def __init__(self, runtime: Sleeper) -> None:
        self._runtime = runtime
        self._acts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"SleepSwitch({len(self._acts)} under way)"

    def suspend(self) -> None:
        """Begin to suspend, after the grace that the settings say."""
        self._begin("suspend", self._runtime.suspend("signal"))

    def resume(self) -> None:
        """Begin to resume."""
        self._begin("resume", self._runtime.resume())

    def follow_machine(self, bus_address: str | None = None) -> None:
        """Sleep and wake with the machine from now on, where it tells of that.

        Args:
            bus_address: of the bus that logind is on; None: the system's.
        """
        self._begin("follow the machine's sleep", SleepWatch(self._runtime, bus_address).run())

    async def close(self) -> None:
        """Give up what is under way. Idempotent."""
        acts = list(self._acts)
        for act in acts:
            act.cancel()
        await asyncio.gather(*acts, return_exceptions=True)

    def _begin(self, what: str, work: Coroutine[None, None, None]) -> None:
        act = asyncio.ensure_future(_logged(what, work))
        self._acts.add(act)
        act.add_done_callback(self._acts.discard)


async def _logged(what: str, work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except StokerError as error:
        log.warning("could not %s: %s", what, error)
    except Exception:
        log.exception("could not %s", what)
