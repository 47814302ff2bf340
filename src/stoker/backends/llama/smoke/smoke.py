"""Whether the native library works on this machine, found out where a crash does no harm (SPEC R9).

A build may crash in its first decode, e.g. where the compiler spoilt the CPU's matrix instructions. So a
child process (`trial`) decodes a few tokens; if it dies, another one tries without repacked weights, which
keeps clear of those instructions, and where there is an accelerator others without it. What was found is
remembered for this build, these devices and the model's architecture and element types; for a file whose load
has ended an engine, which is tried itself, for that file. A file is opened as its trial has shown to be safe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import platformdirs

from stoker.backends.llama.binding import LIBRARY_DIR, LIBRARY_VERSION, accelerators
from stoker.backends.llama.model import ModelOptions
from stoker.backends.llama.smoke.key_cost import MOST_COST, KeyCost
from stoker.backends.trial.children import run_child
from stoker.errors import ErrorInfo, LoadCrashedError, ModelLoadError, error_from_info
from stoker.ipc.model import ANYWHERE, FlashAttention, ModelClass, PlacementSpec, Repeatable
from stoker.models.gguf.header import read_header
from stoker.models.gguf.tensor_types import ROW_BY_ROW
from stoker.models.placement import chosen_devices
from stoker.models.trials import TRIALS_FILE, cpu_identity, read_trials, write_trials
from stoker.native_crash import native_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.ipc.model import ModelSpec
    from stoker.models.gguf.header import GgufHeader

    OnProgress = Callable[[float], None]

TRIAL_TIMEOUT_S = 300.0
MAX_DETAIL_CHARS = 500
TOKEN_TIME = ("--timed", "8")
"""Has a trial measure what a token takes, in the median of so many."""
KEY_COST = ("--key-cost",)
"""Has it measure what repeatable texts cost."""
MAX_FILE_VERDICTS = 64
"""Files that are remembered by themselves; past this the oldest is forgotten."""
_FILE_KEY = "file:"
_MISSING = object()

_logger = logging.getLogger(__name__)

# Signals that native code brings upon itself; SIGKILL, say, may be the machine's want of memory.
_CRASH_SIGNALS = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE")
    if hasattr(signal, name)
)


class SmokeSetting(StrEnum):
    """What works: everything, without repacked weights, without the accelerator, without both, or nothing."""

    OK = "ok"
    NO_EXTRA_BUFTS = "no_extra_bufts"
    NO_OFFLOAD = "no_offload"
    PLAIN = "plain"
    BROKEN = "broken"

    @property
    def uses_extra_bufts(self) -> bool:
        """Whether weights may be repacked."""
        return self in {SmokeSetting.OK, SmokeSetting.NO_OFFLOAD}

    @property
    def offloads(self) -> bool:
        """Whether an accelerator may be used."""
        return self in {SmokeSetting.OK, SmokeSetting.NO_EXTRA_BUFTS}


@dataclass(frozen=True, slots=True)
class SmokeVerdict:
    """What a trial found.

    Attributes:
        setting: how models of these element types can be loaded.
        detail: why it is not `ok`; empty if it is.
        label: what computes, for people; empty if nothing does.
        has_crashed: it is broken, and each trial died of native code.
    """

    setting: SmokeSetting
    detail: str
    label: str
    has_crashed: bool = False


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How one child ended; `is_telling` where that is due to build and device, not to the moment.

    Where it had too little memory `shortage` says so. `token_s` is what a token took, once it was warm,
    `key_cost` what repeatable texts cost.
    """

    is_ok: bool
    is_refusal: bool
    is_telling: bool
    detail: str
    label: str = ""
    has_crashed: bool = False
    shortage: ErrorInfo | None = None
    token_s: float = 0.0
    key_cost: KeyCost | None = None


def verdict_for(path: Path, cache_dir: Path) -> SmokeVerdict:
    """The verdict for a model file, remembered or found now (seconds, the first time).

    Raises:
        ModelFileError, UnsupportedError: the file is no model to try.
    """
    return verdict_of(read_header(path), cache_dir)


def verdict_of(
    header: GgufHeader,
    cache_dir: Path,
    on_wait: Callable[[], None] | None = None,
    placement: PlacementSpec = ANYWHERE,
) -> SmokeVerdict:
    """Like `verdict_for`, for a header that was read already and a placement.

    `on_wait` is called several times a second while a child tries; what it raises ends the trial.
    """
    file = cache_dir / TRIALS_FILE
    if (known := _remembered(header, file, placement)) is not None:
        return known
    verdict, is_lasting = _try_settings(header.path, placement, on_wait or _wait_on)
    if is_lasting:
        write_trials(file, {**read_trials(file), _key(header, placement): asdict(verdict)})
    return verdict


def _remembered(header: GgufHeader, file: Path, placement: PlacementSpec) -> SmokeVerdict | None:
    known = read_trials(file)
    of_file, of_kind = known.get(_file_key(header, placement)), known.get(_key(header, placement))
    return _decoded(of_file) or _decoded(of_kind)


def verdict_of_file(
    header: GgufHeader,
    cache_dir: Path,
    on_wait: Callable[[], None] | None = None,
    placement: PlacementSpec = ANYWHERE,
) -> SmokeVerdict:
    """Like `verdict_of`, found now for this very file, and remembered for it unless it is broken."""
    verdict, is_lasting = _try_settings(header.path, placement, on_wait or _wait_on)
    if is_lasting:
        file = cache_dir / TRIALS_FILE
        known = {**read_trials(file), _file_key(header, placement): asdict(verdict)}
        files = [key for key in known if key.startswith(_FILE_KEY)]
        for oldest in files[: max(0, len(files) - MAX_FILE_VERDICTS)]:
            del known[oldest]
        write_trials(file, known)
    return verdict


def _wait_on() -> None:
    """No reason to end the trial early."""


def _try_settings(
    path: Path, placement: PlacementSpec, on_wait: Callable[[], None]
) -> tuple[SmokeVerdict, bool]:
    """The verdict, and whether it lasts: not if a child was killed from outside or took too long."""
    settings = [SmokeSetting.OK, SmokeSetting.NO_EXTRA_BUFTS]
    if chosen_devices(placement, accelerators()):
        settings += [SmokeSetting.NO_OFFLOAD, SmokeSetting.PLAIN]
    failed: list[_Outcome] = []
    for setting in settings:
        found = _run_trial(path, setting, on_wait, placement)
        if found.shortage is not None:
            raise error_from_info(found.shortage)
        if found.is_refusal and not failed:
            return SmokeVerdict(SmokeSetting.BROKEN, found.detail, found.label), False
        if found.is_ok:
            detail = failed[0].detail if failed else ""
            if failed:
                _logger.warning("smoke decode of %s: %s, because %s", path.name, setting, detail)
            return SmokeVerdict(setting, detail, found.label), all(one.is_telling for one in failed)
        failed.append(found)
    detail = f"{failed[0].detail}; at its plainest: {failed[-1].detail}"
    _logger.warning("smoke decode of %s: %s", path.name, detail)
    has_crashed = all(one.has_crashed for one in failed)
    return SmokeVerdict(SmokeSetting.BROKEN, detail, "", has_crashed), False


def _run_trial(
    path: Path,
    setting: SmokeSetting,
    on_wait: Callable[[], None],
    placement: PlacementSpec = ANYWHERE,
    measured: Sequence[str] = (),
) -> _Outcome:
    command = [sys.executable, "-P", "-m", "stoker.backends.llama.smoke.trial", str(path)]
    command += ["--extra-bufts", _on_off(setting.uses_extra_bufts), "--offload", _on_off(setting.offloads)]
    if placement != ANYWHERE:
        command += ["--placement", msgspec.json.encode(placement).decode()]
    command += measured
    try:
        done = run_child(command, on_wait, TRIAL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return _failed(f"a trial decode took more than {TRIAL_TIMEOUT_S:g} s", is_telling=False)
    if done.returncode < 0:
        number = -done.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        said = native_text(done.stderr)
        detail = f"a trial decode died of {name}{f': {said}' if said else ''}"
        is_crash = number in _CRASH_SIGNALS
        return _failed(detail, is_telling=is_crash, has_crashed=is_crash)
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        return _Outcome(
            is_ok=said["outcome"] == "ok",
            is_refusal=said["outcome"] == "refused",
            is_telling=True,
            detail=said["detail"][:MAX_DETAIL_CHARS],
            label=said["label"],
            shortage=msgspec.convert(said["shortage"], ErrorInfo | None),
            token_s=said["token_s"],
            key_cost=msgspec.convert(said["key_cost"], KeyCost | None),
        )
    except (IndexError, KeyError, TypeError, ValueError):
        text = native_text(done.stderr)
        detail = f"a trial decode ended with code {done.returncode}: {text}"
        return _failed(detail, is_telling=False, has_crashed=done.returncode != 0)


def _on_off(is_on: bool) -> str:  # noqa: FBT001 - a word for it
    return "on" if is_on else "off"


def _failed(detail: str, *, is_telling: bool, has_crashed: bool = False) -> _Outcome:
    return _Outcome(
        is_ok=False, is_refusal=False, is_telling=is_telling, detail=detail, has_crashed=has_crashed
    )


def _file_key(header: GgufHeader, placement: PlacementSpec = ANYWHERE) -> str:
    """The same with the model's files: one that is replaced is another."""
    stats = [(shard.name, shard.stat()) for shard in header.shards]
    parts = (_key(header, placement), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return _FILE_KEY + hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _key(header: GgufHeader, placement: PlacementSpec = ANYWHERE) -> str:
    """Digest of what decides whether native code works: the library's files, devices, element types."""
    files = sorted(
        (file.name, stat.st_size, stat.st_mtime_ns)
        for file in LIBRARY_DIR.iterdir()
        if (stat := file.stat()) and not file.is_dir()
    )
    cards = [(each.kind, each.name) for each in chosen_devices(placement, accelerators())]
    mode = str(placement.split_mode or "") if len(cards) > 1 else ""
    parts = (
        LIBRARY_VERSION,
        files,
        cpu_identity(),
        cards,
        mode,
        sorted(header.tensor_types),
        header.architecture,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _decoded(value: Any) -> SmokeVerdict | None:
    match value:
        case {"setting": str(setting), "detail": str(detail), "label": str(label)}:
            with suppress(ValueError):
                return SmokeVerdict(SmokeSetting(setting), detail, label)
    return None


def tried_options(
    spec: ModelSpec, header: GgufHeader, on_progress: OnProgress | None, cache_dir: Path | None
) -> ModelOptions:
    """How to load a file, after a smoke decode in a child process where none is remembered.

    Where a part of it stays in host memory beside devices, the child also measures what a token takes so;
    that is remembered for this file and placement. So is what repeatable texts cost a file that the CPU
    computes, where that decides.

    Args:
        spec: where it is to lie.
        header: of the file.
        on_progress: told the fraction loaded, 0 while it is tried; what it raises ends the load.
        cache_dir: where verdicts are remembered; None: this user's cache folder.

    Raises:
        LoadCrashedError: llama.cpp crashes on it; the message quotes what it said.
        ModelLoadError: llama.cpp refuses it, or computes nonsense.
        InsufficientMemoryError: there is less memory than it takes.
    """
    folder, on_wait = _folder(cache_dir), _asking(on_progress)
    verdict = verdict_of(header, folder, on_wait, spec.placement)
    _refuse_broken(header, verdict)
    is_parted = verdict.setting.offloads and is_shared_with_host(header, spec.placement)
    cost = _key_cost(spec, header, verdict.setting, folder, on_wait)
    return ModelOptions(
        path=header.path,
        use_extra_bufts=verdict.setting.uses_extra_bufts,
        offloads=verdict.setting.offloads,
        placement=spec.placement,
        on_progress=on_progress,
        token_s=_token_seconds(header, spec.placement, verdict.setting, folder, on_wait)
        if is_parted
        else 0.0,
        repeatable_cost=cost.most if cost else None,
        half_tile=cost.half_tile if cost else 0.0,
    )


def untried_options(
    spec: ModelSpec, header: GgufHeader, on_progress: OnProgress | None, cache_dir: Path | None
) -> ModelOptions | None:
    """How to load a file whose first decode is the trial; None: it is tried already, or in a child.

    That is one for accelerators of whose kind nothing is remembered (docs/adr/0025), but for one of which a
    part stays in host memory, as a child measures its cost. `note_working` remembers that it went well.
    """
    placement, folder = spec.placement, _folder(cache_dir)
    if not chosen_devices(placement, accelerators()) or is_shared_with_host(header, placement):
        return None
    if _remembered(header, folder / TRIALS_FILE, placement) is not None:
        return None
    return ModelOptions(path=header.path, placement=placement, on_progress=on_progress)


def note_working(spec: ModelSpec, header: GgufHeader, label: str, cache_dir: Path | None) -> None:
    """Remember that a file of this kind loads and computes with everything that there is."""
    file = _folder(cache_dir) / TRIALS_FILE
    verdict = SmokeVerdict(SmokeSetting.OK, "", label)
    write_trials(file, {**read_trials(file), _key(header, spec.placement): asdict(verdict)})


def is_shared_with_host(header: GgufHeader, placement: PlacementSpec) -> bool:
    """Whether host memory holds some layers, or experts, of a model that devices compute."""
    layers = placement.gpu_layers
    is_less = isinstance(layers, int) and 0 < layers <= header.block_count
    return placement.has_devices and (is_less or bool(placement.cpu_moe))


def _token_seconds(
    header: GgufHeader,
    placement: PlacementSpec,
    setting: SmokeSetting,
    folder: Path,
    on_wait: Callable[[], None],
) -> float:
    """What a token takes with this placement, measured in a child process or remembered; 0: not known."""
    file, key = folder / TRIALS_FILE, _cost_key(header, placement)
    match read_trials(file).get(key):
        case {"token_s": float(known)}:
            return known
    found = _run_trial(header.path, setting, on_wait, placement, TOKEN_TIME)
    if found.shortage is not None:
        raise error_from_info(found.shortage)
    if found.is_ok:
        write_trials(file, {**read_trials(file), key: {"token_s": found.token_s}})
    return found.token_s if found.is_ok else 0.0


def _key_cost(
    spec: ModelSpec, header: GgufHeader, setting: SmokeSetting, folder: Path, on_wait: Callable[[], None]
) -> KeyCost | None:
    """What repeatable texts cost, measured in a child or remembered; None: not known, or not asked."""
    has_choice = not spec.kv_type and spec.flash_attention is not FlashAttention.OFF
    is_asked = spec.repeatable is Repeatable.AUTO and has_choice and not spec.placement.streams_experts
    is_on_devices = setting.offloads and chosen_devices(spec.placement, accelerators())
    can_be = header.model_class is ModelClass.DECODER and header.tensor_types <= ROW_BY_ROW
    if not is_asked or is_on_devices or not can_be:
        return None
    file, key = folder / TRIALS_FILE, "keys:" + _file_key(header, spec.placement)
    known = read_trials(file).get(key, _MISSING)
    try:
        cost = msgspec.convert(known, KeyCost | None)
    except msgspec.ValidationError:
        _logger.info("%s: measuring what repeatable texts cost here", header.path.name)
        found = _run_trial(header.path, setting, on_wait, spec.placement, KEY_COST)
        cost = found.key_cost
        if found.is_ok:
            write_trials(file, {**read_trials(file), key: msgspec.to_builtins(cost)})
    choice = "on" if cost and cost.most < MOST_COST else "off"
    said = f"takes {cost}" if cost else "could not be measured"
    _logger.info("%s: repeatable is %s, it %s", header.path.name, choice, said)
    return cost


def _cost_key(header: GgufHeader, placement: PlacementSpec) -> str:
    parts = _file_key(header, placement), msgspec.json.encode(placement)
    return "cost:" + hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def try_in_child(
    spec: ModelSpec, header: GgufHeader, on_progress: OnProgress | None, cache_dir: Path | None
) -> None:
    """Have a child process load and run this very file, whatever is remembered of its kind.

    What is found is remembered for this file, so that `tried_options` gives it. Args and errors are those of
    `tried_options`.
    """
    verdict = verdict_of_file(header, _folder(cache_dir), _asking(on_progress), spec.placement)
    _refuse_broken(header, verdict)


def _folder(cache_dir: Path | None) -> Path:
    return cache_dir or Path(platformdirs.user_cache_dir("stoker"))


def _asking(on_progress: OnProgress | None) -> Callable[[], None]:
    return lambda: on_progress(0.0) if on_progress else None


def _refuse_broken(header: GgufHeader, verdict: SmokeVerdict) -> None:
    if verdict.setting is SmokeSetting.BROKEN:
        kind = LoadCrashedError if verdict.has_crashed else ModelLoadError
        raise kind(f"{header.path.name} cannot be run here: {verdict.detail}", path=str(header.path))
