"""More context than cells: eight requests that together need three times the pool, and each fits alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.client import Completion
from bench.prompts import random_prompt
from bench.workloads.workload import Better, Judged, Metric, Outcome, Workload, trace_of, wall_s
from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from bench.peers import Shape
    from bench.target import Target

NUM_REQUESTS = 8
NUM_CELLS = 1024
PROMPT_WORDS = 64
NUM_TOKENS = 320
TIMEOUT_S = 180.0


class Exhaustion(Workload):
    """Eight requests at once of 64 and 320 tokens on 1024 cells: how many get their whole answer."""

    name = "exhaustion"
    title = f"{NUM_REQUESTS} requests, three times the cells"
    metrics = (
        Metric(
            "complete",
            f"answers of {NUM_TOKENS} tokens",
            f"of {NUM_REQUESTS}",
            Better.HIGHER,
            bar=NUM_REQUESTS,
            judged=Judged.EACH,
        ),
        Metric("wall_s", "until the last answer or error", "s", Better.LOWER, in_picture=False),
    )

    def shape(self, default: Shape) -> Shape:
        """A slot each, and a third of the cells."""
        return replace(default, num_slots=NUM_REQUESTS, ctx_size=NUM_CELLS)

    async def run(self, target: Target, seed: int) -> Outcome:
        """All requests at once. An error, a short answer or none in `TIMEOUT_S` seconds does not count."""
        requests = [
            Completion(prompt=random_prompt(PROMPT_WORDS, f"exhaustion {seed} {i}"), max_tokens=NUM_TOKENS)
            for i in range(NUM_REQUESTS)
        ]
        outcomes = await asyncio.gather(*(target.client.attempt(r, timeout_s=TIMEOUT_S) for r in requests))
        traces = tuple(trace_of(outcome, Priority.INTERACTIVE, NUM_TOKENS) for outcome in outcomes)
        return Outcome({"complete": sum(t.is_complete for t in traces), "wall_s": wall_s(traces)}, traces)
