"""A runtime's start as a server sees it: logged from its first event on, and called off as a whole.

Apart because it begins before what answers requests is imported.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stoker.server.log import LOGGED, EventLog, RecentLog

if TYPE_CHECKING:
    from stoker.runtime import Runtime

AT_WORK_S = 2.0
"""What an engine may take to begin a load, before this process does what it can do beside it."""


class RuntimeStart:
    """A runtime that starts.

    Args:
        runtime: not started yet; its start begins here.

    Attributes:
        log: its last records.
        done: the start; raises what `Runtime.start` raises.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.log = RecentLog()
        self.log.attach()
        self._logging = asyncio.ensure_future(EventLog().follow(runtime.events(kinds=LOGGED)))
        self.done = asyncio.ensure_future(runtime.start())

    def __repr__(self) -> str:
        return f"<RuntimeStart of {self._runtime!r}>"

    async def until(self, is_at_work: asyncio.Event) -> None:
        """Until the engine is at work, or for AT_WORK_S; raises what the start raises meanwhile."""
        loading = asyncio.ensure_future(is_at_work.wait())
        try:
            await asyncio.wait((loading, self.done), timeout=AT_WORK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loading.cancel()
        if self.done.done():
            await self.done

    async def close_runtime(self) -> None:
        """Call the start off, where it is not done, and close the runtime; its last events are logged."""
        self.done.cancel()
        await asyncio.gather(self.done, return_exceptions=True)
        await self._runtime.close()
        await self._logging  # it ends with the runtime
