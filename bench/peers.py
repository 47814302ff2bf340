"""Servers under test: how each is told the same shape, started, known to be ready, and stopped.

Owns processes and their log files. What is sent to them is the workloads' business.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from bench.client import Client
from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
LOOK_EVERY_S = 0.05
NUM_LOG_CHARS = 1500


@dataclass(frozen=True, slots=True)
class Shape:
    """What both servers are given alike: sequences at once, KV cells they share, CPU threads.

    `num_threads` None leaves the choice to each server.
    """

    num_slots: int
    ctx_size: int
    num_threads: int | None

    def __str__(self) -> str:
        threads = "as each server chooses" if self.num_threads is None else str(self.num_threads)
        return f"slots {self.num_slots}, context {self.ctx_size}, threads {threads}"


class Server(Protocol):
    """A kind of server."""

    @property
    def label(self) -> str:
        """What the tables call it."""
        ...

    def command(self, shape: Shape, port: int) -> list[str]:
        """The command line; it listens on loopback only."""
        ...

    async def address(self, output: str, port: int) -> str | None:
        """Its address once it is ready, judged by what it has printed to stdout or by asking it."""
        ...


@dataclass(frozen=True, slots=True)
class StokerServer:
    """`stoker serve` of this environment. It picks its own port and says so in its readiness line.

    `cache_dir` is what it keeps from one start to the next; None: the user's own folder.
    """

    model: str | None = None
    cache_dir: Path | None = None
    label: ClassVar[str] = "stoker"

    def command(self, shape: Shape, port: int) -> list[str]:  # noqa: ARG002 - it is told to choose a port itself
        """The installed command with the shape."""
        model = ["--model", self.model] if self.model else []
        return [
            *(str(Path(sys.executable).with_name("stoker")), "serve", *model),
            *("--host", LOOPBACK, "--port", "0"),
            *("--slots", str(shape.num_slots), "--ctx-size", str(shape.ctx_size)),
            *(_folders(self.cache_dir) if self.cache_dir else []),
            *_threads("--threads", shape),
        ]

    async def address(self, output: str, port: int) -> str | None:  # noqa: ARG002 - the line names the port
        """From the readiness line."""
        for line in output.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                if event["event"] == "ready":
                    return f"http://{event['host']}:{event['port']}"
        return None


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """llama-server, with one pool of context for all slots (`--kv-unified`) as Stoker has, else by default.

    Without that flag it would give each slot a fixed share of the context; so each request may use the whole.
    Dropping the oldest tokens of a full context is its default no longer; it is told so all the same, as an
    answer that lost its beginning is not the answer asked for.
    """

    binary: Path
    model: Path
    label: ClassVar[str] = "llama-server"

    def command(self, shape: Shape, port: int) -> list[str]:
        """Slots, context and threads as the shape says; prefill uses the same threads as decode."""
        return [str(self.binary), "-m", str(self.model), *llama_flags(shape, port)]

    async def address(self, output: str, port: int) -> str | None:  # noqa: ARG002 - it is asked, not read
        """Ready when `/health` says so."""
        url = f"http://{LOOPBACK}:{port}"
        with contextlib.suppress(BenchError, OSError):
            await Client(url).get("/health")
            return url
        return None


class ServerProcess:
    """One running server, in a process group of its own. An async context manager: inside it is ready.

    Raises:
        BenchError: it ended or was not ready in time; the message carries the end of its log.
    """

    def __init__(
        self, server: Server, shape: Shape, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.server = server
        self._environment = {**os.environ, **(environment or {})}
        self._port = free_port()
        self._command = server.command(shape, self._port)
        self._stdout = folder / f"{server.label}.{self._port}.out"
        self._stderr = folder / f"{server.label}.{self._port}.err"
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None

    def __repr__(self) -> str:
        return f"ServerProcess({self.server.label}, pid={self._process and self._process.pid})"

    @property
    def pid(self) -> int:
        """Process id of the server's own first process."""
        return self._running().pid

    @property
    def client(self) -> Client:
        """A client of it."""
        if self._client is None:
            raise BenchError(f"{self.server.label} is not running")
        return self._client

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start it and wait until it is ready."""
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - spawning is instant; nothing waits on its pipes
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._client = Client(await self._wait_ready())
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ask it to end, then make sure; idempotent."""
        process, self._process, self._client = self._process, None, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # its children, if any outlived it, are in its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    async def kill(self) -> None:
        """End it and its children without asking; idempotent."""
        process, self._process, self._client = self._process, None, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)

    async def restart(self) -> None:
        """Stop it and start it again with the same command."""
        await self.stop()
        await self.start()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise BenchError(f"{self.server.label} is not running")
        return self._process

    async def _wait_ready(self) -> str:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if (code := self._running().poll()) is not None:
                raise BenchError(f"{self.server.label} ended with code {code} at start:\n{self._log_tail()}")
            output = self._stdout.read_text(errors="replace")
            if (url := await self.server.address(output, self._port)) is not None:
                return url
            await asyncio.sleep(LOOK_EVERY_S)
        raise BenchError(f"{self.server.label} was not ready in {START_TIMEOUT_S:.0f} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return self._stderr.read_text(errors="replace")[-NUM_LOG_CHARS:]


def llama_flags(shape: Shape, port: int) -> list[str]:
    """What llama-server is told of anything but the model."""
    return [
        *("--host", LOOPBACK, "--port", str(port)),
        *("-np", str(shape.num_slots), "-c", str(shape.ctx_size), "--kv-unified"),
        *("--no-context-shift", "--no-webui"),
        *_threads("-t", shape),
    ]


def _folders(cache_dir: Path) -> list[str]:
    # nor may a benchmark take up what a user's own server was suspended with
    return ["--cache-dir", str(cache_dir), "--run-dir", str(cache_dir / "run")]


def _threads(flag: str, shape: Shape) -> list[str]:
    return [] if shape.num_threads is None else [flag, str(shape.num_threads)]


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
