"""How a model file is opened on this machine: as its smoke decode has shown to be safe (SPEC R9)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from stoker.backends.llama.model import ModelOptions
from stoker.backends.llama.smoke.smoke import SmokeSetting, SmokeVerdict, verdict_of, verdict_of_file
from stoker.errors import LoadCrashedError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.models.gguf.header import GgufHeader

    OnProgress = Callable[[float], None]


def tried_options(header: GgufHeader, on_progress: OnProgress | None, cache_dir: Path | None) -> ModelOptions:
    """How to load a file, after a smoke decode in a child process where none is remembered.

    Args:
        header: of the file.
        on_progress: told the fraction loaded, 0 while it is tried; what it raises ends the load.
        cache_dir: where verdicts are remembered; None: this user's cache folder.

    Raises:
        LoadCrashedError: llama.cpp crashes on it; the message quotes what it said.
        ModelLoadError: llama.cpp refuses it, or computes nonsense.
    """
    verdict = verdict_of(header, _folder(cache_dir), _asking(on_progress))
    _refuse_broken(header, verdict)
    return ModelOptions(
        path=header.path,
        use_extra_bufts=verdict.setting.uses_extra_bufts,
        offloads=verdict.setting.offloads,
        on_progress=on_progress,
    )


def try_in_child(header: GgufHeader, on_progress: OnProgress | None, cache_dir: Path | None) -> None:
    """Have a child process load and run this very file, whatever is remembered of its kind.

    What is found is remembered for this file, so that `tried_options` gives it. Args and errors are those of
    `tried_options`.
    """
    _refuse_broken(header, verdict_of_file(header, _folder(cache_dir), _asking(on_progress)))


def _folder(cache_dir: Path | None) -> Path:
    return cache_dir or Path(platformdirs.user_cache_dir("stoker"))


def _asking(on_progress: OnProgress | None) -> Callable[[], None]:
    return lambda: on_progress(0.0) if on_progress else None


def _refuse_broken(header: GgufHeader, verdict: SmokeVerdict) -> None:
    if verdict.setting is SmokeSetting.BROKEN:
        kind = LoadCrashedError if verdict.has_crashed else ModelLoadError
        raise kind(f"{header.path.name} cannot be run here: {verdict.detail}", path=str(header.path))
