"""Whether steps of changing shapes are sound on this machine's GPU with captured CUDA graphs (docs/adr/0028).

Computes steps of a number of rows that goes down at random, and looks for logits that are not finite; then
how long a step of 1, 8 and 64 rows takes where the shape stays. With captured graphs that are marked, as
Stoker computes; with captured ones as the library has them; and without: each in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

import llama_cpp  # noqa: F401 - before numpy: see `stoker.engine.process.load_native`
import numpy as np

from stoker.backends.llama import binding
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem

NUM_STREAMS, NUM_CELLS = 64, 1024
FIRST_TOKENS = 40
FEWEST = 6
NEW_TEXT_EVERY = 600
CHANGES = 0.5
"""How often a step has fewer rows than the one before."""
WAYS = (
    ("captured and marked", "marked", "1"),
    ("captured", "plain", "1"),
    ("not captured", "marked", "0"),
)
STEADY_ROWS, STEADY_STEPS, WARM_STEPS = (1, 8, 64), 40, 8


def _step(context: LlamaContext, num_rows: int, *, has_marks: bool) -> tuple[float, bool]:
    """Seconds of a step of so many streams' next tokens, and whether its logits are finite."""
    items = [
        PlanItem(seq, context.lengths[seq], (7,), 1, takes_candidates=has_marks) for seq in range(num_rows)
    ]
    begun_s = time.perf_counter()
    step = context.launch(BatchPlan(tuple(items)))
    rows = step.rows()
    if has_marks:
        rows = step.candidates().logits
    took_s = time.perf_counter() - begun_s
    return took_s, bool(np.isfinite(rows.max(axis=1)).all())


def _fill(context: LlamaContext, random: Random) -> None:
    """Every stream anew with a text of its own."""
    for seq in range(NUM_STREAMS):
        context.drop(seq)
        tokens = [random.randrange(5, 200) for _ in range(FIRST_TOKENS + seq % 7)]
        context.step(BatchPlan((PlanItem(seq, 0, tokens, 1),)))


def measure(path: Path, num_steps: int, *, has_marks: bool) -> str:
    """A line about one way; marks come with draws on the device."""
    random, num_rows, num_bad, first_bad = Random(3), NUM_STREAMS, 0, ""
    model = LlamaModel(ModelOptions(path=path))
    context = LlamaContext(
        model,
        ContextOptions(
            num_cells=NUM_CELLS,
            n_batch=2048,
            n_ubatch=512,
            num_sequences=NUM_STREAMS,
            num_threads=os.cpu_count() or 1,
            has_streams=True,
            draws=has_marks,
            is_marked=has_marks,
        ),
    )
    _fill(context, random)
    for step in range(num_steps):
        if step % NEW_TEXT_EVERY == NEW_TEXT_EVERY - 1:
            _fill(context, random)
        if random.random() < CHANGES:
            num_rows -= random.randrange(4)
        if num_rows < FEWEST:
            num_rows = random.randrange(20, NUM_STREAMS + 1)
        _, is_sound = _step(context, num_rows, has_marks=has_marks)
        if not is_sound:
            num_bad += 1
            first_bad = first_bad or f", the first at step {step} of {num_rows} rows"
    _fill(context, random)
    steady = []
    for rows in STEADY_ROWS:
        took_s = [_step(context, rows, has_marks=has_marks)[0] for _ in range(STEADY_STEPS)]
        steady.append(f"{rows}: {median(took_s[WARM_STEPS:]) * 1000:.2f} ms")
    name = binding.label(model.devices)
    context.close()
    model.close()
    return f"{name}: {num_bad} of {num_steps} steps not finite{first_bad}; {', '.join(steady)}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.captured_graphs", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--one-way", choices=["marked", "plain"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one_way:
        print(measure(asked.model, asked.steps, has_marks=asked.one_way == "marked"))
        return
    for name, way, value in WAYS:
        command = [
            sys.executable,
            "-m",
            "bench.captured_graphs",
            "--one-way",
            way,
            "--model",
            str(asked.model),
        ]
        environment = {**os.environ, "STOKER_CUDA_GRAPHS": value}
        done = subprocess.run(
            [*command, "--steps", str(asked.steps)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        print(f"{name}: {done.stdout.strip()}")


if __name__ == "__main__":
    main()
