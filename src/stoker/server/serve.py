"""A server from start to exit: the port, the runtime, the readiness line; a command calls `run_server`.

What answers requests is `service`'s, which is imported while the engine loads its models.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import signal
import socket
import sys
import time
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stoker.errors import InvalidRequestError, MachineSetupError
from stoker.private import forbid_core_files
from stoker.server.inbound.security import is_loopback
from stoker.server.run_file import RunFile, registered, url_of
from stoker.server.service_manager import notify
from stoker.server.signals import StopSwitch
from stoker.server.start import RuntimeStart

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.client.process.transport import ProcessTransport
    from stoker.ipc.events import ModelState
    from stoker.runtime import Runtime
    from stoker.server.service import Service
    from stoker.settings import EngineSettings, ServerSettings


log = logging.getLogger(__name__)

_BACKLOG = 512
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
    engine_settings: EngineSettings,
    server_settings: ServerSettings,
    screen: Screen | None = None,
    ahead: ProcessTransport | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        engine_settings: how models run, and which.
        server_settings: where, and for whom.
        screen: shows how it is doing; None: the readiness line alone.
        ahead: an engine's process that was spawned already; None: one is when it is needed.

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
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(engine_settings, server_settings, listener, screen or Screen(), ahead))


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
    ahead: ProcessTransport | None,
) -> int:
    from stoker.runtime import Runtime  # noqa: PLC0415 - after the port is known to be free

    runtime = Runtime(settings=engine_settings)
    runtime.ahead = ahead
    is_at_work = asyncio.Event()

    def loading(state: ModelState) -> None:
        is_at_work.set()
        screen.loading(state)

    runtime.on_load = loading
    start = RuntimeStart(runtime)
    try:
        await start.until(is_at_work)
        module = await asyncio.to_thread(import_module, "stoker.server.service")  # while the engine loads
        service: Service = module.Service(runtime, server_settings, listener)
    except BaseException:
        await start.close_runtime()
        start.log.detach()
        raise
    switch = StopSwitch(service)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, switch.take, number)
    loop.add_signal_handler(signal.SIGUSR1, service.sleep.suspend)
    loop.add_signal_handler(signal.SIGUSR2, service.sleep.resume)
    watching = asyncio.ensure_future(screen.watch(service))
    with contextlib.ExitStack() as stack:

        def announce(line: dict[str, Any]) -> None:
            gc.freeze()  # what is there now stays: collections that come with requests need not look at it
            stack.enter_context(registered(engine_settings.run_dir, _run_file(line, runtime)))
            screen.ready(json.dumps(line), service)
            notify("READY=1")

        try:
            await service.run(announce, start)
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
