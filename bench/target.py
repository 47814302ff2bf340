"""What a workload is run against: a label for the tables, a client, and the process if it is ours."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol

import psutil

from bench.client import Client, Completion
from bench.errors import BenchError
from bench.prompts import random_prompt
from bench.status import engine_pid

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM_UP_WORDS = 100
WARM_UP_TOKENS = 8
SUCCESSOR_LIMIT_S = 120.0
LOOK_EVERY_S = 0.05


class OwnProcess(Protocol):
    """A server that the benchmark started and may start anew; its address may change with that."""

    @property
    def pid(self) -> int:
        """Process id of its first process."""
        ...

    @property
    def client(self) -> Client:
        """A client of it as it runs now."""
        ...

    async def restart(self) -> None:
        """Ask it to end, and start it again."""
        ...

    async def kill(self) -> None:
        """End it without asking."""
        ...

    async def start(self) -> None:
        """Start it and wait until it is ready."""
        ...


@dataclass(slots=True)
class Target:
    """A server that answers. `process` is None for one that somebody else started.

    Raises:
        BenchError: from what ends the server or its engine: it is somebody else's, or does not come back.
    """

    label: str
    client: Client
    process: OwnProcess | None = None
    _warm_ups: Iterator[int] = field(default_factory=count, repr=False)

    async def warm_up(self) -> None:
        """One small request whose time is not taken: first touches of memory belong to no repetition."""
        # never the same twice: one that is found in a cache touches less
        prompt = random_prompt(WARM_UP_WORDS, f"warm-up {next(self._warm_ups)}")
        await self.client.complete(Completion(prompt=prompt, max_tokens=WARM_UP_TOKENS))

    async def restart(self) -> None:
        """Stop the server and start it again with the same command; it is ready and warm on return."""
        process = self._own()
        await process.restart()
        self.client = process.client
        await self.warm_up()

    async def lose_engine(self) -> None:
        """End by SIGKILL what computes; its successor is ready and warm on return.

        That is the engine of a server that tells its process id and brings up another by itself. Any other
        server is killed as a whole and started again.
        """
        process = self._own()
        pid = await engine_pid(self.client)
        if pid is None or pid == process.pid:
            await process.kill()
            await process.start()
            self.client = process.client
        else:
            _kill_child(process.pid, pid)
            await self._wait_successor(pid)
        await self.warm_up()

    def _own(self) -> OwnProcess:
        if self.process is None:
            raise BenchError(f"{self.label} was started by somebody else, who alone may end it")
        return self.process

    async def _wait_successor(self, lost: int) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SUCCESSOR_LIMIT_S
        while loop.time() < deadline_s:
            if await engine_pid(self.client) not in {None, lost}:
                return
            await asyncio.sleep(LOOK_EVERY_S)
        raise BenchError(f"{self.label} had no engine again {SUCCESSOR_LIMIT_S:.0f} s after a kill")


def _kill_child(parent: int, pid: int) -> None:
    """Kill a process that descends from `parent`, and no other whatever the number says."""
    if pid not in {child.pid for child in psutil.Process(parent).children(recursive=True)}:
        raise BenchError(f"process {pid} is none of the server's own")
    os.kill(pid, signal.SIGKILL)
