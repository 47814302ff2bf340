"""Whether a backend whose libraries are optional computes a kind of model here (docs/adr/0032).

A child process (`child`) loads the model and decodes a few tokens: if native code ends it, or it computes
nonsense, the backend cannot serve such models here, and the next way to serve them is taken. What was found
is remembered for these libraries, this machine and the model's architecture and element types; a refusal,
such as for want of memory, is not. llama.cpp has trials of its own (`llama.smoke`), which also find how a
model is to be loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import platformdirs

from stoker.backends.trial.children import run_child
from stoker.errors import ErrorInfo, error_from_info
from stoker.ipc.model import Repeatable, Speculation
from stoker.models.trials import TRIALS_FILE, cpu_identity, read_trials, write_trials
from stoker.native_crash import native_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.registry import BackendEntry
    from stoker.ipc.model import ModelSpec
    from stoker.models.reader import LoadContext, ModelDescription

TRIAL_TIMEOUT_S = 300.0
MAX_DETAIL_CHARS = 500
TRIAL_CELLS = 256
_logger = logging.getLogger(__name__)

_OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE})
"""Signals that native code brings upon itself; SIGKILL, say, may be the machine's want of memory."""


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """What a trial found.

    Attributes:
        is_ok: it loaded the model, and its logits are finite numbers.
        detail: why not.
        label: what computed, such as "MLX · CPU".
        token_s: what the token after the first ones took.
        took_s: the whole trial, with the child's start.
        is_lasting: it is due to libraries and machine, not to the moment.
    """

    is_ok: bool
    detail: str = ""
    label: str = ""
    token_s: float = 0.0
    took_s: float = 0.0
    is_lasting: bool = True


def library_versions(entry: BackendEntry) -> dict[str, str]:
    """The versions of the libraries that a backend needs, empty for one that is not installed."""
    return {name: _version(name) for name in entry.needs}


def remembered(entry: BackendEntry, found: ModelDescription, cache_dir: Path | None) -> TrialVerdict | None:
    """What an earlier trial of such a model found here; None: there was none."""
    known = read_trials(_file(cache_dir)).get(_key(entry, found))
    try:
        return msgspec.convert(known, TrialVerdict)
    except msgspec.ValidationError:
        return None


def prove(
    entry: BackendEntry,
    spec: ModelSpec,
    found: ModelDescription,
    context: LoadContext,
    *,
    is_suspect: bool = False,
) -> None:
    """Have a child compute a model of this kind, where none is remembered to have done so.

    A suspect, which has ended an engine, is tried in any case.

    Raises:
        BackendUnavailableError: it cannot; the message says why.
        StokerError: what the load in the child was refused with.
    """
    if not entry.needs or entry.has_own_trial:
        return
    known = None if is_suspect else remembered(entry, found, context.cache_dir)
    verdict = known or try_in_child(entry, spec, found, context)
    if not verdict.is_ok:
        raise entry.unavailable(f"its trial failed: {verdict.detail}")


def try_in_child(
    entry: BackendEntry, spec: ModelSpec, found: ModelDescription, context: LoadContext
) -> TrialVerdict:
    """A trial now, whatever is remembered; its verdict is remembered where it lasts.

    Raises:
        StokerError: what the load in the child was refused with.
    """
    began_s = time.monotonic()
    verdict = _run(entry, spec, lambda: context.on_progress(0.0))
    took_s = round(time.monotonic() - began_s, 3)
    verdict = replace(verdict, took_s=took_s)
    if not verdict.is_ok:
        _logger.warning("trial of %s with %s: %s", entry.name, spec.path, verdict.detail)
    if verdict.is_lasting:
        file = _file(context.cache_dir)
        write_trials(file, {**read_trials(file), _key(entry, found): asdict(verdict)})
    return verdict


def _run(entry: BackendEntry, spec: ModelSpec, on_wait: Callable[[], None]) -> TrialVerdict:
    command = [sys.executable, "-P", "-m", "stoker.backends.trial.child", entry.module]
    command.append(msgspec.json.encode(trial_spec(spec)).decode())
    try:
        done = run_child(command, on_wait, TRIAL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return TrialVerdict(False, f"it took more than {TRIAL_TIMEOUT_S:g} s", is_lasting=False)
    said = native_text(done.stderr)
    if done.returncode < 0:
        number = -done.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return TrialVerdict(
            False, f"it died of {name}{f': {said}' if said else ''}", is_lasting=number in _OWN_SIGNALS
        )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        error = msgspec.convert(answer["error"], ErrorInfo | None)
        verdict = TrialVerdict(
            is_ok=not answer["detail"],
            detail=answer["detail"][:MAX_DETAIL_CHARS],
            label=answer["label"],
            token_s=answer["token_s"],
        )
    except (IndexError, KeyError, TypeError, ValueError):
        return TrialVerdict(False, f"it ended with code {done.returncode}: {said}", is_lasting=False)
    if error is not None:
        raise error_from_info(error)
    return verdict


def trial_spec(spec: ModelSpec) -> ModelSpec:
    """The model alone, with as little as a few tokens take."""
    return msgspec.structs.replace(
        spec,
        fallbacks=(),
        num_slots=1,
        n_ctx=TRIAL_CELLS,
        num_cells=0,
        adapters=(),
        projector=None,
        draft_path="",
        chat_template=None,
        speculation=Speculation.OFF,
        repeatable=Repeatable.OFF,
    )


def _version(name: str) -> str:
    """Of a library, by its package's metadata; the age of its folder where there is none."""
    spec = find_spec(name)
    if spec is None:
        return ""
    try:
        return version(name.replace("_", "-"))
    except PackageNotFoundError:
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        return str(Path(places[0]).stat().st_mtime_ns) if places else "?"


def _key(entry: BackendEntry, found: ModelDescription) -> str:
    """Digest of what decides whether native code works: libraries, machine, kind of model."""
    kind = (found.architecture, str(found.model_class), found.quantisation)
    parts = (entry.name, sorted(library_versions(entry).items()), cpu_identity(), sys.platform, kind)
    return f"{entry.name}:" + hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _file(cache_dir: Path | None) -> Path:
    return (cache_dir or Path(platformdirs.user_cache_dir("stoker"))) / TRIALS_FILE
