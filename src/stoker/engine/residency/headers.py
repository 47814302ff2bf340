"""Headers of model files that were read before: models that take turns in memory are read once.

Used by the loader's thread alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.models.fingerprint import fingerprint
from stoker.models.gguf.header import read_header
from stoker.models.shards import refuse_partial

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.models.gguf.header import GgufHeader

MAX_HEADERS = 32


class Headers:
    """The last headers, by path; one whose file has changed since is read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[str, GgufHeader]] = {}

    def __repr__(self) -> str:
        return f"<Headers {len(self._known)}>"

    def get(self, path: Path) -> tuple[str, GgufHeader]:
        """Fingerprint and header of a file.

        Raises:
            ModelFileError, UnsupportedError: as `read_header`.
        """
        refuse_partial(path)
        mark = fingerprint(path)
        known = self._known.pop(path, None)
        if known is None or known[0] != mark or not all(shard.exists() for shard in known[1].shards):
            known = mark, read_header(path)
        self._known[path] = known
        if len(self._known) > MAX_HEADERS:
            del self._known[next(iter(self._known))]
        return known
