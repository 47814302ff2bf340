"""Another program takes a core: decode speed before, with it, and after; each server picks its own threads.

The server decodes without a break, answer after answer, as it would for somebody who reads along: so what
follows the machine has steps to see it by, and the measured answers begin when it has had its time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from bench.client import Completion, Stream
from bench.errors import BenchError
from bench.noise import busy_process
from bench.prompts import random_prompt
from bench.workloads.workload import Better, Judged, Metric, Outcome, Workload, require_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.client import BrokenStream, Client
    from bench.peers import Shape
    from bench.target import Target

PROMPT_WORDS = 60
NUM_TOKENS = 256
NUM_FILLER_TOKENS = 16
BEFORE_QUIET_S = 1.0
AFTER_START_S = 2.0
AFTER_STOP_S = 3.0
FILLER_LIMIT_S = 3.0
ANSWER_LIMIT_S = 30.0
"""Threads that wait for each other on one core were seen to take seconds a token: what came counts."""


class Noisy(Workload):
    """One stream of 256 tokens in a quiet minute, with a busy process beside it, and when that has gone."""

    name = "noisy"
    title = "one stream, another process busy"
    metrics = (
        Metric("noisy_tokens_per_s", "decode, one core taken", "tok/s", Better.HIGHER, bar=2.5),
        Metric(
            "back_over_quiet",
            f"decode {AFTER_STOP_S:g} s after the noise over before it",
            "times",
            Better.HIGHER,
            bar=0.9,
            judged=Judged.MEDIAN,
        ),
        Metric("quiet_tokens_per_s", "decode, quiet", "tok/s", Better.HIGHER),
        Metric(
            "back_tokens_per_s",
            f"decode, {AFTER_STOP_S:g} s after the noise",
            "tok/s",
            Better.HIGHER,
            in_picture=False,
        ),
    )

    def shape(self, default: Shape) -> Shape:
        """Threads as each server picks them."""
        return replace(default, num_threads=None)

    async def run(self, target: Target, seed: int) -> Outcome:
        """Three answers, with a stretch of small ones before each."""
        reader = _Reader(target.client, seed)
        quiet = await reader.speed_after(BEFORE_QUIET_S)
        with busy_process():
            noisy = await reader.speed_after(AFTER_START_S)
        back = await reader.speed_after(AFTER_STOP_S)
        return Outcome(
            {
                "noisy_tokens_per_s": noisy,
                "back_over_quiet": back / quiet,
                "quiet_tokens_per_s": quiet,
                "back_tokens_per_s": back,
            }
        )


@dataclass(slots=True)
class _Reader:
    """Asks for one answer after the other, each after a prompt of its own."""

    client: Client
    seed: int
    numbers: Iterator[int] = field(default_factory=count)

    async def speed_after(self, delay_s: float) -> float:
        """Keep the server decoding for `delay_s` seconds, then give tokens a second of one answer."""
        loop = asyncio.get_running_loop()
        start_s = loop.time() + delay_s
        while loop.time() < start_s:
            await self.client.attempt(self._next(NUM_FILLER_TOKENS), timeout_s=FILLER_LIMIT_S)
        stream = await self.client.attempt(self._next(NUM_TOKENS), timeout_s=ANSWER_LIMIT_S)
        if isinstance(stream, Stream):
            require_tokens([stream], NUM_TOKENS)
            return stream.decode_tokens_per_s
        return _speed_so_far(stream)

    def _next(self, num_tokens: int) -> Completion:
        prompt = random_prompt(PROMPT_WORDS, f"noisy {self.seed} {next(self.numbers)}")
        return Completion(prompt=prompt, max_tokens=num_tokens)


def _speed_so_far(stream: BrokenStream) -> float:
    """Tokens a second of an answer that was cut off by the limit, of the text that had come."""
    times = stream.token_times_s
    if len(times) < 2:  # noqa: PLR2004 - a speed takes two
        raise BenchError(f"no two tokens within {ANSWER_LIMIT_S:g} s: {stream.reason}")
    return (len(times) - 1) / (stream.last_s - times[0])
