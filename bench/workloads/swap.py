"""Two models asked in turn where memory holds one: how long a model that is out takes to its first token.

What a bare load takes is measured beside it by whoever makes the workload; that servers have two models and
room for one is theirs to arrange, and checked here.
"""

from __future__ import annotations

import asyncio
from statistics import median
from typing import TYPE_CHECKING

from bench.client import Completion
from bench.errors import BenchError
from bench.prompts import random_prompt
from bench.status import cut_down, models_in_memory
from bench.workloads.workload import Better, Judged, Metric, Outcome, Workload, require_tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bench.bare_load import BareLoad
    from bench.client import Stream
    from bench.target import Target

    MeasureBare = Callable[[str, str], Awaitable[BareLoad]]

NUM_MODELS = 2
NUM_ROUNDS = 2
PROMPT_WORDS = 61
NUM_TOKENS = 8
SETTLE_S = 0.5
"""Before and after a bare load: threads of whoever computed last spin for a while."""


class Swap(Workload):
    """Four swaps after one whose time is not taken, each with a prompt nobody has seen.

    They come in pairs, the second of a pair as soon as the answer of the first has ended. Before and after
    each pair a bare load is measured, of the same model with the same prompt.

    Args:
        measure_bare: loads the model served under a name, alone, and begins an answer to a prompt.
    """

    name = "swap"
    title = "two models, memory for one"
    metrics = (
        Metric("ttft_ms", "first token after a swap", "ms", Better.LOWER, bar=1.0),
        Metric(
            "over_bare",
            "first token after a swap over a bare load",
            "times",
            Better.LOWER,
            bar=1.3,
            judged=Judged.MEDIAN,
        ),
        Metric("over_bare_least", "the same, least of a run", "times", Better.LOWER, in_picture=False),
        Metric("over_bare_most", "the same, most of a run", "times", Better.LOWER, in_picture=False),
        Metric("bare_ms", "first token of a bare load beside it", "ms", Better.LOWER, in_picture=False),
    )

    def __init__(self, measure_bare: MeasureBare) -> None:
        self._measure_bare = measure_bare

    async def run(self, target: Target, seed: int) -> Outcome:
        """One swap, then pairs of swaps between bare loads."""
        one, other = await _out_first(target)
        await _swap(target, one, f"{self.name} {seed} first")
        swaps: list[Stream] = []
        bare: list[BareLoad] = []
        for index in range(NUM_ROUNDS):
            seeds = [f"{self.name} {seed} {index} {turn}" for turn in range(NUM_MODELS)]
            bare.append(await self._bare(other, seeds[0]))
            swaps += [await _swap(target, other, seeds[0]), await _swap(target, one, seeds[1])]
            bare.append(await self._bare(one, seeds[1]))
        for stream, load in zip(swaps, bare, strict=True):
            if stream.prompt_tokens != load.num_prompt_tokens:
                text = f"{target.label} made {stream.prompt_tokens} tokens of a prompt"
                raise BenchError(f"{text}, the bare load {load.num_prompt_tokens}")
        ratios = [stream.ttft_s / load.took_s for stream, load in zip(swaps, bare, strict=True)]
        return Outcome(
            {
                "ttft_ms": median(stream.ttft_s for stream in swaps) * 1e3,
                "over_bare": median(ratios),
                "over_bare_least": min(ratios),
                "over_bare_most": max(ratios),
                "bare_ms": median(load.took_s for load in bare) * 1e3,
            }
        )

    async def _bare(self, model: str, seed: str) -> BareLoad:
        await asyncio.sleep(SETTLE_S)
        load = await self._measure_bare(model, random_prompt(PROMPT_WORDS, seed))
        await asyncio.sleep(SETTLE_S)
        return load


async def _out_first(target: Target) -> tuple[str, str]:
    """The two models, the one that is not in memory first."""
    models = await target.client.models()
    if len(models) != NUM_MODELS:
        raise BenchError(f"{target.label} serves {', '.join(models)}; a swap takes two models")
    inside = await models_in_memory(target.client)
    one, other = sorted(models, key=inside.__contains__)
    return one, other


async def _swap(target: Target, model: str, seed: str) -> Stream:
    """Ask the model that is out, and make sure that it came in place of the other, as it was asked for."""
    if model in await models_in_memory(target.client):
        raise BenchError(f"{target.label} has {model} in memory already: that is no swap")
    request = Completion(prompt=random_prompt(PROMPT_WORDS, seed), max_tokens=NUM_TOKENS, model=model)
    stream = await target.client.complete(request)
    require_tokens([stream], NUM_TOKENS)
    if phrases := await cut_down(target.client, model):
        raise BenchError(f"{target.label} gave {model} less than was asked for: {phrases}")
    return stream
