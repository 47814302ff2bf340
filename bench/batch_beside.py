"""What a person feels of a batch of 600 prompts in the same program: the first token, and whether all answer.

    python -m bench.batch_beside --model FILE --repeat 3

One runtime of four slots, asked in turns in one run: a person alone; beside eight background requests at a
time, as the workload `priority` has them; beside `Runtime.batch`. The ratio of the last two is the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bench.prompts import random_prompt
from bench.workloads.workload import percentile
from stoker import Runtime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

NUM_SLOTS = 4
CTX_SIZE = 16384
NUM_PROMPTS = 600
NUM_REQUESTS = 8
"""Background requests at a time where there is no batch."""
JOB_WORDS = 8
JOB_TOKENS = 8
PERSON_WORDS = 60
PERSON_TOKENS = 24
NUM_ARRIVALS = 12
ARRIVE_EVERY_S = 1.5
MODES = ("alone", "requests", "batch")


@dataclass(frozen=True, slots=True)
class Beside:
    """What a person felt in one mode, and what became of the work beside.

    Attributes:
        mode: out of `MODES`.
        first_token_s: of each arrival.
        num_beside: arrivals while the work still ran.
        num_prompts, num_answers: of the work.
    """

    mode: str
    first_token_s: tuple[float, ...]
    num_beside: int
    num_prompts: int
    num_answers: int


async def _arrive(runtime: Runtime, prompt: str) -> float:
    """Seconds until the first token of a person's answer."""
    began_s, first_s = time.monotonic(), 0.0
    async with aclosing(runtime.generate(prompt, max_tokens=PERSON_TOKENS, temperature=0.0)) as deltas:
        async for _ in deltas:
            first_s = first_s or time.monotonic() - began_s
    return first_s


async def _requests(runtime: Runtime, prompts: Sequence[str]) -> int:
    """The prompts as single requests, so many at a time; how many had an answer."""
    room = asyncio.Semaphore(NUM_REQUESTS)

    async def one(prompt: str) -> bool:
        async with room:
            answer = await runtime.ask(
                prompt, raw=True, max_tokens=JOB_TOKENS, ignore_eos=True, priority="background"
            )
            return answer.usage.completion_tokens == JOB_TOKENS

    return sum(await asyncio.gather(*map(one, prompts)))


async def _batch(runtime: Runtime, prompts: Sequence[str]) -> int:
    """The prompts as one batch; how many had an answer."""
    answers = await runtime.batch(prompts, raw=True, max_tokens=JOB_TOKENS, ignore_eos=True)
    return sum(answer.usage.completion_tokens == JOB_TOKENS for answer in answers)


async def _nothing(runtime: Runtime, prompts: Sequence[str]) -> int:  # noqa: ARG001 - as the others
    return 0


_WORK: dict[str, Callable[[Runtime, Sequence[str]], Awaitable[int]]] = {
    "alone": _nothing,
    "requests": _requests,
    "batch": _batch,
}


async def beside(runtime: Runtime, mode: str, seed: str) -> Beside:
    """One mode: the work begins, people arrive at fixed times, and both are waited for."""
    prompts = [random_prompt(JOB_WORDS, f"{seed} {mode} job {at}") for at in range(NUM_PROMPTS)]
    work = asyncio.ensure_future(_WORK[mode](runtime, prompts))
    people, num_beside = [], 0
    for at in range(NUM_ARRIVALS):
        await asyncio.sleep(ARRIVE_EVERY_S)
        num_beside += not work.done()
        person = random_prompt(PERSON_WORDS, f"{seed} {mode} person {at}")
        people.append(asyncio.create_task(_arrive(runtime, person)))
    first_token_s = tuple(await asyncio.gather(*people))
    return Beside(mode, first_token_s, num_beside, 0 if mode == "alone" else NUM_PROMPTS, await work)


async def measure(model: str, seeds: range) -> list[Beside]:
    """Every mode of every repetition, in turns."""
    found = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        async with Runtime(model, slots=NUM_SLOTS, ctx_size=CTX_SIZE, cache_dir=folder) as runtime:
            await _arrive(runtime, "warm")
            for seed in seeds:
                found += [await beside(runtime, mode, str(seed)) for mode in MODES]
    return found


@dataclass(frozen=True, slots=True)
class Felt:
    """A mode over all repetitions."""

    mode: str
    first_token_p95_ms: float
    num_beside: int
    num_arrivals: int
    num_prompts: int
    num_answers: int


def felt(found: Sequence[Beside]) -> list[Felt]:
    """By mode."""
    return [_felt(mode, [one for one in found if one.mode == mode]) for mode in MODES]


def _felt(mode: str, found: Sequence[Beside]) -> Felt:
    times_s = [first_s for one in found for first_s in one.first_token_s]
    return Felt(
        mode=mode,
        first_token_p95_ms=percentile(times_s, 95) * 1e3,
        num_beside=sum(one.num_beside for one in found),
        num_arrivals=len(times_s),
        num_prompts=sum(one.num_prompts for one in found),
        num_answers=sum(one.num_answers for one in found),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row a mode and the ratio, as text or as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.batch_beside", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = felt(asyncio.run(measure(options.model, range(options.seed, options.seed + options.repeat))))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    for row in rows:
        answers = f"{row.num_answers} of {row.num_prompts} prompts answered"
        arrivals = f"{row.num_beside} of {row.num_arrivals} arrivals beside it"
        print(f"{row.mode}: first token p95 {row.first_token_p95_ms:.0f} ms; {answers}; {arrivals}")
    _, requests, batch = rows
    print(f"batch over requests: {batch.first_token_p95_ms / requests.first_token_p95_ms:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
