"""What is known of a server between two questions: its models, their states, whether it takes requests.

Owns the newest overview and the task that follows the server's events to keep it new. A server that is gone
is asked for again every few seconds; until it answers nothing is ready.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Any
from urllib.parse import urlencode

import msgspec

from stoker.client.event_bus import RuntimeEvent
from stoker.errors import ModelNotFoundError, NotReadyError, ServerLostError, StokerError
from stoker.ipc.events import ModelState
from stoker.ipc.model import ModelInfo
from stoker.ipc.status import EngineHealth, ModelStatus
from stoker.remote import wire
from stoker.remote.connection import ServerConnection

log = logging.getLogger(__name__)

POLL_S = 0.25
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 5.0
_OWN_FIELDS = frozenset({"event", "at", "id"})
_FOLLOWED = frozenset({"model", "engine"})
_CHANGING = frozenset({"is_pinned", "leases"})
"""Of a model's status: what changes without a move."""


class ServerMirror:
    """See the module.

    Args:
        server: that is asked.
        on_load: called with each state that a model reports while it loads.
    """

    def __init__(self, server: ServerConnection, on_load: Callable[[ModelState], None]) -> None:
        self._server = server
        self._on_load = on_load
        self._known: wire.Overview | None = None
        self._lost: StokerError | None = None
        self._moved_s = time.monotonic()
        self._following: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ServerMirror {self.health().state}>"

    async def start(self) -> None:
        """Read the overview, wait until the server takes requests, and follow it from then on.

        Raises:
            ServerLostError: no server answers.
            NotReadyError: its engine does not start, or it stops.
            StokerError: it lets nobody in who has no other key.
        """
        await self.refresh()
        self._following = asyncio.ensure_future(self._follow())
        while not (found := self._overview()).is_ready:
            if not found.health.is_alive:
                raise NotReadyError(
                    f"the server at {self._server.url} is {found.health.state}: {found.health.reason}"
                )
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def close(self) -> None:
        """Follow it no more. Idempotent."""
        self._known = None
        if self._following is not None:
            following, self._following = self._following, None
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def refresh(self) -> None:
        """Ask for the overview now. Raises what `ServerConnection.get` raises."""
        self._known = await self._server.get(wire.OVERVIEW, wire.Overview)
        if self._lost is not None:
            self._lost, self._moved_s = None, time.monotonic()

    # ------------------------------------------------------------ questions

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests."""
        return self._known is not None and self._lost is None and self._known.is_ready

    @property
    def is_suspended(self) -> bool:
        """Whether its engine is away until it is resumed."""
        return self._known is not None and self._known.is_suspended

    @property
    def models(self) -> list[ModelInfo]:
        """What it serves."""
        return list(self._known.models) if self._known is not None else []

    @property
    def states(self) -> list[ModelStatus]:
        """Models and downloads as they were last heard of."""
        return list(self._known.states) if self._known is not None else []

    def health(self) -> EngineHealth:
        """Of its engine; failing while the server itself does not answer."""
        for_s = time.monotonic() - self._moved_s
        if self._lost is not None:
            return EngineHealth(state="failing", for_s=for_s, reason=self._lost.message)
        return EngineHealth(state="closed") if self._known is None else self._known.health

    def resolve(self, model: str | None) -> ModelInfo:
        """The served model, or the model of the adapter, of that name; None and "default": the first.

        Raises:
            ModelNotFoundError: it is not served.
            NotReadyError: not connected.
        """
        models = self._overview().models
        if model in {None, "default"} and models:
            return models[0]
        for info in models:
            if info.id == model:
                return info
            if any(adapter.name == model for adapter in info.adapters):
                return msgspec.structs.replace(info, adapter=model)
        served = ", ".join(info.id for info in models) or "none"
        raise ModelNotFoundError(
            f"{self._server.url} serves no model {str(model)[:200]!r}; it serves: {served}", param="model"
        )

    def _overview(self) -> wire.Overview:
        if self._known is None:
            text = f"not connected to {self._server.url}: use the runtime in an `async with` block"
            raise NotReadyError(text)
        return self._known

    # ------------------------------------------------------------ events

    async def events(
        self, after: str = "", kinds: Collection[str] = ()
    ) -> AsyncGenerator[RuntimeEvent, None]:
        """What happens at the server from now on, or after an event; `kinds` as `Runtime.events` has them.

        Raises:
            MachineSetupError: an event is none of this version.
            StokerError: what `ServerConnection.stream` raises.
        """
        headers = {"Last-Event-ID": after} if after else None
        path = f"{wire.EVENTS}?{urlencode({'kinds': ','.join(sorted(kinds))})}" if kinds else wire.EVENTS
        async with aclosing(self._server.stream("GET", path, headers=headers)) as messages:
            async for message in messages:
                if message.data == wire.DONE:
                    return
                given = self._server.read(message.data, dict[str, Any])
                own = {name: given.pop(name) for name in _OWN_FIELDS & given.keys()}
                yield self._server.converted({**own, "fields": given}, RuntimeEvent)

    async def _follow(self) -> None:
        """Take in what happens, for ever; a server that is gone, or not understood, is asked again."""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                async with aclosing(self.events(kinds=_FOLLOWED)) as events:
                    async for event in events:
                        await self._take(event)
                        retry_s = _FIRST_RETRY_S
            except StokerError as error:
                self._lose(error)
            else:
                self._lose(ServerLostError(f"the server at {self._server.url} has ended", param="url"))
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _lose(self, error: StokerError) -> None:
        if self._lost is None:
            log.warning("%s", error.message)
            self._moved_s = time.monotonic()
        self._lost = error

    async def _take(self, event: RuntimeEvent) -> None:
        if event.event == "model" and event.fields.get("what") == "changed":
            await self._take_change(event.fields)
            return
        if event.event == "model":
            state = self._server.converted(event.fields, ModelState)
            asyncio.get_running_loop().call_soon(self._on_load, state)  # its errors are its own
            if state.stage and self._known is not None:
                self._known = msgspec.structs.replace(self._known, states=_moved(self._known.states, state))
                return
        if event.event in {"snapshot", "model", "engine"}:
            await self.refresh()

    async def _take_change(self, fields: dict[str, Any]) -> None:
        """Note what has changed of a model that is where it was, or that it is served from now on."""
        known = self._known
        if known is None or not any(one.id == fields["model"] for one in known.states):
            await self.refresh()
            return
        news = {name: fields[name] for name in _CHANGING & fields.keys()}
        states = [
            msgspec.structs.replace(one, **news) if one.id == fields["model"] else one for one in known.states
        ]
        self._known = msgspec.structs.replace(known, states=states)


def _moved(known: list[ModelStatus], model: ModelState) -> list[ModelStatus]:
    """The states with how far the load of one model is."""
    news = {"state": model.state, "stage": model.stage, "fraction": model.fraction}
    return [msgspec.structs.replace(one, **news) if one.id == model.model else one for one in known]
