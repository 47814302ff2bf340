"""Eight readers at once, each with a prompt of its own: what batching brings."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import TYPE_CHECKING

from bench.client import Completion
from bench.prompts import random_prompt
from bench.workloads.workload import PAUSES, Better, Metric, Outcome, Workload, pauses, require_tokens

if TYPE_CHECKING:
    from bench.target import Target

NUM_REQUESTS = 8
PROMPT_WORDS = 112
NUM_TOKENS = 96


class Fanout(Workload):
    """Eight streams of 96 tokens, prompts of about 115."""

    name = "fanout"
    title = "8 streams of 96 tokens"
    metrics = (
        Metric("tokens_per_s", "throughput", "tok/s", Better.HIGHER, bar=1.0),
        Metric("ttft_median_ms", "first token, median", "ms", Better.LOWER),
        *PAUSES,
    )

    async def run(self, target: Target, seed: int) -> Outcome:
        """All requests at once; throughput is tokens by the time from the first sent to the last done."""
        requests = [
            Completion(prompt=random_prompt(PROMPT_WORDS, seed * NUM_REQUESTS + i), max_tokens=NUM_TOKENS)
            for i in range(NUM_REQUESTS)
        ]
        streams = await asyncio.gather(*map(target.client.complete, requests))
        require_tokens(streams, NUM_TOKENS)
        wall_s = max(s.last_s for s in streams) - min(s.sent_s for s in streams)
        return Outcome(
            {
                "tokens_per_s": sum(s.completion_tokens for s in streams) / wall_s,
                "ttft_median_ms": median(s.ttft_s for s in streams) * 1e3,
            }
            | pauses(streams)
        )
