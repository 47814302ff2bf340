"""What a step costs on one machine: measured there before, read from a file, or measured now.

A file is a JSON object: `steps`, pairs of tokens and seconds; `slots`; `cache_tokens`, what its cache holds;
`source`, where they are from. `--measure URL` makes one: it loads a running server with one stream and with
several, then with one long prompt after the other. After each it reads from `/v1/runtime` how many tokens the
steps had and how long they took, as `stoker.scheduler.cost` has it.
"""

from __future__ import annotations

import asyncio
import json
import time
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench.errors import BenchError
from bench.prompts import random_prompt
from stoker.scheduler.cost import StepCost

WAIT_S = 20.0
"""Averages of `/v1/runtime` are of the last 15 s."""
MIN_ENDED = 2
STREAMS = (1, 4, 8)
PROMPT_WORDS = 900
TIMEOUT_S = 120.0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """One machine.

    Attributes:
        steps: tokens and seconds of steps, ascending.
        slots: sequences at once.
        cache_tokens: that its cells, memory and disk hold of prefixes.
        source: where they are from.
    """

    steps: tuple[tuple[int, float], ...]
    slots: int = 8
    cache_tokens: int = 100_000
    source: str = ""

    def table(self) -> StepCost:
        """As the scheduler knows them."""
        cost = StepCost()
        for num_tokens, took_s in self.steps:
            cost.learn(num_tokens, took_s)
        return cost

    def cold_s(self, num_prompt: float, num_answer: float) -> float:
        """Seconds of the machine that a request takes with nothing cached, while half the slots write."""
        cost = self.table()
        rows = max(1, self.slots // 2)
        read_s = num_prompt / 512 * (cost.predict(512) or 0.0)
        return read_s + num_answer / rows * (cost.predict(rows) or 0.0)


PRESETS = {
    "cpu": Costs(
        steps=((1, 0.0095), (8, 0.037), (512, 2.31)),
        slots=8,
        cache_tokens=100_000,
        source="SmolLM2-135M on two cores of an AMD EPYC (docs/performance.md: 105 tokens/s alone, 222"
        " tokens/s of a prompt of 970; fan-out of 8 without its prompts)",
    ),
    "h100": Costs(
        steps=((1, 0.00645), (8, 0.0102), (64, 0.0163), (512, 0.0232)),
        slots=64,
        cache_tokens=400_000,
        source="an 8B in F16 on an H100 80 GB (docs/performance.md: 155, 783 and 3,917 tokens/s of 1, 8 and"
        " 64 streams; llama-bench reads 22,100 tokens/s)",
    ),
}


def read(name: str) -> Costs:
    """A preset by name, or a file.

    Raises:
        BenchError: neither is there, or the file is of another form.
    """
    if name in PRESETS:
        return PRESETS[name]
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=Costs)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{name} is none of {', '.join(PRESETS)}, and no file of costs: {error}") from error


def measure(url: str) -> Costs:
    """Load the server at `url` for some two minutes and read what its steps took.

    Raises:
        BenchError: it does not answer as a Stoker does.
    """
    try:
        return asyncio.run(_measured(url.rstrip("/")))
    except (httpx.HTTPError, KeyError, json.JSONDecodeError) as error:
        raise BenchError(f"{url} could not be measured: {error!r}") from error


class _Load(msgspec.Struct, frozen=True):
    """Streams that are always there: their number, and what each asks for."""

    num: int
    words: int
    num_tokens: int


LOADS = (*(_Load(num, 8, 400) for num in STREAMS), _Load(1, PROMPT_WORDS, 1))


async def _measured(url: str) -> Costs:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        points = [await _point(client, model, load) for load in LOADS]
        status = (await client.get("/v1/runtime")).json()
    return Costs(
        steps=tuple(sorted(points)),
        slots=max(1, len(status["slots"])),
        cache_tokens=status["cache"]["live"]["cells_total"],
        source=f"measured at {url}: {model}, {status['engine']['label']}",
    )


async def _point(client: httpx.AsyncClient, model: str, load: _Load) -> tuple[int, float]:
    """Tokens and seconds of a step under a load; on a slow machine when two of its requests have ended."""
    num_ended = 0

    async def stream(number: int) -> None:
        nonlocal num_ended
        for turn in count():
            body: dict[str, Any] = {
                "model": model,
                "prompt": random_prompt(load.words, seed=f"{load} {number} {turn}"),
                "max_tokens": load.num_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            (await client.post("/v1/completions", json=body)).raise_for_status()
            num_ended += 1

    began_s = time.monotonic()
    streams = [asyncio.create_task(stream(number)) for number in range(load.num)]
    while time.monotonic() - began_s < WAIT_S or num_ended < MIN_ENDED:
        done, _ = await asyncio.wait(streams, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()  # what it failed with
    status = (await client.get("/v1/runtime")).json()
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    activity = next(row["activity"] for row in status["models"] if row["id"] == model)
    return round(activity["tokens_per_step"]), activity["step_ms"] / 1000
