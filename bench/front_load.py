"""How many tokens a second the process in front of an engine passes on, and what one costs it.

Starts the real server with an engine that computes nothing (`bench.front_engine`), streams to a crowd of
clients, and tells tokens a second beside the CPU time that each process took. With a model the engine is the
real one and the streams are chats: what a token then costs is several times as much, as each step takes what
this process had in the cores' caches. With `--gate` the process in front is a gate before so many servers of
that kind, and what these take is told apart.

    python -m bench.front_load [--rate N | --model FILE] [--gate N] [--streams N] [--tokens N] [--repeat N]
        [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import uvloop

from bench.client import Client, Completion
from bench.crowd_client import read_crowd
from bench.errors import BenchError
from bench.front_engine import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FAKE = "fake:id=front"
STOP_LIMIT_S = 30.0
NUM_CROWDS = 10
IDLE_S = 1.0
_PROCESS_CLOCK = 2
"""The last bits of a process's CPU clock, before which its complemented id stands (`clock_getcpuclockid`)."""


@dataclass(frozen=True, slots=True)
class FrontLoad:
    """What one run gave.

    Attributes:
        asked_per_s: tokens a second that the engine gave, were the front quick enough; 0: all it could.
        tokens_per_s: tokens by the time from the first request sent to the last one ended.
        first_token_ms: median from sending a request to its first token.
        front_us: CPU time of the front by the number of tokens, less what the requests took and idle time.
        servers_us: CPU time of the servers behind a gate by the number of tokens; 0.0: the front is no gate.
        engine_us, client_us: CPU time of the engines, and of this process, by the number of tokens.
        request_us: CPU time that the front takes for a request of one token.
        front_busy: share of one core that the front took.
    """

    asked_per_s: float
    tokens_per_s: float
    first_token_ms: float
    front_us: float
    servers_us: float
    engine_us: float
    client_us: float
    front_busy: float
    request_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(Completion):
    """The same as a conversation of one turn."""

    path = "/v1/chat/completions"

    def prompt_fields(self) -> dict[str, Any]:
        """The turn."""
        return {"messages": [{"role": "user", "content": self.prompt}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What is asked for.

    Attributes:
        rate: tokens a second that the costless engine gives.
        num_streams: at once.
        num_tokens: of each stream.
        model: what the real engine serves; None: there is the costless one.
        num_servers: that stand behind a gate; 0: there is one, without a gate.
    """

    rate: float
    num_streams: int
    num_tokens: int
    model: str | None = None
    num_servers: int = 0

    def of(self, prompt: str, num_tokens: int) -> list[Completion]:
        """One completion a stream, each of another prompt."""
        kind = Completion if self.model is None else Chat
        return [kind(prompt=f"{prompt} {i}", max_tokens=num_tokens) for i in range(self.num_streams)]


def serve(folder: Path, model: str | None) -> int:
    """Run the server in this process; without a model its engine is the one that computes nothing."""
    from stoker.client import supervisor  # noqa: PLC0415 - the measuring process needs none of it
    from stoker.client.process.transport import ProcessTransport  # noqa: PLC0415 - likewise
    from stoker.server.serve import run_server  # noqa: PLC0415 - likewise
    from stoker.settings import EngineSettings, ServerSettings  # noqa: PLC0415 - likewise

    if model is None:
        # the one place that makes transports
        setattr(supervisor, "ProcessTransport", partial(ProcessTransport, module="bench.front_engine"))  # noqa: B010 - of another type
    engine = EngineSettings(
        models=(model or FAKE,),
        slots=256 if model is None else 8,
        cache_dir=folder,
        run_dir=folder / "run",
        speculation="off",
    )
    return run_server(engine, ServerSettings(port=0))


@dataclass(frozen=True, slots=True)
class Served:
    """What runs.

    Attributes:
        url: that clients ask.
        front: the process that has it.
        servers: processes behind it, where it is a gate.
    """

    url: str
    front: psutil.Process
    servers: Sequence[psutil.Process] = ()

    def engines(self) -> list[psutil.Process]:
        """The engine of each server."""
        servers = self.servers or [self.front]
        children = [child for one in servers for child in one.children()]
        found = [child for child in children if _is_engine(child.cmdline())]
        if len(found) != len(servers):
            raise BenchError(f"{len(servers)} servers have {len(found)} engines")
        return found


@contextlib.contextmanager
def served(crowd: Crowd) -> Iterator[Served]:
    """The server in a child process, or several and a gate before them."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(_server(crowd)) for _ in range(max(1, crowd.num_servers))]
        servers = [process for _, process in found]
        if not crowd.num_servers:
            yield Served(*found[0])
            return
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-gate-"))
        command = ["stoker.cli", "gate", "--port", "0", "--quiet", "--run-dir", folder]
        for url, _ in found:
            command += ["--peer", url]
        yield Served(*stack.enter_context(_started(command, {})), servers)


@contextlib.contextmanager
def _server(crowd: Crowd) -> Iterator[tuple[str, psutil.Process]]:
    with tempfile.TemporaryDirectory(prefix="bench-front-") as folder:
        command = ["bench.front_load", "--serve", folder]
        if crowd.model is not None:
            command += ["--model", crowd.model]
        with _started(command, {STEPS: str(crowd.rate / crowd.num_streams)}) as found:
            yield found


@contextlib.contextmanager
def _started(command: Sequence[str], environment: dict[str, str]) -> Iterator[tuple[str, psutil.Process]]:
    """A module that serves, as a child process: its address and its process."""
    environment = {**os.environ, **environment}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    arguments = [sys.executable, "-m", *command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            line = (child.stdout or sys.stdin).readline()
            if not line:
                raise BenchError(f"{command[0]} did not start")
            ready = json.loads(line)
            yield f"http://{ready['host']}:{ready['port']}", psutil.Process(child.pid)
        finally:
            child.terminate()
            child.wait(STOP_LIMIT_S)


def measure(crowd: Crowd, num_repetitions: int = 1) -> FrontLoad:
    """Stream to a crowd, after one small request; the median of the repetitions by the front's cost."""
    with served(crowd) as running:
        found = uvloop.run(_measured(running, crowd, num_repetitions))
    return sorted(found, key=lambda one: one.front_us)[len(found) // 2]


async def _measured(running: Served, crowd: Crowd, num_repetitions: int) -> list[FrontLoad]:
    url, front = running.url, running.front
    model = await Client(url).model()
    await read_crowd(url, crowd.of("warm", 8), model)
    request_s = _cpu_s(front)
    for _ in range(NUM_CROWDS):
        await read_crowd(url, crowd.of("one", 1), model)
    request_s = (_cpu_s(front) - request_s) / NUM_CROWDS / crowd.num_streams
    idle_s = _cpu_s(front)
    await asyncio.sleep(IDLE_S)
    idle_s = (_cpu_s(front) - idle_s) / IDLE_S
    return [await _one_run(running, crowd, (request_s, idle_s)) for _ in range(num_repetitions)]


async def _one_run(running: Served, crowd: Crowd, beside: tuple[float, float]) -> FrontLoad:
    """One crowd; `beside` is what the front takes for a request, and in an idle second."""
    request_s, idle_s = beside
    groups = [[running.front], running.servers, running.engines(), [psutil.Process()]]
    model = await Client(running.url).model()
    before = [sum(map(_cpu_s, group)) for group in groups]
    began = time.perf_counter()
    answers = await read_crowd(running.url, crowd.of("Tell me a long story of", crowd.num_tokens), model)
    wall_s = time.perf_counter() - began
    spent = (sum(map(_cpu_s, group)) - at for group, at in zip(groups, before, strict=True))
    front_s, servers_s, engines_s, client_s = spent
    total = sum(answer.num_tokens for answer in answers)
    firsts = sorted(answer.ttft_s for answer in answers)
    return FrontLoad(
        asked_per_s=crowd.rate if crowd.model is None else 0.0,
        tokens_per_s=total / wall_s,
        first_token_ms=firsts[len(firsts) // 2] * 1e3,
        front_us=(front_s - request_s * crowd.num_streams - idle_s * wall_s) / total * 1e6,
        servers_us=servers_s / total * 1e6,
        engine_us=engines_s / total * 1e6,
        client_us=client_s / total * 1e6,
        front_busy=front_s / wall_s,
        request_us=request_s * 1e6,
    )


def _is_engine(command: Sequence[str]) -> bool:
    return "bench.front_engine" in command or "stoker.engine" in command


def _cpu_s(process: psutil.Process) -> float:
    """CPU time of all its threads, to the nanosecond where the system has a clock of each process."""
    if sys.platform == "linux":
        return time.clock_gettime(~process.pid << 3 | _PROCESS_CLOCK)
    times = process.cpu_times()
    return float(times.user + times.system)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.front_load", description=__doc__)
    parser.add_argument("--rate", type=float, default=12000.0, help="tokens a second that the engine gives")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--repeat", type=int, default=1, help="crowds; the median is told")
    parser.add_argument("--model", metavar="FILE", help="that the real engine computes")
    parser.add_argument("--gate", type=int, default=0, metavar="N", help="servers behind a gate")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return serve(options.serve, options.model)
    crowd = Crowd(
        rate=options.rate,
        num_streams=options.streams,
        num_tokens=options.tokens,
        model=options.model,
        num_servers=options.gate,
    )
    found = measure(crowd, options.repeat)
    if options.json:
        print(json.dumps(asdict(found)))
    else:
        asked = f" of {found.asked_per_s:,.0f}" if found.asked_per_s else ""
        servers = f" {found.servers_us:.1f} in the servers," if crowd.num_servers else ""
        print(
            f"{found.tokens_per_s:,.0f} tokens/s{asked}; first token"
            f" {found.first_token_ms:.0f} ms; a token costs {found.front_us:.1f} us in front,{servers}"
            f" {found.engine_us:.1f} in the engine, {found.client_us:.1f} in the client;"
            f" the front takes {found.front_busy:.2f} of a core; a request costs it {found.request_us:.0f} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
