"""What `stoker calibrate` found to be quickest for a model on this machine (SPEC R16).

Owns the record, for which model, build and machine it holds, and which settings it is asked for. Trials are
`stoker.cli.calibrate`'s; where they are kept is `trials`'. Nothing native is loaded.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from stoker.models.trials import TRIALS_FILE, cpu_identity, read_trials, write_trials

if TYPE_CHECKING:
    from collections.abc import Collection

SETTINGS = ("threads", "n_batch", "kv_type", "gpu_layers", "speculation", "expert_budget")
"""What is calibrated, by the names of settings, in the order of the trials."""
MAX_RECORDS = 64
"""Past this the oldest is forgotten."""
_PREFIX = "calibrated:"
_DISTRIBUTIONS = ("stoker", "llama-cpp-python", "mlx", "mlx-lm", "MNN")


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for one model.

    Attributes:
        path: of the model.
        settings: what is quicker than the defaults, by the names of settings; empty: the defaults are.
        default_s, best_s: what one request of the trials took with the defaults, and with these settings.
        default_tokens_per_s, best_tokens_per_s: of its answer.
        tried: names of the settings that were tried.
        at: when, in seconds since the epoch.
    """

    path: str
    settings: dict[str, int | str] = {}
    default_s: float
    best_s: float
    default_tokens_per_s: float
    best_tokens_per_s: float
    tried: list[str] = []
    at: float = 0.0

    def used(self, given: Collection[str]) -> dict[str, int | str]:
        """Those of the settings that nobody has set."""
        return {name: value for name, value in self.settings.items() if name not in given}

    def overridden(self, given: Collection[str]) -> dict[str, int | str]:
        """Those for which something was set, which holds."""
        return {name: value for name, value in self.settings.items() if name in given}

    @property
    def gain(self) -> float:
        """How much less time a request takes; 0.2: a fifth."""
        return 1.0 - self.best_s / self.default_s if self.default_s else 0.0


def settings_text(settings: dict[str, int | str]) -> str:
    """Settings with their values, for people."""
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "the defaults"


class Calibrations:
    """The records of one cache folder.

    Args:
        cache_dir: the folder.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._file = cache_dir / TRIALS_FILE

    def __repr__(self) -> str:
        return f"<Calibrations in {self._file}>"

    def find(self, path: str, fingerprint: str) -> Calibration | None:
        """That of a model's file as it is now, with this build on this machine; None: there is none.

        Args:
            path: of the model.
            fingerprint: of its file.
        """
        records = self._records()
        return _decoded(records.get(_key(path, fingerprint))) if records else None

    def has_any(self) -> bool:
        """Whether there is any, so that fingerprints are worth reading."""
        return bool(self._records())

    def is_outdated(self, path: str) -> bool:
        """Whether there is one for that path, from before its file, the build or the machine changed."""
        return any(isinstance(each, dict) and each.get("path") == path for each in self._records().values())

    def keep(self, found: Calibration, fingerprint: str) -> None:
        """In place of what was found before for the same path."""
        known = self._without(found.path)
        records = [key for key in known if key.startswith(_PREFIX)]
        for oldest in records[: max(0, len(records) + 1 - MAX_RECORDS)]:
            del known[oldest]
        write_trials(self._file, known | {_key(found.path, fingerprint): msgspec.to_builtins(found)})

    def forget(self, path: str) -> bool:
        """Whatever was found for that path; returns whether there was something."""
        was_known = self.is_outdated(path)
        if was_known:
            write_trials(self._file, self._without(path))
        return was_known

    def _records(self) -> dict[str, Any]:
        return {key: each for key, each in read_trials(self._file).items() if key.startswith(_PREFIX)}

    def _without(self, path: str) -> dict[str, Any]:
        def is_of_path(key: str, value: Any) -> bool:
            return key.startswith(_PREFIX) and isinstance(value, dict) and value.get("path") == path

        return {key: each for key, each in read_trials(self._file).items() if not is_of_path(key, each)}


def _decoded(value: Any) -> Calibration | None:
    try:
        found = msgspec.convert(value, Calibration)
    except msgspec.ValidationError:
        return None
    return found if set(found.settings) <= set(SETTINGS) else None


def _key(path: str, fingerprint: str) -> str:
    parts = repr((path, fingerprint, _build(), _machine()))
    return _PREFIX + hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def _build() -> tuple[object, ...]:
    """Versions of what computes, and llama.cpp's files, which may be built anew under the same version."""
    spec = find_spec("llama_cpp")
    folder = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else None
    files = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return *(_version(name) for name in _DISTRIBUTIONS), *stats


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _machine() -> tuple[object, ...]:
    """Processor, cores, memory and cards, as the system names them."""
    return cpu_identity(), os.cpu_count(), psutil.virtual_memory().total, _cards()


def _cards() -> tuple[str, ...]:
    """Cards by their drivers' words on Linux; asking native libraries is for those who compute."""
    found = []
    places = ("/proc/driver/nvidia/gpus", "*/information"), ("/sys/class/drm", "*/device/uevent")
    for file in (file for folder, name in places for file in Path(folder).glob(name)):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        found += [line for line in lines if line.startswith(("Model:", "PCI_ID=", "PCI_SLOT_NAME="))]
    return tuple(sorted(found))
