"""What the library reaches without any server: llama-bench at one row, llama-batched-bench at several."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from bench.device.contestants import LIMIT
from bench.device.lines import Line
from bench.device.rows import PROMPT_WORDS, crowd_name
from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bench.device.contestants import Programs
    from bench.device.rows import Sizes

UNIFIED = "limit-unified"
"""With one pool of cells for all rows."""
CTX_A_ROW = 1024
TIME_LIMIT_S = 300.0
NUM_TAIL_CHARS = 500


def measure_limits(programs: Programs, model: Path, sizes: Sizes, round_: int) -> Iterator[Line]:
    """A line for each number of rows, with streams of cells and with one pool.

    Raises:
        BenchError: a program failed; the message carries the end of what it said.
    """
    if programs.bench is not None:
        command = [programs.bench, "-m", model, "-ngl", "99", "-p", "0", "-n", str(sizes.num_tokens)]
        for found in _documents([*command, "-r", "3", "-o", "jsonl"], programs):
            yield _line(model, LIMIT, 1, round_, float(found["avg_ts"]))
    if programs.batched_bench is not None:
        several = sorted(set(sizes.rows) - {1}) if programs.bench else sorted(sizes.rows)
        for server, flags in ((LIMIT, []), (UNIFIED, ["-kvu"])):
            for found in _documents([*_batched(programs, model, sizes, several), *flags], programs):
                yield _line(model, server, int(found["pl"]), round_, float(found["speed_tg"]))


def _batched(programs: Programs, model: Path, sizes: Sizes, rows: Sequence[int]) -> list[Any]:
    return [
        *(programs.batched_bench, "-m", model, "-ngl", "99", "-c", str(CTX_A_ROW * max(rows))),
        *("-b", "2048", "-ub", "512", "-npp", str(PROMPT_WORDS), "-ntg", str(sizes.num_tokens)),
        *("-npl", ",".join(map(str, rows)), "--output-format", "jsonl"),
    ]


def _line(model: Path, server: str, num_rows: int, round_: int, tokens_per_s: float) -> Line:
    values = {"tokens_per_s": tokens_per_s}
    return Line(model=model.name, server=server, row=crowd_name(num_rows), round=round_, values=values)


def _documents(command: Sequence[Any], programs: Programs) -> list[dict[str, Any]]:
    environment = {**os.environ, **programs.environment}
    try:
        answer = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"{command[0].name} took over {TIME_LIMIT_S:g} s") from None
    found = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    if answer.returncode != 0 or not found:
        said = (answer.stderr or answer.stdout)[-NUM_TAIL_CHARS:]
        raise BenchError(f"{command[0].name} ended with {answer.returncode}:\n{said}")
    return found
