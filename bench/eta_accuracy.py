"""How honest estimates of waiting are: what a request is told when it enters the queue, against when it runs.

    python -m bench.eta_accuracy --model FILE --repeat 3

A crowd asks two slots at once, alone, beside a person who asks again and again, and beside another program
that takes a core. An estimate is right if the time was within a factor of two of it, or both were short. One
that was not given counts as wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.noise import busy_process
from bench.prompts import random_prompt
from stoker import GenerateRequest, Runtime
from stoker.ipc.events import Admitted, Queued
from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from contextlib import AbstractContextManager

NUM_SLOTS = 2
CTX_SIZE = 8192
SHORT_S = 1.0
"""Two times below this are both short: nobody tells them apart."""
FACTOR = 2.0
SETTLE_S = 6.0
BETWEEN_S = 3.0
"""Between two crowds, so that the people of one are not expected among the jobs of the next."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request was told, and what came.

    Attributes:
        crowd, machine: among whom, and what else ran.
        priority: its class.
        is_first: told when it entered the queue, as the headers of an answer tell it.
        eta_s: seconds it was told; None: none.
        real_s: seconds until it got its slot.
    """

    crowd: str
    machine: str
    priority: str
    is_first: bool
    eta_s: float | None
    real_s: float

    @property
    def is_right(self) -> bool:
        """Whether it was right; see the module."""
        if self.eta_s is None:
            return False
        is_near = self.real_s / FACTOR <= self.eta_s <= self.real_s * FACTOR
        return is_near or (self.eta_s <= SHORT_S and self.real_s <= SHORT_S)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a crowd: what it asks for."""

    priority: Priority
    num_words: int
    max_tokens: int


def crowd_of(name: str) -> list[Asked]:
    """Who asks: eight people, eight jobs, or eight jobs beside a reader; of several lengths."""
    person, job = Priority.INTERACTIVE, Priority.BACKGROUND
    people = [Asked(person, 20 + 25 * (at % 3), 60) for at in range(8)]
    jobs = [Asked(job, 40 + 120 * (at % 2), 40 + 40 * (at % 3)) for at in range(8)]
    return {"people": people, "jobs": jobs, "both": jobs}[name]


CROWDS = ("people", "jobs", "both")
MACHINES = ("quiet", "busy")


def _machine(name: str) -> AbstractContextManager[object]:
    return busy_process() if name == "busy" else nullcontext()


async def _ask(runtime: Runtime, asked: Asked, seed: str) -> list[tuple[float, float | None, float]]:
    """Of each estimate that it is told: when, how much, and when it got its slot."""
    request = GenerateRequest(
        prompt=random_prompt(asked.num_words, seed), max_tokens=asked.max_tokens, priority=asked.priority
    )
    told: list[tuple[float, float | None]] = []
    admitted_s = 0.0
    async for event in runtime.stream(request):
        if isinstance(event, Queued):
            told.append((time.monotonic(), event.eta_s))
        elif isinstance(event, Admitted) and not admitted_s:
            admitted_s = time.monotonic()
    return [(at_s, eta_s, admitted_s) for at_s, eta_s in told]


async def _settle(runtime: Runtime, seed: str) -> None:
    """Some work, so that the machine is seen as it is."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < SETTLE_S:
        await _ask(runtime, Asked(Priority.INTERACTIVE, 40, 30), f"settle {seed} {time.monotonic()}")


@asynccontextmanager
async def _reader(runtime: Runtime, seed: str) -> AsyncIterator[None]:
    """Beside a person who asks, reads for as long as the answer took, and asks again, for a while already."""

    async def read_on() -> None:
        while True:
            began_s = time.monotonic()
            await _ask(runtime, Asked(Priority.INTERACTIVE, 40, 30), f"reader {seed} {began_s}")
            await asyncio.sleep(time.monotonic() - began_s)

    reading = asyncio.create_task(read_on())
    try:
        await asyncio.sleep(SETTLE_S)
        yield
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


async def estimates(model: Path, seed: int) -> list[Estimate]:
    """Every estimate of one repetition: each crowd on a quiet machine, then each beside other work."""
    found = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        async with Runtime(model, slots=NUM_SLOTS, ctx_size=CTX_SIZE, cache_dir=folder) as runtime:
            for machine in MACHINES:
                with _machine(machine):
                    await _settle(runtime, f"{seed} {machine}")
                    for crowd in CROWDS:
                        await asyncio.sleep(BETWEEN_S)
                        asked = crowd_of(crowd)
                        where = f"{seed} {machine} {crowd}"
                        async with _reader(runtime, where) if crowd == "both" else nullcontext():
                            asks = [_ask(runtime, one, f"{where} {at}") for at, one in enumerate(asked)]
                            answers = await asyncio.gather(*asks)
                        for one, told in zip(asked, answers, strict=True):
                            found += [
                                Estimate(crowd, machine, one.priority, at == 0, eta_s, admitted_s - at_s)
                                for at, (at_s, eta_s, admitted_s) in enumerate(told)
                            ]
    return found


@dataclass(frozen=True, slots=True)
class Honesty:
    """How many estimates of a kind were right."""

    machine: str
    priority: str
    when: str
    num_right: int
    num_estimates: int


def honesty(found: Iterable[Estimate]) -> list[Honesty]:
    """By machine, by class, and by whether it was told on arrival or while it waited."""
    kinds: dict[tuple[str, str, str], list[bool]] = {}
    for one in found:
        kind = (one.machine, one.priority, "on arrival" if one.is_first else "while waiting")
        kinds.setdefault(kind, []).append(one.is_right)
    return [Honesty(*kind, sum(rights), len(rights)) for kind, rights in sorted(kinds.items())]


async def measure(model: Path, seeds: range) -> list[Estimate]:
    """Every estimate of every repetition."""
    return [one for seed in seeds for one in await estimates(model, seed)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was right, as text or as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.eta_accuracy", description=__doc__)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--each", action="store_true", help="print every estimate")
    options = parser.parse_args(arguments)
    found = asyncio.run(measure(options.model, range(options.seed, options.seed + options.repeat)))
    if options.each:
        for one in found:
            eta = "none" if one.eta_s is None else f"{one.eta_s:.1f} s"
            first = "on arrival" if one.is_first else "waiting"
            word = "" if one.is_right else "  wrong"
            print(f"{one.machine} {one.crowd} {one.priority} {first}: {eta}, {one.real_s:.1f} s{word}")
    rows = honesty(found)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    for row in rows:
        kind = f"{row.machine}, {row.priority}, {row.when}"
        print(f"{kind}: {row.num_right} of {row.num_estimates} within a factor of {FACTOR:g}")
    right, total = sum(row.num_right for row in rows), sum(row.num_estimates for row in rows)
    print(f"all: {right} of {total}, {100 * right / total:.0f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
