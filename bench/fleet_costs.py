"""What a step costs on one machine: measured there before, read from a file, or measured now.

A file is a JSON object: `steps`, pairs of tokens and seconds; `slots`; `cache_tokens`, what its cache holds;
`source`, where they are from. `--measure URL` makes one: it loads a running server with one stream and with
several, and after each reads from `/v1/runtime` how many tokens the steps had and how long they took, as
`stoker.scheduler.cost` has it. Then it gives it long prompts one after the other: what a step of a whole
batch takes is so many tokens at the speed at which they are read.
"""

from __future__ import annotations

import asyncio
import json
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import msgspec
import numpy as np

from bench.errors import BenchError
from bench.prompts import random_prompt
from stoker.scheduler.cost import StepCost

if TYPE_CHECKING:
    from collections.abc import Iterable

WAIT_S = 20.0
"""Averages of `/v1/runtime` are of the last 15 s."""
MIN_ENDED = 2
NUM_PROMPTS = 4
PROMPT_WORDS = 900
BATCH_TOKENS = 512
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


class Steps(NamedTuple):
    """Steps that a machine has told of: how many, their seconds, and the tokens of all of them."""

    num: int
    took_s: float
    num_tokens: float


def fitted(told: Iterable[Steps], like: Costs) -> Costs:
    """Costs of a machine as it was among others: so much a step and so much a token, by least squares.

    Args:
        told: steps of the time that is meant.
        like: of the same machine, for what steps do not tell.

    Raises:
        BenchError: they are too few, or all alike.
    """
    rows = [each for each in told if each.num and each.took_s]
    sizes = np.array([[each.num, each.num_tokens] for each in rows]).reshape(-1, 2)
    took_s = np.array([each.took_s for each in rows])
    (step_s, token_s), _, rank, _ = np.linalg.lstsq(sizes, took_s, rcond=None)
    if rank < sizes.shape[1] or token_s <= 0:
        raise BenchError(f"{len(rows)} reports of steps do not tell what a step and a token cost")
    points = ((num, max(step_s, 0.0) + num * token_s) for num in (1, like.slots, BATCH_TOKENS))
    return msgspec.structs.replace(like, steps=tuple((num, float(each_s)) for num, each_s in points))


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
        return asyncio.run(measured(url.rstrip("/")))
    except (httpx.HTTPError, KeyError, json.JSONDecodeError) as error:
        raise BenchError(f"{url} could not be measured: {error!r}") from error


async def measured(url: str) -> Costs:
    """As `measure`, in an event loop; errors are those of httpx."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        first = await _writing(client, model, 1)
        status = (await client.get("/v1/runtime")).json()
        num_slots = max(1, len(status["slots"]))
        others = [await _writing(client, model, num) for num in sorted({num_slots // 2, num_slots} - {0, 1})]
        reading = await _reading(client, model)
    return Costs(
        steps=(first, *others, reading),
        slots=num_slots,
        cache_tokens=status["cache"]["live"]["cells_total"],
        source=f"measured at {url}: {model}, {status['engine']['label']}",
    )


async def _writing(client: httpx.AsyncClient, model: str, num_streams: int) -> tuple[int, float]:
    """Tokens and seconds of a step of so many streams; on a slow machine when two requests have ended."""
    num_ended = 0

    async def stream(number: int) -> None:
        nonlocal num_ended
        for turn in count():
            prompt = random_prompt(8, seed=f"{num_streams} {number} {turn}")
            await _ask(client, model, prompt, 400)
            num_ended += 1

    began_s = time.monotonic()
    streams = [asyncio.create_task(stream(number)) for number in range(num_streams)]
    while time.monotonic() - began_s < WAIT_S or num_ended < MIN_ENDED:
        done, _ = await asyncio.wait(streams, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()  # what it failed with
    status = (await client.get("/v1/runtime")).json()
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    activity = next(row["activity"] for row in status["models"] if row["id"] == model)
    return num_streams, activity["step_ms"] / 1000 * num_streams / activity["tokens_per_step"]


async def _reading(client: httpx.AsyncClient, model: str) -> tuple[int, float]:
    """A step of a whole batch of a prompt: its tokens at the median speed of several."""
    token_s = []
    for number in range(NUM_PROMPTS):
        began_s = time.monotonic()
        usage = await _ask(client, model, random_prompt(PROMPT_WORDS, seed=f"prompt {number}"), 1)
        num_read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        token_s.append((time.monotonic() - began_s) / num_read)
    return BATCH_TOKENS, BATCH_TOKENS * median(token_s)


async def _ask(client: httpx.AsyncClient, model: str, prompt: str, num_tokens: int) -> dict[str, Any]:
    """A greedy completion of so many tokens; its usage."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = (await client.post("/v1/completions", json=body)).raise_for_status()
    usage: dict[str, Any] = answer.json()["usage"]
    return usage
