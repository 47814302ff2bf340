"""Which replicas there are: what Ray's routers are told, for the door of the same process.

Apart from `serve_router`, whose module Ray copies by value: what is shared has to stay where it is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Roster:
    """The replicas of one deployment, as this process was told last. For several threads.

    Ray's routers write it, on a thread of theirs; the door reads it, on its event loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: tuple[str, ...] = ()
        self._held: frozenset[str] = frozenset()
        self._followers: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []

    def __repr__(self) -> str:
        return f"<Roster of {len(self._names)} replicas, {len(self._held)} held>"

    @property
    def names(self) -> tuple[str, ...]:
        """Replicas that take calls."""
        with self._lock:
            return self._names

    def has(self, name: str) -> bool:
        """Whether calls that name no replica may go there."""
        return name in self.names

    def holds(self, name: str) -> bool:
        """Whether one that takes no new work can still be called by its name."""
        with self._lock:
            return name in self._held

    def hold(self, name: str) -> None:
        """Let calls that name it reach it until `release`, also after Ray has taken it off the list."""
        with self._lock:
            self._held |= {name}

    def release(self, name: str) -> None:
        """It is not called any more. Idempotent."""
        with self._lock:
            self._held -= {name}

    def follow(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the running event loop after each change, and once now."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._followers.append((loop, changed))
        loop.call_soon(changed)

    def replace(self, names: tuple[str, ...]) -> None:
        """From now on these are the replicas."""
        with self._lock:
            if set(names) == set(self._names):
                return
            self._names = names
            followers = list(self._followers)
        for loop, changed in followers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed)

    def remove(self, name: str) -> None:
        """A replica has died."""
        self.release(name)
        self.replace(tuple(one for one in self.names if one != name))


_rosters: dict[tuple[str, str], Roster] = {}  # Ray makes routers by their class: they find it by their names


def roster_of(app: str, deployment: str) -> Roster:
    """That of a deployment; empty until a handle of it has been used in this process."""
    return _rosters.setdefault((app, deployment), Roster())
