"""What tells a model file from another that takes its place (SPEC C1).

Size, time of change and samples of the content, of every shard: a file that is replaced gets another
fingerprint, one that is only moved keeps it. It is no proof against a file forged to look the same.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

from stoker.errors import ModelFileError
from stoker.models.shards import shard_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MAX_SAMPLED_BYTES = 1 << 20
"""Bytes read of all shards together; a few milliseconds from a cold disk."""
SAMPLE_BYTES = 4096
"""Length of each sample between head and tail: a page, the least a disk reads anyway."""
_DIGEST_BYTES = 32


def fingerprint(path: Path) -> str:
    """64 hexadecimal digits for the model whose file, or any shard, this is.

    A file of up to the bytes each shard has of `MAX_SAMPLED_BYTES` is read whole. Of a longer one a quarter
    of them is its head, a quarter its tail, and the rest are samples evenly spaced in between.

    Raises:
        ModelFileError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"stoker-model")
    names = shard_names(path.name)
    for name in names:
        shard = path.with_name(name)
        try:
            for part in _parts(shard, MAX_SAMPLED_BYTES // len(names)):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        except FileNotFoundError as error:
            if shard == path:
                raise _error(shard, error.strerror or "no such file") from error
            digest.update(b"absent")  # a single file may have the name of a shard
        except OSError as error:
            raise _error(shard, error.strerror or str(error)) from error
    return digest.hexdigest()


def fingerprint_of(files: Sequence[Path]) -> str:
    """Likewise, of a model that is all of these files, which have to be there. Raises ModelFileError."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"stoker-folder")
    for path in files:
        digest.update(path.name.encode(errors="surrogateescape") + b"\0")
        try:
            for part in _parts(path, MAX_SAMPLED_BYTES // len(files)):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        except OSError as error:
            raise _error(path, error.strerror or str(error)) from error
    return digest.hexdigest()


def _parts(path: Path, budget: int) -> Iterator[bytes]:
    if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe would never let go
        raise _error(path, "it is not a regular file")
    with path.open("rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        yield found.st_size.to_bytes(8, "little")
        yield found.st_mtime_ns.to_bytes(16, "little", signed=True)
        for start, length in _samples(found.st_size, budget):
            yield _read(file, start, length)


def _samples(size: int, budget: int) -> Iterator[tuple[int, int]]:
    """Where to read and how much, at most `budget` bytes in all."""
    if size <= budget:
        yield 0, size
        return
    end = budget // 4
    yield 0, end
    count = (budget - 2 * end) // SAMPLE_BYTES
    between = size - 2 * end
    for number in range(count):
        yield end + (between - SAMPLE_BYTES) * (number + 1) // (count + 1), SAMPLE_BYTES
    yield size - end, end


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    """So many bytes, or fewer if the file was cut meanwhile."""
    file.seek(start)
    parts = []
    while length > 0 and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _error(path: Path, reason: str) -> ModelFileError:
    return ModelFileError(f"{path}: cannot be read: {reason}", path=str(path))
