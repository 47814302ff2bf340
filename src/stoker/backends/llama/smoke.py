"""Whether the native library works on this machine, found out where a crash does no harm (SPEC R9).

A build may crash in its first decode, e.g. where the compiler spoilt the CPU's matrix instructions. So a
child process (`trial`) decodes a few tokens; if it dies, another one tries without repacked weights, which
keeps clear of those instructions. What was found is remembered for this build, this CPU and the model's
architecture and element types.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.backends.llama.binding import LIBRARY_DIR, LIBRARY_VERSION
from stoker.models.gguf import read_header

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.models.gguf import GgufHeader

TRIAL_TIMEOUT_S = 300.0
ASK_EVERY_S = 0.1
VERDICT_FILE = "smoke.json"
MAX_DETAIL_CHARS = 500

_logger = logging.getLogger(__name__)

# Signals that native code brings upon itself; SIGKILL, say, may be the machine's want of memory.
_CRASH_SIGNALS = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE")
    if hasattr(signal, name)
)


class SmokeSetting(StrEnum):
    """What works: everything, everything but repacked weights, or nothing."""

    OK = "ok"
    NO_EXTRA_BUFTS = "no_extra_bufts"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class SmokeVerdict:
    """What a trial found.

    Attributes:
        setting: how models of these element types can be loaded.
        detail: why it is not `ok`; empty if it is.
        label: what computes, for people; empty if nothing does.
    """

    setting: SmokeSetting
    detail: str
    label: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How one child ended; `is_telling` where that is due to build and CPU, not to the moment."""

    is_ok: bool
    is_refusal: bool
    is_telling: bool
    detail: str
    label: str = ""


def verdict_for(path: Path, cache_dir: Path) -> SmokeVerdict:
    """The verdict for a model file, remembered or found now (seconds, the first time).

    Raises:
        ModelFileError, UnsupportedError: the file is no model to try.
    """
    return verdict_of(read_header(path), cache_dir)


def verdict_of(
    header: GgufHeader, cache_dir: Path, on_wait: Callable[[], None] | None = None
) -> SmokeVerdict:
    """Like `verdict_for`, for a header that was read already.

    `on_wait` is called several times a second while a child tries; what it raises ends the trial.
    """
    file = cache_dir / VERDICT_FILE
    key = _key(header)
    known = _read(file)
    verdict = _decoded(known.get(key))
    if verdict is not None:
        return verdict
    verdict, is_lasting = _try_settings(header.path, on_wait or _wait_on)
    if verdict.setting is not SmokeSetting.OK:
        _logger.warning("smoke decode of %s: %s: %s", header.path.name, verdict.setting, verdict.detail)
    if is_lasting:
        _write(file, {**_read(file), key: asdict(verdict)})
    return verdict


def _wait_on() -> None:
    """Nobody wants the trial to end early."""


def _try_settings(path: Path, on_wait: Callable[[], None]) -> tuple[SmokeVerdict, bool]:
    """The verdict, and whether it lasts: not if a child was killed from outside or took too long."""
    full = _run_trial(path, "on", on_wait)
    if full.is_ok:
        return SmokeVerdict(SmokeSetting.OK, "", full.label), True
    if full.is_refusal:
        return SmokeVerdict(SmokeSetting.BROKEN, full.detail, full.label), False
    safe = _run_trial(path, "off", on_wait)
    if safe.is_ok:
        return SmokeVerdict(SmokeSetting.NO_EXTRA_BUFTS, full.detail, safe.label), full.is_telling
    return SmokeVerdict(SmokeSetting.BROKEN, f"{full.detail}; without repacking: {safe.detail}", ""), False


def _run_trial(path: Path, extra_bufts: str, on_wait: Callable[[], None]) -> _Outcome:
    command = [sys.executable, "-m", "stoker.backends.llama.trial", str(path), "--extra-bufts", extra_bufts]
    try:
        done = _run(command, on_wait)
    except subprocess.TimeoutExpired:
        return _failed(f"a trial decode took more than {TRIAL_TIMEOUT_S:g} s", is_telling=False)
    if done.returncode < 0:
        number = -done.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return _failed(f"a trial decode died of {name}", is_telling=number in _CRASH_SIGNALS)
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        return _Outcome(
            is_ok=said["outcome"] == "ok",
            is_refusal=said["outcome"] == "refused",
            is_telling=True,
            detail=said["detail"][:MAX_DETAIL_CHARS],
            label=said["label"],
        )
    except (IndexError, KeyError, TypeError, ValueError):
        text = done.stderr.decode(errors="replace").strip()[-MAX_DETAIL_CHARS:]
        return _failed(f"a trial decode ended with code {done.returncode}: {text}", is_telling=False)


def _run(command: list[str], on_wait: Callable[[], None]) -> subprocess.CompletedProcess[bytes]:
    """`subprocess.run` that asks now and then whether to go on; the child never outlives it."""
    until_s = time.monotonic() + TRIAL_TIMEOUT_S
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as child:
        try:
            while True:
                try:
                    output, errors = child.communicate(timeout=ASK_EVERY_S)
                    return subprocess.CompletedProcess(command, child.returncode, output, errors)
                except subprocess.TimeoutExpired:
                    if time.monotonic() > until_s:
                        raise
                on_wait()
        except BaseException:
            child.kill()
            raise


def _failed(detail: str, *, is_telling: bool) -> _Outcome:
    return _Outcome(is_ok=False, is_refusal=False, is_telling=is_telling, detail=detail)


def _key(header: GgufHeader) -> str:
    """Digest of what decides whether native code works: the library's files, the CPU, the element types."""
    files = sorted(
        (file.name, stat.st_size, stat.st_mtime_ns)
        for file in LIBRARY_DIR.iterdir()
        if (stat := file.stat()) and not file.is_dir()
    )
    parts = (LIBRARY_VERSION, files, _cpu(), sorted(header.tensor_types), header.architecture)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _cpu() -> tuple[str, ...]:
    """Model and instruction sets of the first CPU as Linux names them; elsewhere what Python knows."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        return platform.machine(), platform.processor()
    lines = (line.partition(":") for line in first.splitlines())
    values = {name.strip().lower(): value.strip() for name, _, value in lines}
    names = ("vendor_id", "model name", "cpu part", "flags", "features")
    return platform.machine(), *(values.get(name, "") for name in names)


def _read(file: Path) -> dict[str, Any]:
    """What is remembered; nothing if the file is missing or damaged."""
    try:
        known = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _decoded(value: Any) -> SmokeVerdict | None:
    match value:
        case {"setting": str(setting), "detail": str(detail), "label": str(label)}:
            with suppress(ValueError):
                return SmokeVerdict(SmokeSetting(setting), detail, label)
    return None


def _write(file: Path, known: dict[str, Any]) -> None:
    """Replace the file in one move, readable by its owner alone; where that fails nothing is kept."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w") as stream:
                json.dump(known, stream, indent=1)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _logger.warning("the smoke verdict could not be kept in %s: %s", file, error)
