"""One reader, one answer: decode speed and time to the first token on a quiet server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.client import Completion
from bench.prompts import random_prompt
from bench.workloads.workload import PAUSES, Better, Metric, Outcome, Workload, pauses, require_tokens

if TYPE_CHECKING:
    from bench.target import Target

PROMPT_WORDS = 63
NUM_TOKENS = 192


class Single(Workload):
    """One stream of 192 tokens after a prompt of about 66."""

    name = "single"
    title = "one stream, 192 tokens"
    metrics = (
        Metric("decode_tokens_per_s", "decode", "tok/s", Better.HIGHER, bar=1.0),
        Metric("ttft_ms", "first token", "ms", Better.LOWER),
        *PAUSES,
    )

    async def run(self, target: Target, seed: int) -> Outcome:
        """One completion."""
        request = Completion(prompt=random_prompt(PROMPT_WORDS, seed), max_tokens=NUM_TOKENS)
        stream = await target.client.complete(request)
        require_tokens([stream], NUM_TOKENS)
        speed = {"decode_tokens_per_s": stream.decode_tokens_per_s, "ttft_ms": stream.ttft_s * 1e3}
        return Outcome(speed | pauses([stream]))
