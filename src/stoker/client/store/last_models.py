"""Which models were loaded last, in a small file that outlives the program (SPEC L8)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.backends.registry import has_scheme
from stoker.private import write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

FILE_NAME = "models.json"


class LastModels:
    """The file; trouble with it is logged and costs nothing else.

    Args:
        folder: where it lies; need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._paths: list[str] | None = None

    def __repr__(self) -> str:
        return f"<LastModels {self._file}>"

    def note(self, paths: Sequence[str]) -> None:
        """These models are loaded now, the default first; that none is, is not worth remembering."""
        if not paths or list(paths) == self._paths:
            return
        self._paths = list(paths)
        try:
            write_text(self._file, json.dumps({"models": self._paths}))
        except OSError as error:
            log.debug("which models are loaded cannot be remembered: %s", error)

    def read(self) -> tuple[str, ...]:
        """Paths of the models that were loaded last and are still there; empty where none is known."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))["models"]
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s does not tell which models were loaded: %s", self._file, error)
            return ()
        return tuple(filter(_is_there, found)) if isinstance(found, list) else ()


def _is_there(path: object) -> bool:
    if isinstance(path, str) and (has_scheme(path) or Path(path).exists()):
        return True
    log.warning("a model that was loaded last is not there any more: %s", path)
    return False
