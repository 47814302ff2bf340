"""One file a suspended request: written whole or not at all, read only where it proves to be whole.

Owns the format, the names and who may have a file: its writer holds a lock on it as long as it lives, so no
other program takes up what this one still has. What is in it is `stoker.lifecycle.keeper`'s business.

    8 bytes  magic and version
    32 bytes SHA-256 of the rest
    the rest msgpack of `KeptFile`
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import StokerError
from stoker.lifecycle.transcript import Shown
from stoker.messages import Submit

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

MAGIC = b"STKREQ\x00\x01"
SUFFIX = ".request"
BAD_SUFFIX = ".bad"
_HASH_BYTES = 32
MAX_FILE_BYTES = 1 << 30
"""Far over the largest honest one; what is larger is not read into memory."""


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a request.

    Attributes:
        submit: the request, its tokens, sampler states and age.
        shown: what its client was shown, merged.
        names: what else it is known by.
        owner: digest of the API key it came with.
    """

    submit: Submit
    shown: list[Shown]
    names: list[str] = []
    owner: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KeptFile).decode


class KeptFolder:
    """The folder of such files; its methods block, none is called by two threads at once.

    Args:
        path: need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<KeptFolder {self._path} holds {len(self._held)}>"

    def write(self, kept: KeptFile) -> None:
        """Keep a request, in place of what was kept of it before.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        name = _name(kept.submit.request_id)
        body = _encode(kept)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._path / f"{name}.{os.getpid()}.tmp"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(MAGIC + hashlib.sha256(body).digest() + body)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path / name)
        except OSError:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        self._hold(name, descriptor)

    def remove(self, request_id: str) -> None:
        """Forget a request; one that is not kept is ignored."""
        name = _name(request_id)
        descriptor = self._held.pop(name, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                (self._path / name).unlink(missing_ok=True)
            os.close(descriptor)

    def take(self, models: Container[str]) -> Iterator[KeptFile]:
        """What no living program has, of these models, oldest first; it is this one's from here on.

        A file that is damaged or foreign is put aside, under another ending, with a warning.
        """
        with contextlib.suppress(OSError):
            for path in sorted(self._path.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime_ns):
                if path.name not in self._held:
                    yield from self._take_one(path, models)

    def _take_one(self, path: Path, models: Container[str]) -> Iterator[KeptFile]:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            log.warning("the kept request %s cannot be read: %s", path, error)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = _read(descriptor)
        except BlockingIOError:
            os.close(descriptor)
        except (OSError, ValueError, StokerError) as error:
            log.warning("the kept request %s is not taken up, it is put aside: %s", path, error)
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(BAD_SUFFIX))
            os.close(descriptor)
        else:
            is_there = os.fstat(descriptor).st_nlink > 0  # its program may have removed it just now
            if is_there and kept.submit.request.model in models:
                self._hold(path.name, descriptor)
                yield kept
            else:  # another start may serve it
                os.close(descriptor)

    def _hold(self, name: str, descriptor: int) -> None:
        former = self._held.get(name)
        self._held[name] = descriptor
        if former is not None:
            os.close(former)

    def close(self) -> None:
        """Leave the files to whoever comes next."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _name(request_id: str) -> str:
    """Of our making: ids come from outside."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:32] + SUFFIX


def _read(descriptor: int) -> KeptFile:
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes > MAX_FILE_BYTES:
        raise ValueError(f"it has {size_bytes} bytes, {MAX_FILE_BYTES} are read at most")
    with os.fdopen(os.dup(descriptor), "rb") as file:
        data = file.read()
    start = len(MAGIC) + _HASH_BYTES
    body = data[start:]
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError("it is no kept request of this version")
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise ValueError("its checksum is wrong")
    return _decode(body)
