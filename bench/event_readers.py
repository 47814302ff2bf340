"""What readers of `/v1/runtime/events` cost: CPU time of the engine and of the front, and tokens a second.

Eight answers are streamed by a server whose fake model takes a fixed time for a step, while nobody, one and a
hundred read its events over connections of their own. The numbers of readers take turns.

    python -m bench.event_readers [--readers 0 1 100] [--rounds 3] [--seconds 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import httpx
import psutil

from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

MODEL = "fake:eog_period=0,step_delay_s=0.02"
NUM_STREAMS = 8
WAIT_S = 60.0
POLL_S = 0.02
SETTLE_S = 1.0
"""From the last reader's snapshot to the first measurement."""
_MILLISECONDS = 1000.0


@dataclass(frozen=True, slots=True)
class ReadersCost:
    """Medians over the rounds of one number of readers.

    Attributes:
        engine_ms, front_ms: CPU time of that process in a second.
        tokens_per_second: of all streams.
        events_per_second: that one reader got; 0: nobody read.
    """

    num_readers: int
    engine_ms: float
    front_ms: float
    tokens_per_second: float
    events_per_second: float


class Readers:
    """Connections that count the events that come over them."""

    def __init__(self, url: str) -> None:
        self._host, self._port = url.removeprefix("http://").rsplit(":", 1)
        self._tasks: list[asyncio.Task[None]] = []
        self.num_events = 0

    async def begin(self, number: int) -> None:
        """So many readers; returns when each has its snapshot."""
        begun = [asyncio.Event() for _ in range(number)]
        self._tasks = [asyncio.ensure_future(self._read(each)) for each in begun]
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(each.wait() for each in begun))

    async def _read(self, has_begun: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection(self._host, int(self._port), limit=2**22)
        try:
            writer.write(b"GET /v1/runtime/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    self.num_events += 1
                    has_begun.set()
        finally:
            writer.close()

    async def end(self) -> None:
        """Close all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def served(model: str, *options: str) -> AsyncIterator[str]:
    """The URL of a server of its own, which ends with the block; without a model the embedded one answers."""
    command = [sys.executable, "-m", "stoker.cli", "serve", "--port", "0", *options]
    command += ["--slots", str(NUM_STREAMS), "--quiet", *(["-m", model] if model else [])]
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=nowhere)
    assert server.stdout is not None, "it was asked for"
    try:
        line = await asyncio.wait_for(server.stdout.readline(), WAIT_S)
        if not line:
            raise BenchError("the server ended before it was ready")
        yield f"http://127.0.0.1:{json.loads(line)['port']}"
    finally:
        with suppress(ProcessLookupError):
            server.terminate()
        await server.wait()


async def stream(http: httpx.AsyncClient, counts: list[int], max_tokens: int = 1_000_000) -> None:
    """An answer; `counts` has the tokens of all."""
    body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            counts[0] += line.startswith("data: {")


async def measure(readers: Sequence[int], rounds: int, seconds: float) -> list[ReadersCost]:
    """What each number of readers costs. Raises BenchError where no server starts."""
    async with served(MODEL) as url, httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        status = (await http.get("/v1/runtime")).json()
        engine = psutil.Process(status["engine"]["pid"])
        front = engine.parent()
        if front is None:
            raise BenchError("the engine has no server any more")
        counts = [0]
        streams = [asyncio.ensure_future(stream(http, counts)) for _ in range(NUM_STREAMS)]
        found: dict[int, list[ReadersCost]] = {number: [] for number in readers}
        try:
            await _begun(streams, counts)
            for _ in range(rounds):
                for number in readers:
                    found[number].append(await _one(number, url, seconds, (engine, front), counts))
        finally:
            for each in streams:
                each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    return [_median(costs) for costs in found.values()]


async def _begun(streams: Sequence[asyncio.Future[None]], counts: Sequence[int]) -> None:
    """Wait until as many tokens have come as there are streams. Raises BenchError where one of them ends."""
    begun_s = time.monotonic()
    while counts[0] < len(streams):
        if any(each.done() for each in streams) or time.monotonic() - begun_s > WAIT_S:
            raise BenchError(f"the streams have not begun within {WAIT_S:g} s, or one has ended")
        await asyncio.sleep(POLL_S)


async def _one(
    number: int,
    url: str,
    seconds: float,
    processes: tuple[psutil.Process, psutil.Process],
    counts: list[int],
) -> ReadersCost:
    readers, clock = Readers(url), asyncio.get_running_loop().time
    await readers.begin(number)
    await asyncio.sleep(SETTLE_S)
    before = [_cpu_ms(process) for process in processes]
    begun_s, tokens, events = clock(), counts[0], readers.num_events
    await asyncio.sleep(seconds)
    took_s = clock() - begun_s
    engine_ms, front_ms = (
        (_cpu_ms(process) - old) / took_s for process, old in zip(processes, before, strict=True)
    )
    tokens_per_second = (counts[0] - tokens) / took_s
    events_per_second = (readers.num_events - events) / took_s / max(1, number)
    await readers.end()
    return ReadersCost(number, engine_ms, front_ms, tokens_per_second, events_per_second)


def _cpu_ms(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system) * _MILLISECONDS


def _median(costs: Sequence[ReadersCost]) -> ReadersCost:
    return ReadersCost(
        costs[0].num_readers,
        median(cost.engine_ms for cost in costs),
        median(cost.front_ms for cost in costs),
        median(cost.tokens_per_second for cost in costs),
        median(cost.events_per_second for cost in costs),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.event_readers", description=__doc__)
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        costs = asyncio.run(measure(given.readers, given.rounds, given.seconds))
    except BenchError as error:
        print(f"event_readers: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps([asdict(cost) for cost in costs]))
        return 0
    print("readers  engine ms/s  front ms/s  tokens/s  events/s of each")
    for cost in costs:
        print(
            f"{cost.num_readers:7d} {cost.engine_ms:12.1f} {cost.front_ms:11.1f}"
            f" {cost.tokens_per_second:9.1f} {cost.events_per_second:17.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
