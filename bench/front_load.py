"""How many tokens a second the process in front of an engine passes on, and what one costs it.

Starts the real server with an engine that computes nothing (`bench.front_engine`), streams to a crowd of
clients, and tells tokens a second beside the CPU time that each process took.

    python -m bench.front_load [--rate N] [--streams N] [--tokens N] [--json]
"""

from __future__ import annotations

import argparse
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
from typing import TYPE_CHECKING

import psutil
import uvloop

from bench.client import Client, Completion
from bench.crowd_client import read_crowd
from bench.errors import BenchError
from bench.front_engine import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODEL = "fake:id=front"
STOP_LIMIT_S = 30.0
NUM_CROWDS = 10


@dataclass(frozen=True, slots=True)
class FrontLoad:
    """What one run gave.

    Attributes:
        asked_per_s: tokens a second that the engine gave, were the front quick enough.
        tokens_per_s: tokens by the time from the first request sent to the last one ended.
        first_token_ms: median from sending a request to its first token.
        front_us, engine_us, client_us: CPU time of that process by the number of tokens.
        request_us: CPU time that the front takes for a request of one token.
        front_busy: share of one core that the front took.
    """

    asked_per_s: float
    tokens_per_s: float
    first_token_ms: float
    front_us: float
    engine_us: float
    client_us: float
    front_busy: float
    request_us: float


def serve(folder: Path) -> int:
    """Run the server in this process, its engine being the one that computes nothing."""
    from stoker.client import supervisor  # noqa: PLC0415 - the measuring process needs none of it
    from stoker.client.process.transport import ProcessTransport  # noqa: PLC0415 - likewise
    from stoker.server.serve import run_server  # noqa: PLC0415 - likewise
    from stoker.settings import EngineSettings, ServerSettings  # noqa: PLC0415 - likewise

    # the one place that makes transports
    setattr(supervisor, "ProcessTransport", partial(ProcessTransport, module="bench.front_engine"))  # noqa: B010 - of another type
    engine = EngineSettings(
        models=(MODEL,), slots=256, cache_dir=folder, run_dir=folder / "run", speculation="off"
    )
    return run_server(engine, ServerSettings(port=0))


@contextlib.contextmanager
def served(steps_per_s: float) -> Iterator[tuple[str, psutil.Process]]:
    """The server in a child process: its address and its process."""
    with tempfile.TemporaryDirectory(prefix="bench-front-") as folder:
        environment = {**os.environ, STEPS: str(steps_per_s)}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", "bench.front_load", "--serve", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            try:
                line = (child.stdout or sys.stdin).readline()
                if not line:
                    raise BenchError("the server did not start")
                ready = json.loads(line)
                yield f"http://{ready['host']}:{ready['port']}", psutil.Process(child.pid)
            finally:
                child.terminate()
                child.wait(STOP_LIMIT_S)


def measure(rate: float, num_streams: int, num_tokens: int) -> FrontLoad:
    """Stream to a crowd once, after one small request."""
    with served(rate / num_streams) as (url, front):
        return uvloop.run(_measured(url, front, rate, num_streams, num_tokens))


async def _measured(
    url: str, front: psutil.Process, rate: float, num_streams: int, num_tokens: int
) -> FrontLoad:
    model = await Client(url).model()
    await read_crowd(url, [Completion(prompt="warm", max_tokens=8)] * num_streams, model)
    (engine,) = (child for child in front.children() if "bench.front_engine" in child.cmdline())
    processes = [front, engine, psutil.Process()]
    request_s = _cpu_s(front)
    for _ in range(NUM_CROWDS):
        await read_crowd(url, [Completion(prompt="one", max_tokens=1)] * num_streams, model)
    request_s = (_cpu_s(front) - request_s) / NUM_CROWDS / num_streams
    before = [_cpu_s(each) for each in processes]
    began = time.perf_counter()
    answers = await read_crowd(url, [Completion(prompt="go", max_tokens=num_tokens)] * num_streams, model)
    wall_s = time.perf_counter() - began
    front_s, engine_s, client_s = (_cpu_s(each) - at for each, at in zip(processes, before, strict=True))
    total = sum(answer.num_tokens for answer in answers)
    firsts = sorted(answer.ttft_s for answer in answers)
    return FrontLoad(
        asked_per_s=rate,
        tokens_per_s=total / wall_s,
        first_token_ms=firsts[len(firsts) // 2] * 1e3,
        front_us=front_s / total * 1e6,
        engine_us=engine_s / total * 1e6,
        client_us=client_s / total * 1e6,
        front_busy=front_s / wall_s,
        request_us=request_s * 1e6,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.front_load", description=__doc__)
    parser.add_argument("--rate", type=float, default=12000.0, help="tokens a second that the engine gives")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return serve(options.serve)
    found = measure(options.rate, options.streams, options.tokens)
    if options.json:
        print(json.dumps(asdict(found)))
    else:
        print(
            f"{found.tokens_per_s:,.0f} tokens/s of {found.asked_per_s:,.0f}; first token"
            f" {found.first_token_ms:.0f} ms; a token costs {found.front_us:.1f} us in front,"
            f" {found.engine_us:.1f} in the engine, {found.client_us:.1f} in the client;"
            f" the front takes {found.front_busy:.2f} of a core; a request costs it {found.request_us:.0f} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
