"""What tells a model from others on any machine: a digest of all that its files hold (SPEC C19).

The fingerprint of a file has its time in it, which differs from machine to machine, and samples of it only.
Reading a model through takes about a second for each gigabyte, so the digest is remembered by fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from stoker.errors import ModelFileError
from stoker.models.fingerprint import fingerprint, fingerprint_of
from stoker.models.shards import shard_names
from stoker.models.trials import read_trials, write_trials

CONTENTS_FILE = "contents.json"
"""In the cache folder."""
MAX_REMEMBERED = 256
_PIECE_BYTES = 16 << 20
_DIGEST_BYTES = 32


def content_digest(path: Path, cache_dir: Path, on_read: Callable[[], None] = lambda: None) -> str:
    """64 hexadecimal digits for the content of a model's file and shards, or of the files in its folder.

    Args:
        path: the file or folder.
        cache_dir: where digests are remembered.
        on_read: called between two pieces; what it raises ends the reading.

    Raises:
        ModelFileError: a file cannot be read.
    """
    files = _files(path)
    mark = fingerprint_of(files) if path.is_dir() else fingerprint(path)
    known = read_trials(cache_dir / CONTENTS_FILE)
    digest = known.pop(mark, None)
    if not isinstance(digest, str):
        digest = _read_through(files, on_read)
        newest = dict(list(known.items())[-MAX_REMEMBERED + 1 :])
        write_trials(cache_dir / CONTENTS_FILE, newest | {mark: digest})
    return digest


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.is_file())
    found = [path.with_name(name) for name in shard_names(path.name)]
    return [each for each in found if each == path or each.is_file()]


def _read_through(files: list[Path], on_read: Callable[[], None]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"stoker-content")
    for path in files:
        digest.update(path.name.encode(errors="surrogateescape") + b"\0" if len(files) > 1 else b"")
        try:
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb", buffering=0) as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
                    on_read()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ModelFileError(f"{path}: cannot be read: {reason}", path=str(path)) from error
    return digest.hexdigest()
