"""The documents of a server's events, from now on: over the end of a connection, and of the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from stoker.cli.session import text_of
from stoker.errors import MachineSetupError, ServerLostError
from stoker.remote.wire import DONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.cli.top.view import Document
    from stoker.remote.connection import ServerConnection

EVENTS = "/v1/runtime/events"
SCHEMA = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0


class EventSource:
    """The documents of one server.

    Args:
        server: is open.
        on_lost: called with the reason when the server does not answer, and with "" when it does again.
    """

    def __init__(self, server: ServerConnection, on_lost: Callable[[str], None]) -> None:
        self._server = server
        self._on_lost = on_lost
        self._last_id = ""

    def __repr__(self) -> str:
        return f"<EventSource {self._server.url} after {self._last_id or 'nothing'}>"

    async def snapshot(self) -> Document:
        """The state of everything now.

        Raises:
            ServerLostError: no server answers.
            MachineSetupError: what answers is no Stoker, or one whose events are others.
            StokerError: the server lets nobody in.
        """
        async with aclosing(self._connected()) as documents:
            async for document in documents:
                return document
        raise ServerLostError(f"the server at {self._server.url} ended its events at once", param="url")

    async def documents(self) -> AsyncGenerator[Document, None]:
        """Everything from now on, a snapshot first; a server that goes away is waited for.

        Raises as `snapshot` does; ServerLostError only before the first document.
        """
        pause_s, has_begun = _FIRST_PAUSE_S, False
        while True:
            try:
                async with aclosing(self._connected()) as documents:
                    async for document in documents:
                        if not has_begun or pause_s > _FIRST_PAUSE_S:
                            self._on_lost("")
                        has_begun, pause_s = True, _FIRST_PAUSE_S
                        yield document
                reason = "the server ended its events"
            except ServerLostError as error:
                if not has_begun:
                    raise
                reason = text_of(error)
            self._on_lost(reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _connected(self) -> AsyncGenerator[Document, None]:
        """The documents of one connection, from where the last one ended."""
        headers = {"Last-Event-ID": self._last_id} if self._last_id else None
        async with aclosing(self._server.stream("GET", EVENTS, headers=headers)) as events:
            async for event in events:
                if event.data == DONE:
                    return
                document = self._server.read(event.data, dict[str, Any])
                self._last_id = event.id or self._last_id
                if document.get("event") == "snapshot" and document.get("schema") != SCHEMA:
                    text = (
                        f"the events of the server at {self._server.url} are of schema "
                        f"{document.get('schema', 1)}, and this version reads schema {SCHEMA}"
                    )
                    raise MachineSetupError(text, param="url")
                yield document
