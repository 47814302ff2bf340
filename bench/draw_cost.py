"""What it costs to find the largest logits of a step's rows on the device, and whether they are the largest.

The rows of one and the same graph are compared with what it left of them; then steps of one token a sequence
are timed in three ways, each with its draws: whole rows, candidates drawn greedily, candidates sampled.

    python -m bench.draw_cost --model FILE [--rows 64] [--steps 50] [--tokens 100] [--streams] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.errors import BenchError
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import StokerError
from stoker.ipc.request import Sampling
from stoker.sampling.sampler import Sampler
from stoker.sampling.together import draw_together
from stoker.sampling.truncation import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.backends.protocol.backend import InFlight


@dataclass(frozen=True)
class Way:
    """One way to draw a step's tokens: medians of a step, in ms.

    Attributes:
        launch_ms: the native call, on the host.
        wait_ms: until rows or candidates are here.
        draw_ms: the draws.
    """

    name: str
    launch_ms: float
    wait_ms: float
    draw_ms: float

    @property
    def step_ms(self) -> float:
        """All three."""
        return self.launch_ms + self.wait_ms + self.draw_ms


@dataclass(frozen=True)
class Shape:
    """What is measured: sequences of so many tokens each, one token of each a step."""

    rows: int
    steps: int
    tokens: int
    streams: bool


def options_of(shape: Shape, *, draws: bool) -> ContextOptions:
    """A context with cells for all of it."""
    cells = shape.tokens + shape.steps + 8
    return ContextOptions(
        num_cells=cells if shape.streams else cells * shape.rows,
        n_batch=max(512, shape.rows),
        num_sequences=shape.rows,
        num_threads=1,
        has_streams=shape.streams,
        draws=draws,
    )


def prompted(context: LlamaContext, shape: Shape) -> None:
    """Give every sequence its tokens, each its own."""
    for seq in range(shape.rows):
        for begin in range(0, shape.tokens, 256):
            end = min(begin + 256, shape.tokens)
            text = tuple(3 + (seq * 7 + at) % 200 for at in range(begin, end))
            context.step(BatchPlan((PlanItem(seq, begin, text, 0),)))


def check(context: LlamaContext, shape: Shape) -> None:
    """Compare candidates with the whole rows of the same graph. Raises BenchError."""
    draws = context.draws
    if draws is None:
        raise BenchError("the candidates were not right at load; rows are read whole")
    items = tuple(PlanItem(seq, shape.tokens, (5,), 1, True) for seq in range(shape.rows))
    with draws.probing():
        context.step(BatchPlan(items))
        is_right = context.handle is not None and draws.is_right(context.handle, shape.rows)
    for item in items:
        context.trim(item.seq, item.start)
    draws.failed()  # the graph with both is not used again
    if not is_right:
        raise BenchError(f"the candidates of {shape.rows} rows are not their largest logits")


def timed(
    context: LlamaContext, shape: Shape, name: str, draw: Callable[[InFlight], Sequence[int]], *, takes: bool
) -> tuple[Way, list[list[int]]]:
    """Steps of one token a sequence, from its prompt on; and what was drawn in each."""
    times: list[tuple[float, float, float]] = []
    drawn: list[list[int]] = []
    tokens = [5] * shape.rows
    for step in range(shape.steps):
        start = shape.tokens + step
        items = tuple(PlanItem(seq, start, (token,), 1, takes) for seq, token in enumerate(tokens))
        began_s = time.perf_counter()
        in_flight = context.launch(BatchPlan(items))
        launched_s = time.perf_counter()
        in_flight.rows()
        there_s = time.perf_counter()
        tokens = list(draw(in_flight))
        times.append((launched_s - began_s, there_s - launched_s, time.perf_counter() - there_s))
        drawn.append(tokens)
    for seq in range(shape.rows):
        context.trim(seq, shape.tokens)
    return Way(name, *(1e3 * median(each) for each in zip(*times, strict=True))), drawn


def drawing(kind: Sampling, num_vocab: int, rows: int) -> Callable[[InFlight], list[int]]:
    """Draws a step's tokens from candidates."""
    workspace = Workspace(num_vocab)
    samplers = [Sampler(kind, seq, [], workspace) for seq in range(rows)]

    def draw(in_flight: InFlight) -> list[int]:
        tokens = draw_together(samplers, in_flight.candidates(), workspace)
        return [token for token in tokens if isinstance(token, int)]

    return draw


def measure(path: Path, shape: Shape) -> tuple[list[Way], int]:
    """The ways, and how many of the greedy steps drew the same ids from candidates as from whole rows.

    On a device two contexts need not give the same logits to the bit, so texts may part; `check` compares
    what does not depend on it.
    """
    with ExitStack() as opened:
        model = LlamaModel(ModelOptions(path=path))
        opened.callback(model.close)
        num_vocab = model.vocabulary.n_vocab
        ways, found = [], []
        for draws in (False, True):
            context = LlamaContext(model, options_of(shape, draws=draws))
            opened.callback(context.close)
            prompted(context, shape)
            if not draws:
                timed(context, replace(shape, steps=min(5, shape.steps)), "", _best, takes=False)
                way, drawn = timed(context, shape, "whole rows, greedy", _best, takes=False)
                ways, found = [way], [drawn]
                continue
            check(context, shape)
            for name, kind in (("greedy", Sampling(temperature=0.0)), ("sampled", Sampling(seed=1))):
                draw = drawing(kind, num_vocab, shape.rows)
                timed(context, replace(shape, steps=min(5, shape.steps)), "", draw, takes=True)
                way, drawn = timed(context, shape, f"candidates, {name}", draw, takes=True)
                ways.append(way)
                found.append(drawn)
    return ways, sum(whole == best for whole, best in zip(*found[:2], strict=True))


def _best(in_flight: InFlight) -> list[int]:
    best: list[int] = in_flight.rows().argmax(axis=1).tolist()
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ways, as text or as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.draw_cost", description=__doc__)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=100, help="of each sequence before the first step")
    parser.add_argument("--streams", action="store_true", help="cells of its own for each sequence")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if min(options.rows, options.steps, options.tokens) < 1:
        parser.error("--rows, --steps and --tokens are at least 1")
    shape = Shape(options.rows, options.steps, options.tokens, options.streams)
    try:
        ways, num_equal = measure(options.model, shape)
    except (BenchError, StokerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"ways": [asdict(way) for way in ways], "equal_steps": num_equal}))
        return 0
    print(f"the candidates of {shape.rows} rows are their largest logits")
    for way in ways:
        print(
            f"{way.name}: {way.step_ms:.2f} ms a step "
            f"(launch {way.launch_ms:.2f}, wait {way.wait_ms:.2f}, draws {way.draw_ms:.3f})"
        )
    print(f"{num_equal} of {shape.steps} greedy steps drew the ids of whole rows, in another context")
    return 0


if __name__ == "__main__":
    sys.exit(main())
