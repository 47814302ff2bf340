"""Who is told of what happens on the front's side of the engine, and who keeps requests over its end.

Two narrow interfaces that the host calls and somebody above it implements; nothing is decided here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stoker.ipc.commands import Submit
    from stoker.ipc.events import MachineEvent, ModelState, RequestEvent


class Watcher(Protocol):
    """Is told; must be quick, and must not raise."""

    def engine_moved(self, state: str, why: str) -> None:
        """The engine's lifecycle came to `state`."""
        ...

    def model_moved(self, event: ModelState) -> None:
        """A served model, or a download, moved."""
        ...

    def machine_moved(self, event: MachineEvent) -> None:
        """Pressure, a rung or heat."""
        ...

    def request_moved(self, event: RequestEvent) -> None:
        """A request moved; deltas are not told."""
        ...


class StoresRequests(Protocol):
    """Keeps requests where they survive this program; called by one task, one call after the other."""

    async def keep(self, requests: list[Submit]) -> None:
        """The engine is suspended: keep these, and no others. Must not raise."""
        ...

    async def release(self) -> None:
        """The engine is to come back: what has a client here need not be kept any more. Must not raise."""
        ...


class Nobody:
    """Watches nothing and keeps nothing."""

    def engine_moved(self, state: str, why: str) -> None:
        """See `Watcher`."""

    def model_moved(self, event: ModelState) -> None:
        """See `Watcher`."""

    def machine_moved(self, event: MachineEvent) -> None:
        """See `Watcher`."""

    def request_moved(self, event: RequestEvent) -> None:
        """See `Watcher`."""

    async def keep(self, requests: list[Submit]) -> None:
        """See `StoresRequests`."""

    async def release(self) -> None:
        """See `StoresRequests`."""
