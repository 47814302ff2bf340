"""Where an engine runs: in a child process (default) or in a thread of this one.

A transport starts one engine once, carries commands in and frames of events out, and reports its exit.
Restarts belong to `stoker.client.supervisor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from stoker.client.process.child import ENGINE_MODULE, EngineChild
from stoker.client.process.log_relay import wanted_level
from stoker.errors import MachineSetupError
from stoker.ipc.codec import encode_command, event_decoder
from stoker.ipc.engine_config import EngineConfig
from stoker.machine.device_lease import lease_folder
from stoker.native_crash import native_text

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Iterator

    from stoker.ipc.commands import Command
    from stoker.ipc.events import Event
    from stoker.settings import EngineSettings

log = logging.getLogger(__name__)
output_log = logging.getLogger("stoker.engine.output")
"""What an engine and native libraries in it print; in order they print nothing."""

LAST_READ_S = 1.0
"""Socket and stderr of an engine end with it; a process that it left behind delays us no longer than this."""
MAX_FRAMES_AHEAD = 1024
START_DESCRIPTORS = 9
"""A start opens eight: a socket pair, the pipes of its stdin and stderr, and the pipe on which a child says
that it could not be executed. One is for a library that opens a file meanwhile."""
KEPT_BYTES = 32 * 1024
"""Holds the dump of every thread's stack that Python writes at a crash, and what was said before it."""
MAX_LINE_BYTES = 8192

EventSink = Callable[[list["Event"]], None]


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How an engine ended.

    Attributes:
        status: 0 in order, > 0 an exit status, < 0 the signal's number.
        said: the last lines it wrote to its stderr; empty where that is this program's own.
    """

    status: int
    said: str = ""

    def __str__(self) -> str:
        if self.status >= 0:
            return f"exit status {self.status}"
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.status).name
        return f"signal {-self.status}"


class Transport(Protocol):
    """One engine, from start to exit. Used on the event loop that called `start`."""

    @property
    def pid(self) -> int:
        """The process the engine runs in."""
        ...

    @property
    def can_kill(self) -> bool:
        """Whether a hung engine can be ended by force."""
        ...

    async def start(self, on_events: EventSink) -> None:
        """Start the engine; `on_events` is called on this event loop with each frame.

        Raises:
            MachineSetupError: the machine refuses a process, a descriptor or a thread; nothing is left open.
        """
        ...

    def send(self, command: Command) -> None:
        """Send a command; after the exit it is dropped.

        Raises:
            WireError: the command is too large to be sent.
        """
        ...

    def kill(self) -> None:
        """End it by force where `can_kill`; after the exit, nothing."""
        ...

    async def wait(self) -> ExitReport:
        """Until its exit, with every event that it sent delivered."""
        ...


class DescriptorReserve:
    """Descriptors held open, and closed for each start, so that it finds some below the limit.

    Args:
        size: how many.
    """

    def __init__(self, size: int = START_DESCRIPTORS) -> None:
        self._size = size
        self._held: list[int] = []

    def __repr__(self) -> str:
        return f"<DescriptorReserve {len(self._held)} of {self._size}>"

    def __len__(self) -> int:
        return len(self._held)

    def fill(self) -> None:
        """Open what is missing, as far as the system allows."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Free them inside the block, which must not await: other tasks would take them."""
        self.close()
        try:
            yield
        finally:
            self.fill()

    def close(self) -> None:
        """Close all; `fill` opens them again."""
        while self._held:
            os.close(self._held.pop())


class StderrTail:
    """Logs each line that an engine writes to its stdout and stderr, and keeps the end for error messages.

    Native code says only there why it gives up: a failed assertion, an exception that was not caught. Reads
    in a thread, until the engine closes the pipe.

    Args:
        source: the read end; closed here.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._read, name="stoker-engine-stderr", daemon=True)

    def __repr__(self) -> str:
        return f"<StderrTail {len(self._kept)} bytes>"

    def start(self) -> None:
        """Begin reading.

        Raises:
            RuntimeError: the system starts no further thread; the pipe is closed.
        """
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._source)
            raise

    def text(self, wait_s: float) -> str:
        """The last lines, for an error message; waits so long for the end of the pipe."""
        if self._thread.is_alive():
            self._thread.join(wait_s)
        return native_text(bytes(self._kept))

    def _read(self) -> None:
        with os.fdopen(self._source, "rb") as pipe:
            while line := pipe.readline(MAX_LINE_BYTES):
                self._kept += line
                del self._kept[:-KEPT_BYTES]
                output_log.warning("%s", line.decode(errors="replace").rstrip())


class _Frames(asyncio.Protocol):
    """Passes decoded frames on, until the engine's end of the socket closes."""

    def __init__(self, on_events: EventSink) -> None:
        self._on_events = on_events
        self._decoder = event_decoder()
        self.is_over = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        for events in self._decoder.feed(data):
            self._on_events(events)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.is_over.set()


class ProcessTransport:
    """The engine in a child process, over a socketpair.

    Args:
        settings: the engine gets its part of them as JSON.
        module: what `python -m` runs.
        reserve: descriptors that a start may use.
        child: a process that was spawned already; None: one is by `spawn` or `start`.
        num_restarts: engines that have ended by themselves before.
    """

    can_kill = True

    def __init__(
        self,
        settings: EngineSettings,
        module: str = ENGINE_MODULE,
        reserve: DescriptorReserve | None = None,
        child: EngineChild | None = None,
        num_restarts: int = 0,
    ) -> None:
        self._settings = settings
        self._num_restarts = num_restarts
        self._module = module
        self._reserve = DescriptorReserve(0) if reserve is None else reserve
        self._child = child  # until `start` connects to it
        self._process: subprocess.Popen[bytes] | None = child.process if child else None
        self._transport: asyncio.WriteTransport | None = None
        self._exit: asyncio.Future[ExitReport] | None = None
        self._frames: _Frames | None = None

    def __repr__(self) -> str:
        return f"<ProcessTransport pid={self.pid}>"

    @property
    def pid(self) -> int:
        """The child's process id; 0 before it is spawned."""
        return self._process.pid if self._process else 0

    def spawn(self) -> None:
        """Start the process before there is an event loop; `start` connects to it, or `close` ends it.

        Raises:
            OSError, MemoryError: the machine refuses a process or a descriptor.
        """
        self._child = EngineChild(self._module)
        self._process = self._child.process

    def close(self) -> None:
        """End a process that was spawned and never started; else nothing."""
        if self._child is not None:
            self._child.close()
            self._child = None

    async def start(self, on_events: EventSink) -> None:
        """See `Transport.start`."""
        loop = asyncio.get_running_loop()
        frames = self._frames = _Frames(on_events)
        with ExitStack() as made:
            try:
                with self._reserve.lent():
                    ours = self._launch(loop, made)
                self._transport, _ = await loop.create_unix_connection(lambda: frames, sock=ours)
            except (OSError, RuntimeError, MemoryError) as error:
                raise MachineSetupError(f"the engine process cannot be started: {error}") from error
            made.pop_all()

    def _launch(self, loop: asyncio.AbstractEventLoop, made: ExitStack) -> socket.socket:
        """Have a process, which `made` undoes; returns our end of its socket. Does not await."""
        config = msgspec.json.encode(config_of(self._settings, self._num_restarts))
        if self._child is None:
            self.spawn()
        child, self._child = self._child, None
        assert child is not None, "spawn() makes it or raises"
        child.tell(config)
        made.callback(child.socket.close)
        tail = StderrTail(child.output)
        made.callback(tail.text, LAST_READ_S)  # its pipe is closed once the child has gone
        made.callback(child.close)
        tail.start()
        exit_ = self._exit = loop.create_future()
        reap = threading.Thread(
            target=self._reap, args=(loop, exit_, child.process, tail), name="stoker-reaper", daemon=True
        )
        reap.start()
        return child.socket

    @staticmethod
    def _reap(
        loop: asyncio.AbstractEventLoop,
        exit_: asyncio.Future[ExitReport],
        process: subprocess.Popen[bytes],
        tail: StderrTail,
    ) -> None:
        """Runs in a thread: works under every event loop, in every thread, without a child watcher."""
        status = process.wait()
        end = ExitReport(status, tail.text(LAST_READ_S))
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(_resolve, exit_, end)

    def send(self, command: Command) -> None:
        """See `Transport.send`."""
        if self._transport and not self._transport.is_closing():
            self._transport.write(encode_command(command))

    def kill(self) -> None:
        """See `Transport.kill`."""
        if self._process and self._process.poll() is None:
            self._process.kill()

    async def wait(self) -> ExitReport:
        """See `Transport.wait`."""
        if self._exit is None or self._frames is None or self._transport is None:
            raise RuntimeError("wait() before start()")
        status = await asyncio.shield(self._exit)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._frames.is_over.wait(), LAST_READ_S)
        self._transport.abort()
        return status


class RunsInThread(Protocol):
    """An engine that a thread of this process runs; `put` and `close` are called from other threads."""

    def put(self, command: Command) -> None:
        """Add a command."""
        ...

    def close(self) -> None:
        """Make `run` return after the step under way."""
        ...

    def run(self) -> None:
        """Serve until `Shutdown` has drained or `close`."""
        ...


MakeEngine = Callable[[EventSink, EngineConfig], RunsInThread]
"""Makes an engine that publishes frames through the sink, in the thread that runs it."""


class ThreadTransport:
    """The engine in a daemon thread: the same messages, but a native crash ends this process.

    `publish` blocks the engine while MAX_FRAMES_AHEAD frames wait for this event loop.

    Args:
        settings: the engine gets its part of them.
        make_engine: the client knows no engine; its owner hands one in.
    """

    can_kill = False

    def __init__(self, settings: EngineSettings, make_engine: MakeEngine) -> None:
        self._settings = settings
        self._make_engine = make_engine
        self._engine: RunsInThread | None = None
        self._exit: asyncio.Future[ExitReport] | None = None
        self._room = threading.Semaphore(MAX_FRAMES_AHEAD)

    def __repr__(self) -> str:
        return f"<ThreadTransport started={self._engine is not None}>"

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def start(self, on_events: EventSink) -> None:
        """See `Transport.start`."""
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()

        def deliver(events: list[Event]) -> None:
            self._room.release()
            on_events(events)

        def publish(events: list[Event]) -> None:
            self._room.acquire()
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(deliver, events)

        engine = self._engine = self._make_engine(publish, config_of(self._settings))
        thread = threading.Thread(target=self._run, args=(loop, engine), name="stoker-engine", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise MachineSetupError(f"the engine thread cannot be started: {error}") from error

    def _run(self, loop: asyncio.AbstractEventLoop, engine: RunsInThread) -> None:
        status = ExitReport(0)
        try:
            engine.run()
        except Exception:
            log.exception("the engine thread failed")
            status = ExitReport(1)
        if self._exit is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_resolve, self._exit, status)

    def send(self, command: Command) -> None:
        """See `Transport.send`."""
        if self._engine is not None and self._exit is not None and not self._exit.done():
            self._engine.put(command)

    def kill(self) -> None:
        """A thread cannot be killed: it leaves after the step under way."""
        if self._engine is not None:
            self._engine.close()

    async def wait(self) -> ExitReport:
        """See `Transport.wait`."""
        if self._exit is None:
            raise RuntimeError("wait() before start()")
        return await asyncio.shield(self._exit)


NewTransport = Callable[["EngineSettings"], Transport]


@contextlib.contextmanager
def spawned_ahead(
    settings: EngineSettings, child: EngineChild | None = None
) -> Iterator[ProcessTransport | None]:
    """An engine's process that imports what it needs while this one does, for a supervisor inside the block.

    None where the engine is to have no process, or the machine refuses one: a start says why. A process that
    was not started in the block is ended after it.

    Args:
        settings: the engine's.
        child: the process, where it was spawned before the settings were known.
    """
    if settings.isolation != "process":
        if child is not None:
            child.close()
        yield None
        return
    transport = ProcessTransport(settings, child=child)
    with contextlib.closing(transport):
        try:
            if child is None:
                transport.spawn()
        except (OSError, MemoryError) as error:
            log.debug("no engine is started ahead: %s", error)
        yield transport


def config_of(settings: EngineSettings, num_restarts: int = 0) -> EngineConfig:
    """The engine's part of the settings; `num_restarts` as in `EngineConfig`."""
    return EngineConfig(
        cache_dir=str(settings.cache_dir),
        cache_mode=settings.cache_mode,
        cache_ram_bytes=settings.cache_ram_bytes,
        cache_disk_bytes=settings.cache_disk_bytes,
        prefix_store=settings.prefix_store or "",
        prefix_store_bytes=settings.prefix_store_bytes,
        prefix_store_ttl_s=settings.prefix_store_ttl_s,
        memory_limit=settings.memory_limit,
        memory_margin=settings.memory_margin,
        lease_dir=str(lease_folder()) if settings.device_lease else None,
        max_prepare_s=settings.max_prepare_s,
        watchdog_s=settings.watchdog_s,
        heat_trace=str(settings.heat_trace) if settings.heat_trace else None,
        has_own_process=settings.isolation == "process",
        num_restarts=num_restarts,
        log_level=wanted_level(),
    )


def _resolve(future: asyncio.Future[ExitReport], status: ExitReport) -> None:
    if not future.done():
        future.set_result(status)
