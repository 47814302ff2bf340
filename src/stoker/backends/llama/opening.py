"""How a model file is opened on this machine: as its smoke decode has shown to be safe (SPEC R9)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from stoker.backends.llama.model import ModelOptions
from stoker.backends.llama.smoke import SmokeSetting, verdict_of
from stoker.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.models.gguf import GgufHeader


def tried_options(
    header: GgufHeader, on_progress: Callable[[float], None] | None, cache_dir: Path | None
) -> ModelOptions:
    """How to load a file, after a smoke decode in a child process where none is remembered.

    Args:
        header: of the file.
        on_progress: told the fraction loaded, 0 while it is tried; what it raises ends the load.
        cache_dir: where verdicts are remembered; None: this user's cache folder.

    Raises:
        ModelLoadError: llama.cpp crashes on it.
    """
    folder = cache_dir or Path(platformdirs.user_cache_dir("stoker"))
    verdict = verdict_of(header, folder, lambda: on_progress(0.0) if on_progress else None)
    if verdict.setting is SmokeSetting.BROKEN:
        raise ModelLoadError(
            f"{header.path.name} cannot be run here: {verdict.detail}", path=str(header.path)
        )
    return ModelOptions(
        path=header.path,
        use_extra_bufts=verdict.setting is SmokeSetting.OK,
        on_progress=on_progress,
    )
