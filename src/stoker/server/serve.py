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
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stoker.errors import InvalidRequestError, MachineSetupError
from stoker.private import forbid_core_files
from stoker.server.inbound.address import is_loopback
from stoker.server.run_file import RunFile, registered, url_of
from stoker.server.service_manager import notify
from stoker.server.signals import ReloadSwitch, StopSwitch
from stoker.server.start import RuntimeStart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.client.process.transport import ProcessTransport
    from stoker.ipc.events import ModelState
    from stoker.runtime import Runtime
    from stoker.server.service import Service
    from stoker.server.signals import ReadSettings
    from stoker.settings import EngineSettings, ServerSettings

    NewRuntime = Callable[[EngineSettings], Runtime]

log = logging.getLogger(__name__)

_BACKLOG = 512
_REASONS = {
    errno.EADDRINUSE: "is in use; stop the other program or choose another port with {flag}",
    errno.EACCES: "may not be opened by this user; choose one above 1023 with {flag}",
    errno.EADDRNOTAVAIL: "is not available: this machine has no such address; choose another with --host",
}


def bind(
    host: str, port: int, setting: str = "port", *, is_shared: bool = False, flag: str = ""
) -> socket.socket:
    """A listening socket; nothing else is started before the port is known to be ours.

    Args:
        host: name or address.
        port: 0 picks a free one.
        setting: the one that says which port, for messages.
        flag: how people give it, for messages; empty: by an option of the setting's name.
        is_shared: others of this user that say so too may listen there; each gets a part of what comes.

    Raises:
        MachineSetupError: the port is in use or may not be opened, or the address is not this machine's.
    """
    family, kind, protocol, _, address = _found(host, port)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, f"cannot be opened: {error.strerror}")
        reason = reason.format(flag=flag or f"--{setting.replace('_', '-')}")
        raise MachineSetupError(f"port {port} on {host} {reason}", param=setting, port=port) from None
    return listener


def _found(host: str, port: int) -> tuple[Any, ...]:
    """What a socket needs to listen there, its address last. Raises MachineSetupError."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise MachineSetupError(f"there is no address {host!r} to listen on: {error}", param="host") from None


def check_addresses(settings: ServerSettings) -> None:
    """Refuse what `run_server` refuses of the addresses, without opening a port.

    Raises:
        InvalidRequestError: others would reach it without a key, or both ports are one.
        MachineSetupError: the host has no address.
    """
    *_, address = _found(settings.host, settings.port)
    _check_exposure(str(address[0]), settings)
    if settings.port and settings.port == settings.second_port:
        text = (
            f"ollama_port: {settings.port} is that of the server itself, which answers Ollama's clients too"
        )
        raise InvalidRequestError(text, param="ollama_port")


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
    new_runtime: NewRuntime | None = None,
    read_again: ReadSettings | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        engine_settings: how models run, and which.
        server_settings: where, and for whom.
        screen: shows how it is doing; None: the readiness line alone.
        new_runtime: makes the runtime; None: one whose engine is spawned when it is needed.
        read_again: the settings as they are at a SIGHUP; None: that ends the program.

    Returns:
        The exit code: 0, or 128 and the number of the signal that came again and cut requests short.

    Raises:
        InvalidRequestError: others would reach it without a key.
        MachineSetupError: the port or the key file is no good.
        StokerError: a model cannot be served.
    """
    forbid_core_files()  # one would hold prompts and keys
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(bind(server_settings.host, server_settings.port))]
        if (second := server_settings.second_port) is not None:
            listeners.append(stack.enter_context(bind(server_settings.host, second, "ollama_port")))
        _check_exposure(listeners[0].getsockname()[0], server_settings)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            settings = engine_settings, server_settings
            return runner.run(
                _serve(settings, listeners, screen or Screen(), new_runtime or new_engine, read_again)
            )


def _check_exposure(address: str, settings: ServerSettings) -> None:
    if is_loopback(address) or settings.api_key_file is not None or settings.keys or settings.insecure:
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
    settings: tuple[EngineSettings, ServerSettings],
    listeners: Sequence[socket.socket],
    screen: Screen,
    new_runtime: NewRuntime,
    read_again: ReadSettings | None,
) -> int:
    engine_settings, server_settings = settings
    runtime = new_runtime(engine_settings)
    is_at_work = asyncio.Event()

    def loading(state: ModelState) -> None:
        is_at_work.set()
        screen.loading(state)

    runtime.on_load = loading
    start = RuntimeStart(runtime)
    try:
        await start.until(is_at_work)
        module = await asyncio.to_thread(import_module, "stoker.server.service")  # while the engine loads
        service: Service = module.Service(runtime, server_settings, *listeners)
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
    reloads = None
    if read_again is not None and sys.platform != "win32":
        reloads = ReloadSwitch(read_again, settings, runtime.take_settings, service.context.take_keys)
        stop = partial(switch.take, signal.SIGHUP)
        loop.add_signal_handler(signal.SIGHUP, _hung_up, reloads.reload, stop, sys.stderr.isatty())
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
            if reloads is not None:
                await reloads.close()
    return switch.exit_status


def new_engine(settings: EngineSettings, ahead: ProcessTransport | None = None) -> Runtime:
    """A runtime with an engine of its own; `ahead`: its process, where it was spawned already."""
    from stoker.runtime import Runtime  # noqa: PLC0415 - after the port is known to be free

    runtime = Runtime(settings=settings)
    runtime.ahead = ahead
    return runtime


def _hung_up(reload: Callable[[], None], stop: Callable[[], None], had_terminal: bool) -> None:  # noqa: FBT001 - a signal's
    """A SIGHUP came: somebody asks for the settings to be read again, or the terminal was closed."""
    is_closed = had_terminal and not sys.stderr.isatty()
    (stop if is_closed else reload)()


def _run_file(ready: dict[str, Any], runtime: Runtime) -> RunFile:
    return RunFile(
        url=url_of(ready["host"], ready["port"]),
        pid=ready["pid"],
        version=version("stoker"),
        started_at=time.time(),
        models={info.id: info.path for info in runtime.models},
    )
