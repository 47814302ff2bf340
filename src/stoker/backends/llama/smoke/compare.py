"""The program that proves an accelerator: a model's greedy tokens on it beside the CPU's.

    python -m stoker.backends.llama.smoke.compare MODEL.gguf --device CUDA0

prints `Likeness` as a line of JSON, or `error`. The CPU decides the tokens, and both are asked at each of
them, so that one near tie does not make all that follows another text. `compared` runs it in a child process:
a driver may crash, and its context goes with it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import llama_cpp  # noqa: F401 - before numpy: see `stoker.engine.process.load_native`
import msgspec
import numpy as np

from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.backends.threads import num_physical_cores
from stoker.errors import LoadCrashedError, ModelLoadError, StokerError
from stoker.ipc.model import NO_DEVICE, PlacementSpec
from stoker.native_crash import native_text, prepare_to_crash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.protocol.backend import Rows

NUM_TOKENS = 32
NUM_CELLS = 256
TIMEOUT_S = 300.0
PROMPT = "The capital of France is"


class Likeness(msgspec.Struct, frozen=True):
    """How much alike the rows of two ways to compute are.

    Attributes:
        num_tokens: rows that were compared.
        num_same: those whose greatest logit is the same token's.
        off: root mean square of the differences, by the spread (standard deviation) of the reference's rows.
    """

    MOST_OFF: ClassVar[float] = 0.25
    """What counts as the noise of floats. Kernels that add up in another order are off by 0.01 to 0.1, the
    more the fewer bits the weights have; rows that have nothing to do with each other by 1.4 or more."""

    num_tokens: int
    num_same: int
    off: float

    @classmethod
    def of(cls, reference: Rows, rows: Rows) -> Likeness:
        """Of rows of logits, one a token; those that are not finite are as far off as can be."""
        same = int((reference.argmax(axis=1) == rows.argmax(axis=1)).sum())
        if not np.isfinite(rows).all():
            return cls(len(rows), same, float(np.finfo(np.float32).max))
        error = np.sqrt(np.mean((rows - reference) ** 2, dtype=np.float64))
        return cls(len(rows), same, float(error / max(float(reference.std(axis=1).mean()), 1e-9)))

    @property
    def is_float_noise(self) -> bool:
        """Whether the differences are those of another order of adding up."""
        return self.off <= self.MOST_OFF


def rows_of(path: Path, placement: PlacementSpec, tokens: Sequence[int]) -> tuple[list[int], Rows]:
    """Token ids after the prompt, and the row of logits that each was drawn from.

    Args:
        path: of the model.
        placement: where it is computed.
        tokens: the ids to go on with; none: the greedy ones are chosen.

    Raises:
        StokerError: it cannot be loaded or computed so.
    """
    model = LlamaModel(ModelOptions(path=path, offloads=placement.has_devices, placement=placement))
    try:
        threads = num_physical_cores()
        context = LlamaContext(
            model, ContextOptions(num_cells=NUM_CELLS, n_batch=64, num_sequences=1, num_threads=threads)
        )
        try:
            prompt = model.vocabulary.tokenize(PROMPT, add_special=True, parse_special=False) or [0]
            return _greedy(context, prompt, tokens)
        finally:
            context.close()
    finally:
        model.close()


def _greedy(context: LlamaContext, prompt: list[int], tokens: Sequence[int]) -> tuple[list[int], Rows]:
    fed, start, ids, rows = prompt, 0, [], []
    for at in range(NUM_TOKENS):
        row = np.array(context.step(BatchPlan((PlanItem(0, start, fed, 1),)))[0])
        rows.append(row)
        ids.append(tokens[at] if tokens else int(row.argmax()))
        start, fed = start + len(fed), [ids[-1]]
    return ids, np.stack(rows)


def likeness_on(path: Path, placement: PlacementSpec) -> Likeness:
    """How alike the CPU and a placement compute a model. Raises StokerError."""
    ids, reference = rows_of(path, PlacementSpec(device=(NO_DEVICE,)), ())
    return Likeness.of(reference, rows_of(path, placement, ids)[1])


def compared(path: Path, device: str) -> Likeness:
    """How alike the CPU and a device, by its id, compute a model; in a child process.

    Raises:
        LoadCrashedError: the child died of native code, or took too long; the message quotes what it said.
        ModelLoadError: the model cannot be loaded or computed on one of them.
    """
    command = [sys.executable, "-P", "-m", "stoker.backends.llama.smoke.compare", str(path)]
    try:
        done = subprocess.run(
            [*command, "--device", device], capture_output=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise LoadCrashedError(f"{device} gave no {NUM_TOKENS} tokens within {TIMEOUT_S:g} s") from None
    try:
        said = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, Any])
        if "error" in said:
            raise ModelLoadError(f"{device}: {said['error']}")
        return msgspec.convert(said, Likeness)
    except (IndexError, msgspec.MsgspecError):
        text = f"{device}: computing ended with code {done.returncode}: {native_text(done.stderr)}"
        raise LoadCrashedError(text) from None


def main(arguments: list[str] | None = None) -> int:
    """Compare and print; the exit code is 0 whatever comes of it."""
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", required=True, help="its id")
    options = parser.parse_args(arguments)
    prepare_to_crash()
    try:
        found = msgspec.to_builtins(likeness_on(options.path, PlacementSpec(device=(options.device,))))
    except StokerError as error:
        found = {"error": error.message}
    print(msgspec.json.encode(found).decode())  # noqa: T201 - for the parent
    return 0


if __name__ == "__main__":
    sys.exit(main())
