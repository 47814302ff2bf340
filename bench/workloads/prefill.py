"""A long prompt nobody has seen, one token of answer: the speed of reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.client import Completion
from bench.prompts import random_prompt
from bench.workloads.workload import Better, Metric, Outcome, Workload, require_tokens

if TYPE_CHECKING:
    from bench.target import Target

PROMPT_WORDS = 967


class Prefill(Workload):
    """One prompt of about 970 tokens, one token out."""

    name = "prefill"
    title = "unseen prompt of 970 tokens"
    metrics = (Metric("prefill_tokens_per_s", "prefill", "tok/s", Better.HIGHER, bar=0.98),)

    async def run(self, target: Target, seed: int) -> Outcome:
        """One completion of one token."""
        request = Completion(prompt=random_prompt(PROMPT_WORDS, seed), max_tokens=1)
        stream = await target.client.complete(request)
        require_tokens([stream], 1)
        return Outcome({"prefill_tokens_per_s": stream.prefill_tokens_per_s})
