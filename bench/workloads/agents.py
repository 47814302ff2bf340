"""An agent's short tasks, each after the same long description of its tools, and others' chats between."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from bench.client import Completion
from bench.prompts import random_prompt, random_words
from bench.stages import hit_rate, stage_of
from bench.workloads.workload import (
    Better,
    Metric,
    Outcome,
    Workload,
    percentile,
    require_tokens,
    trace_of,
    wall_s,
)
from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from bench.client import Stream
    from bench.peers import Shape
    from bench.target import Target

NUM_SLOTS = 4
CTX_SIZE = 16384
TOOLS_WORDS = 1497
NUM_BURSTS = 4
BURST = 6
TASK_WORDS = (20, 40)
CHAT_WORDS = 397
NUM_TOKENS = 16


class Agents(Workload):
    """Twenty-four tasks in bursts of six. Between two bursts every slot is taken by an unrelated chat."""

    name = "agents"
    title = f"{NUM_BURSTS * BURST} short tasks after 1,500 tokens of tools"
    metrics = (
        Metric("wall_s", "until all is answered", "s", Better.LOWER),
        Metric("ttft_median_ms", "first token of a task, median", "ms", Better.LOWER),
        Metric("ttft_p95_ms", "first token of a task, p95", "ms", Better.LOWER),
        Metric("hit_rate", "prompt tokens of tasks cached", "of 1", Better.HIGHER),
    )

    def shape(self, default: Shape) -> Shape:
        """Fewer slots than a burst has tasks, and as many as there are chats between two bursts."""
        return replace(default, num_slots=NUM_SLOTS, ctx_size=CTX_SIZE)

    async def run(self, target: Target, seed: int) -> Outcome:
        """A burst at once, chats at once, the next burst."""
        name = f"{self.name} {seed}"
        tools = random_prompt(TOOLS_WORDS, name)
        bursts: list[list[Stream]] = []
        chats: list[Stream] = []
        for burst in range(NUM_BURSTS):
            if burst:
                prompts = [random_prompt(CHAT_WORDS, f"{name} chat {burst} {i}") for i in range(NUM_SLOTS)]
                chats += await _ask(target, prompts)
            tasks = [_task(f"{name} task {burst} {i}") for i in range(BURST)]
            bursts.append(await _ask(target, [f"{tools} {task}" for task in tasks]))
        done = [stream for streams in bursts for stream in streams]
        times_ms = [stream.ttft_s * 1e3 for stream in done]
        values = {
            "wall_s": wall_s(trace_of(s, Priority.INTERACTIVE, NUM_TOKENS) for s in (*done, *chats)),
            "ttft_median_ms": median(times_ms),
            "ttft_p95_ms": percentile(times_ms, 95),
            "hit_rate": hit_rate(done),
        }
        stages = (stage_of(f"burst {i}", streams) for i, streams in enumerate(bursts, start=1))
        return Outcome(values, stages=tuple(stages))


def _task(seed: str) -> str:
    return random_words(Random(seed).randint(*TASK_WORDS), seed)


async def _ask(target: Target, prompts: list[str]) -> list[Stream]:
    requests = [Completion(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    streams = await asyncio.gather(*map(target.client.complete, requests))
    require_tokens(streams, NUM_TOKENS)
    return streams
