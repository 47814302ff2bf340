"""A server from start to exit: the port, the runtime, the readiness line, signals, sleep and shutdown.

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

from stoker.errors import MachineSetupError, StokerError
from stoker.power.sleep import SleepWatch
from stoker.private import forbid_core_files
from stoker.server.app import create_app, server_context
from stoker.server.inbound.connections import (
    Connection,
    Connections,
    connections_within,
    descriptor_limit,
    raise_limit,
)
from stoker.server.run_file import RunFile, registered, url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from stoker.power.sleep import Sleeper
    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings, ServerSettings


log = logging.getLogger(__name__)

_BACKLOG = 512
_CLOSE_S = 5  # for connections to take their last bytes after every stream has ended
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
        self._stopping.set()

    async def run(self, announce: Callable[[dict[str, Any]], None]) -> None:
        """Serve until `stop`; returns when every stream has had its end (SPEC L4).

        Args:
            announce: called once with the readiness line's content (SPEC I3).

        Raises:
            StokerError: the runtime could not start, or it ended unasked: nothing lingers without an engine.
        """
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
            self.server.should_exit = True
            await serving
            self.context.bodies.close()  # last: until then a connection may send one

    async def _until_over(self, *others: asyncio.Future[Any]) -> None:
        """Until one of `others` is done, or the runtime has ended unasked, which raises."""
        ended = asyncio.ensure_future(self._runtime.ended())
        try:
            await asyncio.wait((ended, *others), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await ended
        finally:
            ended.cancel()

    def _ready_line(self) -> dict[str, Any]:
        host, port = self._listener.getsockname()[:2]
        models = [info.id for info in self._runtime.models]
        return {"event": "ready", "host": host, "port": port, "pid": os.getpid(), "models": models}


def run_server(engine_settings: EngineSettings, server_settings: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT; print the readiness line on stdout.

    Returns:
        The exit code, 0.

    Raises:
        MachineSetupError: the port or the key file is no good.
        StokerError: a model cannot be served.
    """
    forbid_core_files()  # one would hold prompts and keys
    listener = bind(server_settings.host, server_settings.port)
    raise_limit(server_settings.max_connections)
    with contextlib.closing(listener), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(engine_settings, server_settings, listener))
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop of uvloop where there is one: half the cost of a token."""
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415 - not there on Windows

    return uvloop.new_event_loop


async def _serve(
    engine_settings: EngineSettings, server_settings: ServerSettings, listener: socket.socket
) -> None:
    from stoker.runtime import Runtime  # noqa: PLC0415 - after the port is known to be free

    runtime = Runtime(settings=engine_settings)
    service = Service(runtime, server_settings, listener)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    loop.add_signal_handler(signal.SIGUSR1, service.sleep.suspend)
    loop.add_signal_handler(signal.SIGUSR2, service.sleep.resume)
    with contextlib.ExitStack() as stack:

        def announce(line: dict[str, Any]) -> None:
            stack.enter_context(registered(engine_settings.run_dir, _run_file(line, runtime)))
            _print_line(line)

        await service.run(announce)


def _run_file(ready: dict[str, Any], runtime: Runtime) -> RunFile:
    return RunFile(
        url=url_of(ready["host"], ready["port"]),
        pid=ready["pid"],
        version=version("stoker"),
        started_at=time.time(),
        models={info.id: info.path for info in runtime.models},
    )


def _print_line(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201 - the one thing this program says on stdout


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
