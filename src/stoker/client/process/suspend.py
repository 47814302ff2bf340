"""When the engine is to be away, and who waits for that to begin or to end (SPEC L2).

Owns the wishes of callers: suspend, after a grace, and wake. How an engine leaves is its life's business,
what becomes of requests meanwhile the desk's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

GRACES_S = {"sleep": 0.0, "background": 30.0}
"""What passes before a suspension for that reason (SPEC L2); other reasons: what is set."""


class Suspension:
    """Whether the engine shall be away, and whether it is.

    Attributes:
        is_wanted: it shall be away, until `wake`.
        is_on: it is away, and what it leaves behind is kept.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.is_on = False
        self._num_wakes = 0
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Suspension wanted={self.is_wanted} on={self.is_on} wakes={self._num_wakes}>"

    def ring(self) -> None:
        """Something has changed: let everybody who waits look again."""
        self._news.set()
        self._news.clear()

    async def until(self, condition: Callable[[], bool], limit_s: float | None = None) -> None:
        """Wait until `condition` holds, looked at after each ring; at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not condition():
                    await self._news.wait()

    async def grace(self, grace_s: float, is_moot: Callable[[], bool]) -> bool:
        """Let the grace pass; False where `wake` came first. It ends early where it `is_moot`."""
        wakes = self._num_wakes
        await self.until(lambda: self._num_wakes != wakes or self.is_wanted or is_moot(), grace_s)
        return self._num_wakes == wakes

    def want(self) -> None:
        """The engine shall go."""
        self.is_wanted = True
        self.ring()

    def begin(self) -> None:
        """It has gone."""
        self.is_on = True
        self.ring()

    def wake(self) -> None:
        """It shall come back; a grace that runs ends without effect."""
        self._num_wakes += 1
        self.is_wanted = False
        self.ring()

    def end(self) -> None:
        """It comes back."""
        self.is_on = False
