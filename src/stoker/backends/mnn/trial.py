"""Whether MNN loads and computes a folder, found out in a child process (SPEC R9, K1).

    python -m stoker.backends.mnn.trial FOLDER --threads 2

is the child: it prints one line of JSON. MNN takes its files' word for what they hold, and a damaged one may
end the process that reads it. What went well is remembered for these files, this library and this CPU; what
did not is tried again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.backends.mnn.binding import library_version
from stoker.backends.mnn.folder import MnnFolder
from stoker.backends.threads import num_physical_cores
from stoker.backends.trial.children import run_child
from stoker.errors import LoadCrashedError, ModelLoadError, StokerError
from stoker.models.trials import cpu_identity, read_trials, write_trials
from stoker.native_crash import native_text, prepare_to_crash

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.ipc.model import ModelSpec

TRIAL_TIMEOUT_S = 300.0
MAX_LOAD_S = 8.0
"""MNN holds the interpreter's lock while it loads. An engine that is silent for `watchdog_s`, 10 s unless
set, is ended, and the tokens of other models wait meanwhile."""
MAX_STEP_S = 2.0
"""Likewise while it computes, before the planner knows what a step costs."""
MAX_REMEMBERED = 64
MEMORY_FILE = "mnn.json"
NUM_BATCH = 32
NUM_TIMED = 4


class Trial(msgspec.Struct, frozen=True):
    """What a child found.

    Attributes:
        load_s: seconds that the load took, its files in the page cache or not.
        batch_s: seconds that `NUM_BATCH` tokens of a prompt took.
        token_s: seconds that a token of an answer took.
        error: why it is not to be used; empty: it is.
    """

    load_s: float = 0.0
    batch_s: float = 0.0
    token_s: float = 0.0
    error: str = ""

    def step_tokens(self, most: int) -> int:
        """Tokens that a step may carry, up to `most`: a step stops the whole engine while it computes."""
        if not self.batch_s:
            return most
        return min(most, max(NUM_BATCH // 4, int(NUM_BATCH * MAX_STEP_S / self.batch_s)))


def tried(folder: MnnFolder, spec: ModelSpec, cache_dir: Path, on_wait: Callable[[], None]) -> Trial:
    """What a child found out about a folder, now or before.

    Args:
        folder: a sound one.
        spec: how many threads it is to have.
        cache_dir: where trials are remembered.
        on_wait: called several times a second meanwhile; what it raises ends the trial.

    Raises:
        LoadCrashedError: MNN crashed on it, or took too long; the message quotes what it said.
        ModelLoadError: MNN refuses it, computes nonsense, or takes so long to load that it would stop others.
        BackendUnavailableError: MNN is not installed.
    """
    num_threads = spec.num_threads or num_physical_cores()
    file = cache_dir / MEMORY_FILE
    key = _key(folder, num_threads)
    known = _known(file)
    found = known.get(key)
    if found is None:
        found = in_child(folder, num_threads, on_wait)
        kept = dict([*known.items(), (key, found)][-MAX_REMEMBERED:])
        write_trials(file, msgspec.to_builtins(kept))
    return found


def in_child(folder: MnnFolder, num_threads: int, on_wait: Callable[[], None] | None = None) -> Trial:
    """What a child finds out now. Raises as `tried`."""
    library_version()  # not installed: no child needs to say so
    command = [sys.executable, "-P", "-m", "stoker.backends.mnn.trial", str(folder.path)]
    command += ["--threads", str(num_threads)]
    try:
        done = run_child(command, on_wait or _go_on, TRIAL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        text = f"{folder.path}: a trial load took more than {TRIAL_TIMEOUT_S:g} s"
        raise LoadCrashedError(text, path=str(folder.path)) from None
    if done.returncode:
        raise LoadCrashedError(_crash_text(folder.path, done), path=str(folder.path))
    try:
        found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Trial)
    except (IndexError, msgspec.MsgspecError):
        text = f"{folder.path}: a trial load said nothing: {native_text(done.stderr)}"
        raise LoadCrashedError(text, path=str(folder.path)) from None
    if found.error:
        said = native_text(done.stdout.rpartition(b"{")[0] + done.stderr)
        raise ModelLoadError(f"{found.error}{f': {said}' if said else ''}", path=str(folder.path))
    if found.load_s > MAX_LOAD_S:
        raise ModelLoadError(
            f"{folder.path}: MNN takes {found.load_s:.1f} s to load it, during which nothing else in the"
            f" engine runs; {MAX_LOAD_S:g} s are borne",
            path=str(folder.path),
            load_s=found.load_s,
        )
    return found


def _crash_text(path: Path, done: subprocess.CompletedProcess[bytes]) -> str:
    number = -done.returncode
    is_signal = number in set(signal.Signals)
    how = f"died of {signal.Signals(number).name}" if is_signal else f"ended with code {done.returncode}"
    said = native_text(done.stderr)
    return f"{path}: a trial load by MNN {how}{f': {said}' if said else ''}"


def _go_on() -> None:
    """No reason to end the trial early."""


def _key(folder: MnnFolder, num_threads: int) -> str:
    parts = (folder.fingerprint, library_version(), cpu_identity(), num_threads)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _known(file: Path) -> dict[str, Trial]:
    """What is remembered and can be read."""
    try:
        return msgspec.convert(read_trials(file), dict[str, Trial])
    except msgspec.ValidationError:
        return {}


def try_here(path: Path, num_threads: int) -> Trial:
    """Load and compute a folder in this process. Raises StokerError."""
    from stoker.backends.mnn.backend import load  # noqa: PLC0415 - the parent loads nothing
    from stoker.backends.protocol.backend import BatchPlan, PlanItem  # noqa: PLC0415
    from stoker.ipc.model import ModelSpec  # noqa: PLC0415

    begun = time.perf_counter()
    spec = ModelSpec(id=path.name, path=str(path), num_slots=1, num_threads=num_threads, n_ctx=256)
    backend = load(MnnFolder.open(path), spec)
    load_s = time.perf_counter() - begun
    tokens, took_s, batch_s = [at % 2 for at in range(NUM_BATCH)], 0.0, 0.0
    for number in range(1 + NUM_TIMED):
        begun = time.perf_counter()
        rows = backend.launch(BatchPlan((PlanItem(0, backend.length(0), tokens, 1),))).rows()
        spent_s = time.perf_counter() - begun
        batch_s, took_s = (batch_s, took_s + spent_s) if number else (spent_s, 0.0)
        if not (abs(rows) < float("inf")).all():
            raise ModelLoadError(f"{path}: it computes logits that are not finite", path=str(path))
        tokens = [1]
    backend.close()
    return Trial(load_s=load_s, batch_s=batch_s, token_s=took_s / NUM_TIMED)


def main(arguments: list[str] | None = None) -> int:
    """Try and print; the exit code is 0 whatever comes of it."""
    parser = argparse.ArgumentParser(prog="trial", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    prepare_to_crash()
    found: Any
    try:
        found = try_here(options.path, options.threads)
    except StokerError as error:
        found = Trial(error=error.message)
    print(json.dumps(msgspec.to_builtins(found)), flush=True)  # noqa: T201 - for the parent
    return 0


if __name__ == "__main__":
    sys.exit(main())
