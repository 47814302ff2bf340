"""Many ask at once after the same long beginning: how often a server computes it.

Before each crowd the server answers one prompt of the same words in another order. It is unseen, and as long
as the common beginning to the token: so it tells how many tokens that has and how long they take.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.client import Completion, Stream
from bench.errors import BenchError
from bench.prompts import random_prompt, random_words, shuffled
from bench.stages import hit_rate, stage_of
from bench.status import COMPUTED, counter
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
    from collections.abc import Sequence

    from bench.client import BrokenStream, Client
    from bench.peers import Shape
    from bench.target import Target

NUM_SLOTS = 4
CTX_SIZE = 16384
NUM_REQUESTS = 16
NUM_OTHERS = NUM_REQUESTS - 1
PREFIX_WORDS = 637
TAIL_WORDS = 20
NUM_TOKENS = 24
HEAD_START_S = 0.1
LEAVES_AT = 0.45
"""Part of the prefix's own time after which its leader leaves: before half of it is computed."""


class Shared(Workload):
    """Sixteen requests at once that begin alike and end each its own way, on four slots."""

    name = "shared"
    title = f"{NUM_REQUESTS} at once, 640 tokens in common"
    metrics = (
        Metric("wall_s", "until all is answered", "s", Better.LOWER, bar=1 / 0.42),
        Metric("ttft_p50_ms", "first token, median", "ms", Better.LOWER),
        Metric("ttft_p95_ms", "first token, p95", "ms", Better.LOWER),
        Metric(
            "prefix_computed",
            "prompt tokens computed over prefix once and tails",
            "times",
            Better.LOWER,
            bar=1.0,
            judged=Judged.EACH,
        ),
        Metric("prefix_times", "the prefix was computed", "times", Better.LOWER, in_picture=False),
        Metric("hit_rate", "prompt tokens cached", "of 1", Better.HIGHER, in_picture=False),
        Metric("cold_ms", "the prefix alone, first token", "ms", Better.LOWER, in_picture=False),
    )

    def shape(self, default: Shape) -> Shape:
        """A quarter as many slots as requests."""
        return replace(default, num_slots=NUM_SLOTS, ctx_size=CTX_SIZE)

    async def run(self, target: Target, seed: int) -> Outcome:
        """All requests at once."""
        crowd = _Crowd(target.client, f"{self.name} {seed}")
        cold = await crowd.measure_prefix()
        before = await counter(target.client, COMPUTED)
        streams = await asyncio.gather(*map(target.client.complete, crowd.requests))
        require_tokens(streams, NUM_TOKENS)
        work = await crowd.work_of(streams, cold, before)
        traces = tuple(trace_of(stream, Priority.INTERACTIVE, NUM_TOKENS) for stream in streams)
        times_ms = [stream.ttft_s * 1e3 for stream in streams]
        values = {
            "wall_s": wall_s(traces),
            "ttft_p50_ms": percentile(times_ms, 50),
            "ttft_p95_ms": percentile(times_ms, 95),
            "prefix_computed": work.over_once,
            "prefix_times": work.prefix_times,
            "hit_rate": hit_rate(streams),
            "cold_ms": cold.ttft_s * 1e3,
        }
        return Outcome(values, traces, (stage_of("all at once", streams),))


class TakeOver(Workload):
    """The same crowd, but the first of it leaves before it has computed half of what all wait for.

    What llama-server computed for a request that left is in none of its answers and is not counted.
    """

    name = "takeover"
    title = f"{NUM_REQUESTS} at once, 640 tokens in common, the first leaves"
    metrics = (
        Metric(
            "prefix_times",
            "the prefix was computed",
            "times",
            Better.LOWER,
            bar=1.5,
            judged=Judged.EACH,
            in_picture=False,
        ),
        Metric(
            "complete",
            f"answers of {NUM_TOKENS} tokens",
            f"of {NUM_OTHERS}",
            Better.HIGHER,
            bar=NUM_OTHERS,
            judged=Judged.EACH,
        ),
        Metric("wall_s", "until all is answered", "s", Better.LOWER),
        Metric("ttft_p95_ms", "first token, p95", "ms", Better.LOWER),
        Metric(
            "left_early",
            "the first left before its first token",
            "of 1",
            Better.HIGHER,
            bar=1,
            judged=Judged.EACH,
            in_picture=False,
        ),
    )

    def shape(self, default: Shape) -> Shape:
        """As in `Shared`."""
        return replace(default, num_slots=NUM_SLOTS, ctx_size=CTX_SIZE)

    async def run(self, target: Target, seed: int) -> Outcome:
        """One request, which goes away; the others follow it after `HEAD_START_S` seconds."""
        client = target.client
        crowd = _Crowd(client, f"{self.name} {seed}")
        cold = await crowd.measure_prefix()
        before = await counter(client, COMPUTED)
        first, *others = crowd.requests
        async with asyncio.TaskGroup() as group:
            leader = group.create_task(client.attempt(first, timeout_s=LEAVES_AT * cold.ttft_s))
            await asyncio.sleep(HEAD_START_S)
            tasks = [group.create_task(client.attempt(request)) for request in others]
        followers = [task.result() for task in tasks]
        whole = _whole(followers)
        work = await crowd.work_of(whole, cold, before)
        traces = tuple(
            trace_of(outcome, Priority.INTERACTIVE, NUM_TOKENS) for outcome in (leader.result(), *followers)
        )
        values = {
            "prefix_times": work.prefix_times,
            "complete": len(whole),
            "wall_s": wall_s(traces),
            "ttft_p95_ms": percentile([stream.ttft_s * 1e3 for stream in whole], 95),
            "left_early": int(not traces[0].token_times_s),
        }
        return Outcome(values, traces, (stage_of("the others", whole),))


@dataclass(frozen=True, slots=True)
class _Work:
    """Prompt tokens: what a server computed, and what there was of the prefix and of everything after it."""

    num_computed: float
    num_prefix: int
    num_tails: int

    @property
    def over_once(self) -> float:
        return self.num_computed / (self.num_prefix + self.num_tails)

    @property
    def prefix_times(self) -> float:
        return (self.num_computed - self.num_tails) / self.num_prefix


class _Crowd:
    """The requests of one repetition against one server."""

    def __init__(self, client: Client, seed: str) -> None:
        self._client = client
        self._prefix = random_prompt(PREFIX_WORDS, seed)
        self._seed = seed

    @property
    def requests(self) -> list[Completion]:
        tails = (random_words(TAIL_WORDS, f"{self._seed} tail {i}") for i in range(NUM_REQUESTS))
        return [Completion(prompt=f"{self._prefix} {tail}", max_tokens=NUM_TOKENS) for tail in tails]

    async def measure_prefix(self) -> Stream:
        """An answer after a prompt as long as the prefix."""
        prompt = shuffled(self._prefix, f"{self._seed} shuffled")
        return await self._client.complete(Completion(prompt=prompt, max_tokens=1))

    async def work_of(self, streams: Sequence[Stream], cold: Stream, before: float | None) -> _Work:
        """What was computed since the engine's counter stood at `before`; without one, by the answers."""
        after = await counter(self._client, COMPUTED)
        computed: float = sum(stream.computed_tokens for stream in streams)
        if before is not None and after is not None:
            computed = after - before
        tails = sum(stream.prompt_tokens - cold.prompt_tokens for stream in streams)
        return _Work(computed, cold.prompt_tokens, tails)


def _whole(outcomes: Sequence[Stream | BrokenStream]) -> list[Stream]:
    streams = [o for o in outcomes if isinstance(o, Stream) and o.completion_tokens == NUM_TOKENS]
    if not streams:
        raise BenchError(f"{NUM_TOKENS} tokens were asked for, and no request had them: {outcomes[0]}")
    return streams
