"""What a step on MLX costs: of many rows against one, against mlx-lm's own batches, and what a guest waits.

All is told as ratios of figures that were taken in turns, as other processes share the cores:

- tokens a second of a step of many rows over those of one row;
- the same step over a step of mlx-lm's `BatchGenerator` with the same prompts;
- the first token of an interactive request beside background ones over that of one alone, through an engine.

    python -m bench.mlx_steps --model FOLDER [--rows 8] [--steps 30] [--tokens 128] [--threads 1]
        [--cpu-time] [--no-engine] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model

from bench.errors import BenchError
from stoker.backends.mlx.model import load_backend
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import StokerError
from stoker.ipc.model import ModelSpec
from stoker.models.folders.folder import ModelFolder
from stoker.models.reader import LoadContext
from stoker.sync import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.mlx.backend import MlxBackend

_TURN = 5
"""Steps that one side takes before it is the other's turn."""
_GUESTS = 5
_SLOTS = 4
_BACKGROUND_TOKENS = 400


@dataclass(frozen=True)
class Shape:
    """What is measured: sequences of so many tokens each, and steps of one token of each."""

    rows: int
    steps: int
    tokens: int
    threads: int
    clock: Callable[[], float]

    def prompts(self) -> list[list[int]]:
        """A prompt for each row, of lengths that differ."""
        lengths = [max(2, self.tokens - 3 * row) for row in range(self.rows)]
        return [[3 + (seq * 7 + at) % 200 for at in range(length)] for seq, length in enumerate(lengths)]


@dataclass(frozen=True)
class Figures:
    """What was found; times are medians of a step in milliseconds.

    Attributes:
        batch_gain: tokens a second of all rows over those of one.
        over_mlx_lm: a step of all rows over one of mlx-lm's.
        guest_times: an interactive first token beside background requests over one alone; None: not measured.
    """

    one_ms: float
    rows_ms: float
    mlx_lm_ms: float
    batch_gain: float
    over_mlx_lm: float
    guest_times: float | None


class _Ours:
    """Steps of our own."""

    def __init__(self, backend: MlxBackend, prompts: list[list[int]], first: int) -> None:
        self._backend = backend
        self._seqs = range(first, first + len(prompts))
        self._last = [5] * len(prompts)
        for seq, prompt in zip(self._seqs, prompts, strict=True):
            backend.launch(BatchPlan((PlanItem(seq, 0, prompt, 0),))).rows()

    def step(self) -> None:
        """One token of each."""
        items = tuple(
            PlanItem(seq, self._backend.length(seq), (token,), 1)
            for seq, token in zip(self._seqs, self._last, strict=True)
        )
        rows = self._backend.launch(BatchPlan(items, is_rows=True)).rows()
        self._last = [int(token) for token in rows.argmax(axis=1)]


class _Theirs:
    """Steps of mlx-lm's own generator."""

    def __init__(self, module: Any, prompts: list[list[int]], steps: int) -> None:
        self._generator = BatchGenerator(module, max_tokens=4 * steps, completion_batch_size=len(prompts))
        self._generator.insert(prompts)
        self._num_rows = len(prompts)
        while len(self.step()) < self._num_rows:
            pass

    def step(self) -> list[Any]:
        """One token of each."""
        return list(self._generator.next_generated())

    def close(self) -> None:
        """Free its batch."""
        self._generator.close()


def measure_steps(folder: Path, shape: Shape) -> tuple[float, float, float]:
    """Milliseconds of a step of one row, of all rows, and of all rows by mlx-lm."""
    spec = ModelSpec(
        id="m",
        path=str(folder),
        num_slots=shape.rows + 1,
        num_cells=(shape.rows + 1) * (shape.tokens + 4 * shape.steps),
        n_batch=max(512, shape.tokens),
        num_threads=shape.threads,
    )
    backend = load_backend(ModelFolder.open(folder), spec, LoadContext(lambda _: None))
    module, _ = load_model(folder)
    prompts = shape.prompts()
    theirs = _Theirs(module, prompts, shape.steps + _TURN)
    sides: tuple[_Ours | _Theirs, ...] = (_Ours(backend, prompts[:1], 0), _Ours(backend, prompts, 1), theirs)
    times: tuple[list[float], ...] = ([], [], [])
    for _ in range(-(-shape.steps // _TURN)):
        for side, taken in zip(sides, times, strict=True):
            side.step()  # what moves between turns is not a step's
            for _ in range(_TURN):
                began_s = shape.clock()
                side.step()
                taken.append(1e3 * (shape.clock() - began_s))
    theirs.close()
    backend.close()
    one, rows, other = (median(each) for each in times)
    return one, rows, other


def measure_guests(folder: Path, shape: Shape) -> float:
    """An interactive first token beside background requests over one alone, medians."""
    with (
        tempfile.TemporaryDirectory() as cache,
        Runtime(str(folder), cache_dir=cache, slots=_SLOTS, threads=shape.threads) as runtime,
    ):
        _first_token_s(runtime, -1)
        alone = median(_first_token_s(runtime, number) for number in range(_GUESTS))
        crowd = [
            runtime.generate(
                f"Story number {number}: ",
                max_tokens=_BACKGROUND_TOKENS,
                priority="background",
                temperature=0.0,
            )
            for number in range(shape.rows)
        ]
        next(iter(crowd[0]))
        beside = median(_first_token_s(runtime, _GUESTS + number) for number in range(_GUESTS))
    return beside / alone


def _first_token_s(runtime: Runtime, number: int) -> float:
    began_s = time.perf_counter()
    stream = runtime.generate(
        f"{number}. " + "A sentence of some words. " * 12, max_tokens=4, temperature=0.0
    )
    next(iter(stream))
    found = time.perf_counter() - began_s
    for _ in stream:
        pass
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder of config.json and safetensors")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="1 is steady where cores are shared")
    parser.add_argument("--cpu-time", action="store_true", help="of steps, where others take the cores too")
    parser.add_argument("--no-engine", action="store_true", help="leave the first tokens out")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    shape = Shape(given.rows, given.steps, given.tokens, given.threads, clock)
    try:
        one, rows, other = measure_steps(given.model, shape)
        guests = None if given.no_engine else measure_guests(given.model, shape)
    except (StokerError, BenchError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    found = Figures(one, rows, other, shape.rows * one / rows, rows / other, guests)
    sys.stdout.write(json.dumps(asdict(found)) + "\n" if given.json else _text(found, shape))
    return 0


def _text(found: Figures, shape: Shape) -> str:
    rows, theirs = f"{shape.rows} rows", f"by mlx-lm {found.mlx_lm_ms:.1f}"
    lines = [
        f"a step of one row {found.one_ms:.1f} ms, of {rows} {found.rows_ms:.1f}, {theirs}",
        f"{rows} have {found.batch_gain:.2f} times the tokens a second of one",
        f"our step takes {found.over_mlx_lm:.3f} times that of mlx-lm's BatchGenerator",
    ]
    if found.guest_times is not None:
        beside = f"beside {shape.rows} background requests"
        lines.append(f"a first token {beside} takes {found.guest_times:.2f} times as long")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
