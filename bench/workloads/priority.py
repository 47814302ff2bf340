"""Somebody asks while background work fills every slot: what they feel of it, and what it costs the work.

The requests are the same for both servers, class included: llama-server knows no classes and ignores it. The
arrivals come at fixed times, whether the former are answered or not, so a slow server is not asked less.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from bench.client import BrokenStream, Completion, Stream
from bench.errors import BenchError
from bench.prompts import random_prompt
from bench.workloads.workload import (
    Better,
    Judged,
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
    from collections.abc import Mapping, Sequence

    from bench.client import Client
    from bench.peers import Shape
    from bench.target import Target
    from bench.timeline import Trace

NUM_SLOTS = 4
CTX_SIZE = 16384
PROMPT_WORDS = 60
NUM_BACKGROUND = 8
BACKGROUND_TOKENS = 300
NUM_ARRIVALS = 6
INTERACTIVE_TOKENS = 24
NUM_ALONE = 5
STEADY_TOKENS = 10
ARRIVE_EVERY_S = 1.5
ALLOWED_IDLE_TIMES = 1.5
ALLOWED_STEPS = 2
BACKGROUND_CLASS = (("service_tier", "flex"),)


class Beside(Workload):
    """Eight background requests of 300 tokens on four slots; meanwhile six interactive ones of 24."""

    name = "priority"
    title = f"{NUM_ARRIVALS} interactive beside {NUM_BACKGROUND} background requests"
    metrics = (
        Metric("ttft_p95_ms", "interactive first token, p95", "ms", Better.LOWER, bar=50),
        Metric(
            "ttft_over_allowed",
            f"the same over {ALLOWED_IDLE_TIMES} idle first tokens and {ALLOWED_STEPS} steps",
            "times",
            Better.LOWER,
            bar=1,
            judged=Judged.MEDIAN,
        ),
        Metric(
            "speed_kept",
            "interactive decode over alone",
            "times",
            Better.HIGHER,
            bar=0.8,
            judged=Judged.MEDIAN,
        ),
        Metric(
            "background_complete",
            f"background answers of {BACKGROUND_TOKENS} tokens",
            f"of {NUM_BACKGROUND}",
            Better.HIGHER,
            bar=NUM_BACKGROUND,
            judged=Judged.EACH,
        ),
        Metric("wall_s", "until all is answered", "s", Better.LOWER, bar=1 / 1.15),
        Metric(
            "arrivals_beside",
            "arrivals while background ran",
            f"of {NUM_ARRIVALS}",
            Better.HIGHER,
            bar=NUM_ARRIVALS,
            judged=Judged.EACH,
            in_picture=False,
        ),
        Metric("idle_ttft_ms", "idle first token, median", "ms", Better.LOWER, in_picture=False),
        Metric("idle_ttft_p95_ms", "idle first token, p95", "ms", Better.LOWER, in_picture=False),
        Metric("alone_tokens_per_s", "decode alone, median", "tok/s", Better.HIGHER, in_picture=False),
        Metric("step_ms", "background token to token, median", "ms", Better.LOWER, in_picture=False),
    )

    def shape(self, default: Shape) -> Shape:
        """Half as many slots as background requests."""
        return replace(default, num_slots=NUM_SLOTS, ctx_size=CTX_SIZE)

    async def run(self, target: Target, seed: int) -> Outcome:
        """First some interactive requests alone, one after the other; then the crowd."""
        alone = [await target.client.complete(_interactive(seed, f"alone {i}")) for i in range(NUM_ALONE)]
        require_tokens(alone, INTERACTIVE_TOKENS)
        crowd = await _drive(target.client, seed)
        return Outcome(_values(alone, crowd), (*crowd.background, *crowd.traces))


@dataclass(frozen=True, slots=True)
class _Crowd:
    """What became of the background requests and of the arrivals."""

    background: tuple[Trace, ...]
    arrivals: tuple[Stream, ...]

    @property
    def traces(self) -> tuple[Trace, ...]:
        return tuple(trace_of(s, Priority.INTERACTIVE, INTERACTIVE_TOKENS) for s in self.arrivals)


class _Steadiness:
    """Set once as many streams as there are slots have some tokens each."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._counts = [0] * NUM_BACKGROUND

    def count(self, index: int) -> None:
        self._counts[index] += 1
        if sum(count >= STEADY_TOKENS for count in self._counts) >= NUM_SLOTS:
            self.reached.set()


def _interactive(seed: int, which: str) -> Completion:
    """Without guesses, which are made for who is alone: company would be compared with those."""
    prompt = random_prompt(PROMPT_WORDS, f"priority {seed} {which}")
    return Completion(prompt=prompt, max_tokens=INTERACTIVE_TOKENS, extra=(("speculate", False),))


def _background(seed: int, index: int) -> Completion:
    prompt = random_prompt(PROMPT_WORDS, f"priority {seed} background {index}")
    return Completion(prompt=prompt, max_tokens=BACKGROUND_TOKENS, extra=BACKGROUND_CLASS)


async def _drive(client: Client, seed: int) -> _Crowd:
    steady = _Steadiness()
    async with asyncio.TaskGroup() as group:
        background = [
            group.create_task(client.attempt(_background(seed, i), on_text=partial(steady.count, i)))
            for i in range(NUM_BACKGROUND)
        ]
        reached = group.create_task(steady.reached.wait())
        # a stream that has ended ends the wait too: nothing gets steadier than that
        await asyncio.wait([reached, *background], return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        arrivals = [group.create_task(_arrive(client, seed, i)) for i in range(NUM_ARRIVALS)]
    traces = (trace_of(task.result(), Priority.BACKGROUND, BACKGROUND_TOKENS) for task in background)
    answers = tuple(_whole(task.result()) for task in arrivals)
    require_tokens(answers, INTERACTIVE_TOKENS)
    return _Crowd(tuple(traces), answers)


async def _arrive(client: Client, seed: int, index: int) -> Stream | BrokenStream:
    await asyncio.sleep(index * ARRIVE_EVERY_S)
    return await client.attempt(_interactive(seed, f"arrival {index}"))


def _whole(outcome: Stream | BrokenStream) -> Stream:
    if isinstance(outcome, BrokenStream):
        raise BenchError(f"an interactive request failed: {outcome.reason}")
    return outcome


def _values(alone: Sequence[Stream], crowd: _Crowd) -> Mapping[str, float]:
    gaps_s = [gap_s for trace in crowd.background for gap_s in trace.gaps_s]
    if not gaps_s:
        raise BenchError("no background request had two tokens, so there is no step to measure")
    idle_s, step_s = median(s.ttft_s for s in alone), median(gaps_s)
    allowed_s = ALLOWED_IDLE_TIMES * idle_s + ALLOWED_STEPS * step_s
    ttft_s = percentile([s.ttft_s for s in crowd.arrivals], 95)
    alone_speed = median(s.decode_tokens_per_s for s in alone)
    over_s = max(trace.ended_s for trace in crowd.background)
    return {
        "ttft_p95_ms": ttft_s * 1e3,
        "ttft_over_allowed": ttft_s / allowed_s,
        "speed_kept": median(s.decode_tokens_per_s for s in crowd.arrivals) / alone_speed,
        "background_complete": sum(trace.is_complete for trace in crowd.background),
        "wall_s": wall_s((*crowd.background, *crowd.traces)),
        "arrivals_beside": sum(s.sent_s < over_s for s in crowd.arrivals),
        "idle_ttft_ms": idle_s * 1e3,
        "idle_ttft_p95_ms": percentile([s.ttft_s for s in alone], 95) * 1e3,
        "alone_tokens_per_s": alone_speed,
        "step_ms": step_s * 1e3,
    }
