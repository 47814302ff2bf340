"""What a gate costs: tokens a second of many streams, and the time to the first token, beside direct ones.

    python bench/gate.py --model smollm2-135m-instruct

Starts one server and a gate before it, and asks both in turns, so that what else the machine does weighs on
both alike. Prints one line of JSON. The bars: throughput at least 0.95, first token at most 3 ms later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx

START_S = 120.0
WARM_UP = 3


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[str]:
    """A server as a process; gives its URL when it is ready."""
    line = [sys.executable, "-m", "stoker.cli", *arguments, "--port", "0", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        run = ["--run-dir", folder]
        with subprocess.Popen([*line, *run], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None, "it was asked for"
                ready = json.loads(process.stdout.readline())
                yield f"http://{ready['host']}:{ready['port']}"
            finally:
                process.terminate()


def body_of(number: int, num_tokens: int) -> dict[str, Any]:
    """A completion of its own prompt, as long as asked."""
    return {
        "prompt": f"Story {number} begins in a town by the sea, where",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache": False,
    }


async def first_s(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> float:
    """Seconds to the first token; the rest is read."""
    began, first = time.perf_counter(), 0.0
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter() - began
    return first


async def throughput(url: str, num_streams: int, num_tokens: int) -> float:
    """Tokens a second of so many streams at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=START_S, limits=limits) as http:
        began = time.perf_counter()
        await asyncio.gather(*(first_s(http, url, body_of(n, num_tokens)) for n in range(num_streams)))
        return num_streams * num_tokens / (time.perf_counter() - began)


async def measured(urls: dict[str, str], given: argparse.Namespace) -> dict[str, Any]:
    """Both figures of both ways, in turns; the way that is not `direct` is compared with that."""
    (way,) = urls.keys() - {"direct"}
    rates: dict[str, list[float]] = {name: [] for name in urls}
    firsts: dict[str, list[float]] = {name: [] for name in urls}
    async with httpx.AsyncClient(timeout=START_S) as http:
        for number in range(-WARM_UP, given.firsts):
            for name, url in urls.items():
                took_s = await first_s(http, url, body_of(number, 2))
                firsts[name] += [took_s] if number >= 0 else []
    for number in range(given.rounds):
        order = list(urls.items())[:: 1 if number % 2 else -1]
        for name, url in order:
            rates[name].append(await throughput(url, given.streams, given.tokens))
    rate = {name: statistics.median(found) for name, found in rates.items()}
    first_ms = {name: 1000 * statistics.median(found) for name, found in firsts.items()}
    pairs = zip(firsts[way], firsts["direct"], strict=True)  # of neighbours, as a machine's speed drifts
    more_ms = 1000 * statistics.median(one - other for one, other in pairs)
    ratios = [one / other for one, other in zip(rates[way], rates["direct"], strict=True)]
    return {
        "model": given.model,
        "streams": given.streams,
        "tokens_per_second": {name: round(found, 1) for name, found in rate.items()},
        "throughput_ratio": round(statistics.median(ratios), 3),
        "ratios": [round(one, 3) for one in ratios],
        "first_token_ms": {name: round(found, 2) for name, found in first_ms.items()},
        "first_token_more_ms": round(more_ms, 2),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or file of the model")
    parser.add_argument("--streams", type=int, default=32, help="streams at once")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=4, help="crowds each way")
    parser.add_argument("--firsts", type=int, default=40, help="single requests each way")
    parser.add_argument("--slots", default="32", help="of the server")
    given = parser.parse_args()
    model = [] if given.model == "smollm2-135m-instruct" else ["--model", given.model]
    with (
        command("serve", *model, "--slots", given.slots) as direct,
        command("gate", "--peer", direct) as gate,
    ):
        found = asyncio.run(measured({"direct": direct, "gate": gate}, given))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
