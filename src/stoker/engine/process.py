"""The engine process, from inside: `python -m stoker.engine FD` runs `serve`, told by its stdin how.

Owns the socket's engine end, the thread that reads it and the heartbeat; everything else is the loop's.
The process lives exactly as long as its client: at the end of the socket it exits, however busy it is.

Events are written by the loop's own thread: whatever was published before a native crash has then reached
the client, which finds the culprit by it. A client that does not read makes the loop wait once the socket's
buffer is full.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from stoker.backends.registry import OpenModels
from stoker.engine.threads.timer import READ_EVERY_S
from stoker.ipc.codec import command_decoder, encode_events
from stoker.ipc.commands import GetStatus, Watch
from stoker.ipc.engine_config import EngineConfig
from stoker.ipc.events import Logged
from stoker.machine import malloc
from stoker.native_crash import prepare_to_crash

if TYPE_CHECKING:
    from stoker.engine.inbox import Inbox
    from stoker.ipc.commands import Command
    from stoker.ipc.events import Event, Heartbeat

HEARTBEAT_S = READ_EVERY_S
ORPHAN_GRACE_S = 2.0
_CAN_WAIT = (GetStatus, Watch)  # the client shows meanwhile what it knows
READ_BYTES = 256 * 1024
SWITCH_S = 0.0002
"""How long a thread that wants the interpreter's lock waits for one that computes: with Python's own 5 ms the
loop, back from the library, may wait so long for each request that is being prepared."""
ROOT_LOGGER = "stoker"

Publish = Callable[[list["Event"]], None]
MakeEngine = Callable[["Inbox", Publish, "EngineConfig"], "RunsEngine"]


class RunsEngine(Protocol):
    """What carries an engine needs of it."""

    def run(self) -> None:
        """Serve until Shutdown has drained or the inbox is closed."""
        ...

    def heartbeat(self) -> Heartbeat:
        """How long the running step has taken; called from another thread."""
        ...


class EventWriter:
    """The socket's sending side, shared by the loop and the heartbeat."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.RLock()  # a finaliser may log, which writes, while its thread writes

    def write(self, events: list[Event]) -> None:
        """Send one frame; blocks while the client does not read. Its end ends this process by EOF."""
        frame = encode_events(events)
        with self._lock:
            try:  # noqa: SIM105 - each step does it
                self._socket.sendall(frame)
            except ConnectionError:
                pass


class LogToClient(logging.Handler):
    """Sends the log of this process to the client, which decides what becomes of it.

    Args:
        publish: called with each record as an event, in whichever thread logs.
    """

    def __init__(self, publish: Publish) -> None:
        super().__init__()
        self._publish = publish

    def handle(self, record: logging.LogRecord) -> bool:
        """Send one record, without the lock that handlers have.

        A finaliser may log while its thread writes. With two locks it could wait for a thread that logs and
        waits for the writer's.
        """
        is_wanted = bool(self.filter(record))
        if is_wanted:
            self.emit(record)
        return is_wanted

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; other packages' loggers appear below `stoker.engine`."""
        is_ours = record.name == ROOT_LOGGER or record.name.startswith(f"{ROOT_LOGGER}.")
        name = record.name if is_ours else f"{ROOT_LOGGER}.engine.{record.name}"
        try:
            event = Logged(logger=name, level=record.levelno, at=record.created, text=self.format(record))
            self._publish([event])
        except Exception:  # noqa: BLE001 - a call to the log never fails, as with every handler
            self.handleError(record)

    @classmethod
    def set_up(cls, publish: Publish, level: int) -> None:
        """Send all of this process's log from that level on, warnings of Python included."""
        logging.basicConfig(handlers=[cls(publish)], format="%(message)s", level=max(level, logging.WARNING))
        logging.getLogger(ROOT_LOGGER).setLevel(level)
        logging.captureWarnings(capture=True)


class ClientLink:
    """Reads commands into the inbox and ends the process where the client has ended."""

    def __init__(self, sock: socket.socket, inbox: Inbox) -> None:
        self._socket = sock
        self._inbox = inbox
        self._is_done = threading.Event()

    def start(self) -> None:
        """Begin reading, on a daemon thread."""
        threading.Thread(target=self._read, name="stoker-commands", daemon=True).start()

    def finish(self) -> None:
        """The loop has returned: an end of the socket is no longer a reason to leave by force."""
        self._is_done.set()

    def _read(self) -> None:
        decoder = command_decoder()
        try:
            with contextlib.suppress(ConnectionError):
                while data := self._socket.recv(READ_BYTES):
                    for command in decoder.feed(data):
                        is_waited_for = not isinstance(command, _CAN_WAIT)
                        with self._inbox.interrupt.arrival() if is_waited_for else nullcontext():
                            self._inbox.put(command)
        finally:
            self._inbox.close()
        if not self._is_done.wait(ORPHAN_GRACE_S):
            os._exit(1)  # the loop hangs in a native call and no client is left to kill us


def start_heartbeat(read: Callable[[], Heartbeat], writer: EventWriter, is_done: threading.Event) -> None:
    """Publish `read()` every HEARTBEAT_S until `is_done`, on a daemon thread."""

    def beat() -> None:
        while not is_done.wait(HEARTBEAT_S):
            writer.write([read()])

    threading.Thread(target=beat, name="stoker-heartbeat", daemon=True).start()


def prepare_signals() -> None:
    """Leave Ctrl-C and a service manager's SIGTERM to the client."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def limit_allocator(memory_limit: int | None) -> None:
    """Let malloc keep of freed memory what the machine's tier allows (SPEC M2)."""
    from stoker.machine.limits import (  # noqa: PLC0415 - these imports take a while: signals come first
        DEFAULTS,
        read_limits,
        tier_of,
    )

    tier = tier_of(read_limits(memory_limit).effective_bytes)
    malloc.limit_cache(DEFAULTS[tier].allocator_cache_bytes)


def open_client(descriptor: int) -> socket.socket:
    """The inherited socket, not inherited any further: a child of ours must not keep it open."""
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    return sock


def engine_loop(
    inbox: Inbox, publish: Publish, config: EngineConfig, models: OpenModels | None = None
) -> RunsEngine:
    """The real engine; imported late, so that a client with a child process loads no native code."""
    load_native()
    from stoker.engine.loop import EngineLoop  # noqa: PLC0415 - see above

    return EngineLoop(inbox, publish, config, models=models)


class EngineInThread:
    """An engine for a thread of the client's process (`isolation="thread"`).

    Args:
        publish: called in the engine's thread with each frame of events.
        config: the engine's.
        make_engine: builds the engine, in its thread.
    """

    def __init__(self, publish: Publish, config: EngineConfig, make_engine: MakeEngine = engine_loop) -> None:
        from stoker.engine.inbox import Inbox  # noqa: PLC0415 - imports numpy

        self._publish = publish
        self._config = config
        self._make_engine = make_engine
        self._inbox = Inbox()

    def put(self, command: Command) -> None:
        """Add a command, from any thread."""
        with nullcontext() if isinstance(command, _CAN_WAIT) else self._inbox.interrupt.arrival():
            self._inbox.put(command)

    def close(self) -> None:
        """Make `run` return after the step under way, from any thread."""
        self._inbox.close()

    def run(self) -> None:
        """Serve until `Shutdown` has drained or `close`; raises what the engine raises."""
        self._make_engine(self._inbox, self._publish, self._config).run()


def load_native() -> None:
    """Load llama.cpp's libraries, which have to come before numpy's.

    A toolchain may link the C++ runtime into each library; then numpy's brings in the system's, and code that
    uses both crashes while a vocabulary is loaded. The package is entered without its own start, which loads
    templates and a second interface, and takes longer than the libraries.
    """
    if "llama_cpp" not in sys.modules and (spec := importlib.util.find_spec("llama_cpp")):
        sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
    import llama_cpp.llama_cpp  # noqa: F401, PLC0415 - for its effect


def begin_devices(models: OpenModels, paths: Sequence[str]) -> threading.Thread:
    """Start the devices' drivers and import what reads GGUF files, in a thread: both take a while.

    Then it reads the headers of files that the command line named, as this process is not told anything yet.

    What goes wrong here goes wrong again for whoever asks for it, and is told there.
    """

    def begin() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module("stoker.backends.llama.binding").accelerators()
            importlib.import_module("stoker.backends.llama.backend")
        for path in paths:
            with contextlib.suppress(Exception):
                models.open(str(Path(path))).estimator()

    thread = threading.Thread(target=begin, name="stoker-devices", daemon=True)
    thread.start()
    return thread


def serve(arguments: list[str], make_engine: MakeEngine = engine_loop) -> int:
    """Run an engine in this process until a command ends it.

    It is told by its stdin how to run, an `EngineConfig` as JSON, once it has imported what takes long.

    Args:
        arguments: number of the inherited socket, and the files of models that will probably be asked for.
        make_engine: builds the engine.

    Returns:
        Exit status 0 after an orderly shutdown, or where nobody says how to run; anything unexpected leaves
        as a traceback and status 1.
    """
    prepare_signals()
    prepare_to_crash()
    malloc.share_arena()
    sys.setswitchinterval(SWITCH_S)
    if make_engine is engine_loop:
        gc.disable()  # what is imported stays: to look through it for garbage takes a twelfth of the time
        load_native()
        models = OpenModels()
        begin_devices(models, arguments[1:])
        make_engine = partial(engine_loop, models=models)
        importlib.import_module("stoker.engine.loop")
        gc.freeze()
        gc.enable()
    from stoker.engine.inbox import Inbox  # noqa: PLC0415 - imports numpy

    sock = open_client(int(arguments[0]))
    told = sys.stdin.buffer.read()
    if not told:
        return 0  # the command that spawned us had none to run
    config = msgspec.json.decode(told, type=EngineConfig)
    inbox, writer, is_done = Inbox(), EventWriter(sock), threading.Event()
    link = ClientLink(sock, inbox)
    link.start()
    LogToClient.set_up(writer.write, config.log_level)
    limit_allocator(config.memory_limit)
    engine = make_engine(inbox, writer.write, config)
    start_heartbeat(engine.heartbeat, writer, is_done)
    try:
        engine.run()
    finally:
        is_done.set()
        link.finish()
    return 0
