"""The service behind its listening sockets: one app and one runtime on the running loop, until it is stopped.

It accepts connections while models load: /health answers, everything else says 503 (SPEC S3, S6).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

import uvicorn

from stoker.server.app import create_app, server_context
from stoker.server.inbound.connections import (
    Connection,
    Connections,
    connections_within,
    descriptor_limit,
    raise_limit,
)
from stoker.server.service_manager import notify
from stoker.server.signals import SleepSwitch
from stoker.server.start import RuntimeStart

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from stoker.runtime import Runtime
    from stoker.settings import ServerSettings

log = logging.getLogger(__name__)

WEBSOCKET = "stoker.server.inbound.websocket:WebSocketConnection" if find_spec("websockets") else "none"
"""The extra `websockets` brings the library; without it a request to upgrade is answered as any other."""
_CLOSE_S = 5  # for connections to take their last bytes after every stream has ended
_LAST_BYTES_S = 0.3  # the same where the user does not wait


_LEAVE_POLL_S = 0.1


def _new_connections(settings: ServerSettings) -> Connections:
    """As many as the settings say, and the process may open."""
    raise_limit(settings.max_connections)
    bound = connections_within(settings.max_connections)
    if bound < settings.max_connections:
        log.warning(
            "%d connections at most instead of %d, as this process may open %d files (ulimit -n)",
            bound,
            settings.max_connections,
            descriptor_limit(),
        )
    return Connections(bound, settings.receive_timeout_s)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: a signal first drains the runtime."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """One runtime behind its listening sockets.

    Attributes:
        context: what the routes share.
        server: uvicorn's, for its connections and tasks.
        sleep: for suspend and resume that no client waits for.

    Args:
        runtime: not started yet; started and closed here.
        settings: of the server.
        listener: from `bind`; closed here.
        second: the same app listens there as well, at the port where clients of Ollama look; closed here.

    Raises:
        MachineSetupError: the API key file cannot be read.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: ServerSettings,
        listener: socket.socket,
        second: socket.socket | None = None,
    ) -> None:
        self.context = server_context(runtime, settings)
        self._runtime = runtime
        self._listeners = [listener] if second is None else [listener, second]
        self._stopping = asyncio.Event()
        self.sleep = SleepSwitch(runtime)
        self._connections = _new_connections(settings)
        self.server = _Server(
            uvicorn.Config(
                create_app(self.context),
                http=cast("type[asyncio.Protocol]", partial(Connection, self._connections)),
                ws=cast("Literal['none']", WEBSOCKET),  # uvicorn imports a name like this one
                ws_max_size=settings.max_body_bytes,
                ws_per_message_deflate=False,
                lifespan="off",
                access_log=False,
                log_level="warning",
                log_config=None,
                server_header=False,
                forwarded_allow_ips="127.0.0.1",  # by no environment: who is local may operate the server
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )

    def stop(self) -> None:
        """Begin the shutdown: refuse new work, drain, then end what is left. May be called twice."""
        self.context.is_stopping = True
        notify("STOPPING=1")
        self._stopping.set()

    async def leave_port(self, within_s: float) -> None:
        """Take no new connections, which go to whoever else listens there; afterwards `stop` loses nothing.

        Connections end with their answers. One that is idle has as long as ever for another request: its
        client cannot know.

        Args:
            within_s: past it this returns, although requests have not ended.
        """
        self._connections.dismiss()
        for one in self.server.servers:
            one.close()
        loop = asyncio.get_running_loop()
        idle_s, until_s = loop.time() + self.server.config.timeout_keep_alive, loop.time() + within_s
        while len(self._connections) and (self.num_live or loop.time() < idle_s) and loop.time() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(_LEAVE_POLL_S)  # connections, requests and clients' clocks tell no one

    def hurry(self) -> None:
        """End what a shutdown waits for: requests at once, connections after their last bytes."""
        self._runtime.hurry()
        asyncio.get_running_loop().call_later(_LAST_BYTES_S, setattr, self.server, "force_exit", True)

    @property
    def num_live(self) -> int:
        """Requests and calls that have not ended."""
        return len(self._runtime.with_client())

    async def run(
        self, announce: Callable[[dict[str, Any]], None], start: RuntimeStart | None = None
    ) -> None:
        """Serve until `stop`; returns when every stream has had its end (SPEC L4).

        Args:
            announce: called once with the readiness line's content (SPEC I3).
            start: the runtime's, where it has begun; None: it is begun here.

        Raises:
            StokerError: the runtime could not start, or it ended unasked: nothing lingers without an engine.
        """
        start = start or RuntimeStart(self._runtime)
        self.context.log = start.log
        serving = asyncio.ensure_future(self.server.serve(sockets=self._listeners))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((start.done, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if start.done.done():
                await start.done
                announce(self._ready_line())
                if self.context.settings.follow_sleep:
                    self.sleep.follow_machine()
                await self._until_over(stopping, serving)
        finally:
            self.context.is_stopping = True
            stopping.cancel()
            await self.sleep.close()
            await start.close_runtime()
            self.server.should_exit = True
            await serving
            await asyncio.to_thread(self.context.responses.close)
            if self.context.tracing is not None:
                await self.context.tracing.close()
            self.context.bodies.close()  # last: until then a connection may send one
            self.context.log.detach()

    async def _until_over(self, *others: asyncio.Future[Any]) -> None:
        """Until one of `others` is done, or the runtime has ended unasked, which raises."""
        ended = asyncio.ensure_future(self._runtime.ended())
        try:
            await asyncio.wait((ended, *others), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await ended
        finally:
            ended.cancel()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: IP address and port."""
        host, port = self._listeners[0].getsockname()[:2]
        return host, port

    @property
    def second_port(self) -> int | None:
        """The port where it listens for clients of Ollama as well; None: nowhere."""
        return self._listeners[1].getsockname()[1] if len(self._listeners) > 1 else None

    def _ready_line(self) -> dict[str, Any]:
        host, port = self.address
        models = [info.id for info in self._runtime.models]
        line = {"event": "ready", "host": host, "port": port, "pid": os.getpid(), "models": models}
        return line if self.second_port is None else line | {"ollama_port": self.second_port}
