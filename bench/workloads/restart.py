"""A long prompt asked again after its server was restarted, and after what computes was killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.client import Completion
from bench.prompts import random_prompt
from bench.stages import stage_of
from bench.status import wait_saved
from bench.workloads.workload import Better, Judged, Metric, Outcome, Workload, require_tokens

if TYPE_CHECKING:
    from bench.client import Stream
    from bench.target import Target

PROMPT_WORDS = 1997
NUM_TOKENS = 8


class Restart(Workload):
    """Two prompts of 2,000 tokens: one over a stop and a start, one over a SIGKILL of the engine.

    The kill waits until the server says that what it keeps is saved, if it says so. The peer is one process,
    which is killed and started again.
    """

    name = "restart"
    title = "2,000 tokens before and after a restart"
    ends_servers = True
    metrics = (
        Metric(
            "restart_over_cold",
            "first token after a restart over cold",
            "times",
            Better.LOWER,
            bar=0.1,
            judged=Judged.MEDIAN,
        ),
        Metric(
            "killed_over_cold",
            "first token after a kill over cold",
            "times",
            Better.LOWER,
            bar=0.1,
            judged=Judged.MEDIAN,
        ),
        Metric("cold_ms", "first token, cold", "ms", Better.LOWER, in_picture=False),
        Metric("restart_ms", "first token after a restart", "ms", Better.LOWER, in_picture=False),
        Metric("killed_ms", "first token after a kill", "ms", Better.LOWER, in_picture=False),
        Metric("same_answers", "answers as before", "of 2", Better.HIGHER, in_picture=False),
    )

    async def run(self, target: Target, seed: int) -> Outcome:
        """Ask, restart, ask again; then the same with another prompt and a kill."""
        stopped = _request(f"{self.name} {seed} stopped")
        first = await _answer(target, stopped)
        await target.restart()
        restarted = await _answer(target, stopped)
        killed = _request(f"{self.name} {seed} killed")
        second = await _answer(target, killed)
        await wait_saved(target.client)
        await target.lose_engine()
        survived = await _answer(target, killed)
        values = {
            "restart_over_cold": restarted.ttft_s / first.ttft_s,
            "killed_over_cold": survived.ttft_s / second.ttft_s,
            "cold_ms": (first.ttft_s + second.ttft_s) / 2 * 1e3,
            "restart_ms": restarted.ttft_s * 1e3,
            "killed_ms": survived.ttft_s * 1e3,
            "same_answers": (restarted.text == first.text) + (survived.text == second.text),
        }
        stages = (
            stage_of("cold", [first, second]),
            stage_of("restarted", [restarted]),
            stage_of("killed", [survived]),
        )
        return Outcome(values, stages=stages)


def _request(seed: str) -> Completion:
    return Completion(prompt=random_prompt(PROMPT_WORDS, seed), max_tokens=NUM_TOKENS)


async def _answer(target: Target, request: Completion) -> Stream:
    stream = await target.client.complete(request)
    require_tokens([stream], NUM_TOKENS)
    return stream
