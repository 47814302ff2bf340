"""A server from start to exit: the port, the runtime, the readiness line and shutdown.

`Service` runs one app and one runtime on the running loop; `run_server` is what the command line calls.
The server accepts connections while models load: /health answers, everything else says 503 (SPEC S3, S6).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from stoker.errors import InvalidRequestError, MachineSetupError
from stoker.private import forbid_core_files
from stoker.server.app import create_app, server_context
from stoker.server.inbound.connections import (
    Connection,
    Connections,
    connections_within,
    descriptor_limit,
    raise_limit,
)
from stoker.server.inbound.security import is_loopback
from stoker.server.log import EventLog
from stoker.server.run_file import RunFile, registered, url_of
from stoker.server.service_manager import notify
from stoker.server.signals import SleepSwitch, StopSwitch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.ipc.events import ModelState
    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings, ServerSettings


log = logging.getLogger(__name__)

_BACKLOG = 512
_CLOSE_S = 5  # for connections to take their last bytes after every stream has ended
_LAST_BYTES_S = 0.3  # the same where the user does not wait
_REASONS = {
    errno.EADDRINUSE: "is in use; stop the other program or choose another port with --port",
    errno.EACCES: "may not be opened by this user; choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "is not available: this machine has no such address; choose another with --host",
}


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; nothing else is started before the port is known to be ours.

    Raises:
        MachineSetupError: the port is in use or may not be opened, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise MachineSetupError(f"there is no address {host!r} to listen on: {error}", param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, f"cannot be opened: {error.strerror}")
        raise MachineSetupError(f"port {port} on {host} {reason}", param="port", port=port) from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: a signal first drains the runtime."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """One runtime behind one listening socket.

    Attributes:
        context: what the routes share.
        server: uvicorn's, for its connections and tasks.
        sleep: for suspend and resume that no client waits for.

    Args:
        runtime: not started yet; started and closed here.
        settings: of the server.
        listener: from `bind`; closed here.

    Raises:
        MachineSetupError: the API key file cannot be read.
    """

    def __init__(self, runtime: Runtime, settings: ServerSettings, listener: socket.socket) -> None:
        self.context = server_context(runtime, settings)
        self._runtime = runtime
        self._listener = listener
        self._stopping = asyncio.Event()
        self.sleep = SleepSwitch(runtime)
        self.server = _Server(
            uvicorn.Config(
                create_app(self.context),
                http=self._protocol(settings),
                ws="none",
                lifespan="off",
                access_log=False,
                log_level="warning",
                log_config=None,
                server_header=False,
                forwarded_allow_ips="127.0.0.1",  # by no environment: who is local may operate the server
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )

    @staticmethod
    def _protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
        """What uvicorn makes a connection of."""
        bound = connections_within(settings.max_connections)
        if bound < settings.max_connections:
            log.warning(
                "%d connections at most instead of %d, as this process may open %d files (ulimit -n)",
                bound,
                settings.max_connections,
                descriptor_limit(),
            )
        connections = Connections(bound, settings.receive_timeout_s)
        return cast("type[asyncio.Protocol]", partial(Connection, connections))

    def stop(self) -> None:
        """Begin the shutdown: refuse new work, drain, then end what is left. May be called twice."""
        self.context.is_stopping = True
        notify("STOPPING=1")
        self._stopping.set()

    def hurry(self) -> None:
        """End what a shutdown waits for: requests at once, connections after their last bytes."""
        self._runtime.hurry()
        asyncio.get_running_loop().call_later(_LAST_BYTES_S, setattr, self.server, "force_exit", True)

    @property
    def num_live(self) -> int:
        """Requests and calls that have not ended."""
        return len(self._runtime.with_client())

    async def run(self, announce: Callable[[dict[str, Any]], None]) -> None:
        """Serve until `stop`; returns when every stream has had its end (SPEC L4).

        Args:
            announce: called once with the readiness line's content (SPEC I3).

        Raises:
            StokerError: the runtime could not start, or it ended unasked: nothing lingers without an engine.
        """
        logging_events = asyncio.ensure_future(EventLog().follow(self._runtime.events()))
        self.context.log.attach()
        serving = asyncio.ensure_future(self.server.serve(sockets=[self._listener]))
        starting = asyncio.ensure_future(self._runtime.start())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                announce(self._ready_line())
                if self.context.settings.follow_sleep:
                    self.sleep.follow_machine()
                await self._until_over(stopping, serving)
        finally:
            self.context.is_stopping = True
            starting.cancel()
            stopping.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)
            await self.sleep.close()
            await self._runtime.close()
            await logging_events  # it ends with the runtime
            self.server.should_exit = True
            await serving
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
        host, port = self._listener.getsockname()[:2]
        return host, port

    def _ready_line(self) -> dict[str, Any]:
        host, port = self.address
        models = [info.id for info in self._runtime.models]
        return {"event": "ready", "host": host, "port": port, "pid": os.getpid(), "models": models}


class Screen:
    """What shows how the server is doing; this one says that it is ready, and nothing else."""

    def loading(self, state: ModelState) -> None:
        """A model has come further."""

    def ready(self, line: str, service: Service) -> None:  # noqa: ARG002 - for those that show more
        """It serves. Puts the readiness line, JSON, on stdout."""
        print(line, flush=True)  # noqa: T201 - the one thing this program says on stdout

    async def watch(self, service: Service) -> None:
        """Runs beside the server until it is cancelled."""


def run_server(
    engine_settings: EngineSettings, server_settings: ServerSettings, screen: Screen | None = None
) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        The exit code: 0, or 128 and the number of the signal that came again and cut requests short.

    Raises:
        InvalidRequestError: others would reach it without a key.
        MachineSetupError: the port or the key file is no good.
        StokerError: a model cannot be served.
    """
    forbid_core_files()  # one would hold prompts and keys
    listener = bind(server_settings.host, server_settings.port)
    with contextlib.closing(listener):
        _check_exposure(listener.getsockname()[0], server_settings)
        raise_limit(server_settings.max_connections)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(engine_settings, server_settings, listener, screen or Screen()))


def _check_exposure(address: str, settings: ServerSettings) -> None:
    if is_loopback(address) or settings.api_key_file is not None or settings.insecure:
        return
    raise InvalidRequestError(
        f"on {settings.host} other machines reach this server, which asks for no key: add --api-key-file FILE"
        " and --allowed-host NAME for each name or address that clients call it by, or --insecure to serve"
        " whoever comes",
        param="host",
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop of uvloop where there is one: half the cost of a token."""
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415 - not there on Windows

    return uvloop.new_event_loop


async def _serve(
    engine_settings: EngineSettings,
    server_settings: ServerSettings,
    listener: socket.socket,
    screen: Screen,
) -> int:
    from stoker.runtime import Runtime  # noqa: PLC0415 - after the port is known to be free

    runtime = Runtime(settings=engine_settings)
    runtime.on_load = screen.loading
    service = Service(runtime, server_settings, listener)
    switch = StopSwitch(service)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, switch.take, number)
    loop.add_signal_handler(signal.SIGUSR1, service.sleep.suspend)
    loop.add_signal_handler(signal.SIGUSR2, service.sleep.resume)
    watching = asyncio.ensure_future(screen.watch(service))
    with contextlib.ExitStack() as stack:

        def announce(line: dict[str, Any]) -> None:
            stack.enter_context(registered(engine_settings.run_dir, _run_file(line, runtime)))
            screen.ready(json.dumps(line), service)
            notify("READY=1")

        try:
            await service.run(announce)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    return switch.exit_status


def _run_file(ready: dict[str, Any], runtime: Runtime) -> RunFile:
    return RunFile(
        url=url_of(ready["host"], ready["port"]),
        pid=ready["pid"],
        version=version("stoker"),
        started_at=time.time(),
        models={info.id: info.path for info in runtime.models},
    )
