"""One file a suspended request: written whole or not at all, read only where it proves to be whole.

Owns the format, the names and who may have a file: its writer holds a lock on it as long as it runs, so no
other program takes up what this one still has. When one is written is `stoker.client.requests.table`'s.

    8 bytes  magic and version
    4 bytes  length of the label, big endian
    32 bytes SHA-256 of the label
    label    msgpack of `KeptRequest`: it says whose file it is though the rest is damaged
    32 bytes SHA-256 of the rest
    the rest msgpack of `KeptFile`
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from stoker.errors import StokerError
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Failed, Finished, PromptEcho, StateReady
from stoker.ipc.request import GenerateRequest, Priority
from stoker.private import make_folder

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

MAGIC = b"STKREQ\x00\x02"
SUFFIX = ".request"
BAD_SUFFIX = ".bad"
_HASH_BYTES = 32
MAX_FILE_BYTES = 1 << 30
"""Far over the largest honest one; what is larger is not read into memory."""
MAX_BAD_FILES = 16
MAX_BAD_BYTES = 64 << 20
"""Bounds on what was put aside, for people to look at; the oldest go first."""
MAX_LABEL_BYTES = 1 << 20
_LENGTH_BYTES = 4


Shown = PromptEcho | StateReady | Delta | Finished | Failed
"""What stays true after it was shown; places in a queue and pauses do not."""


class KeptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as others are shown it: one that has a client, or one that runs or has ended without.

    Attributes:
        names: what else it is known by: X-Request-Id, the answer's id.
        priority: its class.
        n: completions of its prompt.
        note: as in its request.
        owner: digest of the API key that made it; empty: it came without one.
        state: running or ended.
        num_tokens: generated so far, over all choices.
    """

    id: str
    names: list[str] = []
    is_chat: bool = False
    model: str = ""
    priority: Priority = Priority.INTERACTIVE
    n: int = 1
    note: bytes = b""
    owner: str = ""
    state: str = "running"
    num_tokens: int = 0

    @classmethod
    def of(cls, request_id: str, request: GenerateRequest, names: Sequence[str], owner: str) -> KeptRequest:
        """What is shown of that request, before any token."""
        return cls(
            id=request_id,
            names=list(names),
            is_chat=request.is_chat,
            model=request.model,
            priority=request.priority,
            n=request.n,
            note=request.note,
            owner=owner,
        )


class DamagedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was put aside, and where; its label was whole."""

    label: KeptRequest
    reason: str


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
_decode_label = msgspec.msgpack.Decoder(KeptRequest).decode


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
        submit, name = kept.submit, _name(kept.submit.request_id)
        label_of = KeptRequest.of(submit.request_id, submit.request, kept.names, kept.owner)
        label = _encode(msgspec.structs.replace(label_of, note=b""))  # of any size: only the body has it
        body = _encode(kept)
        make_folder(self._path)
        temporary = self._path / f"{name}.{os.getpid()}.tmp"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(MAGIC + len(label).to_bytes(_LENGTH_BYTES, "big") + _summed(label) + _summed(body))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path / name)
        except OSError:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        self._hold(name, descriptor)

    def write_all(self, files: Sequence[KeptFile]) -> None:
        """Keep all of these; where that fails a warning says how many are not."""
        for number, kept in enumerate(files):
            try:
                self.write(kept)
            except OSError as error:
                text = "%d of %d suspended requests are not written and lost if this program ends: %s"
                log.warning(text, len(files) - number, len(files), error)
                return

    def remove(self, *request_ids: str) -> None:
        """Forget requests; one that is not kept is ignored."""
        for name in map(_name, request_ids):
            descriptor = self._held.pop(name, None)
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    (self._path / name).unlink(missing_ok=True)
                os.close(descriptor)

    def take(self, models: Container[str]) -> Iterator[KeptFile | DamagedFile]:
        """What no living program has, of these models, oldest first; it is this one's from here on.

        A file that is damaged or foreign is put aside, under another ending, with a warning.
        """
        with contextlib.suppress(OSError):
            for path in sorted(self._path.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime_ns):
                if path.name not in self._held:
                    yield from self._take_one(path, models)

    def _take_one(self, path: Path, models: Container[str]) -> Iterator[KeptFile | DamagedFile]:
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
            label = _label_of(descriptor)
            os.close(descriptor)
            aside = self._put_aside(path)
            if label is not None:
                yield DamagedFile(label=label, reason=f"{error}; it was put aside as {aside}")
        else:
            is_there = os.fstat(descriptor).st_nlink > 0  # its program may have removed it just now
            if is_there and kept.submit.request.model in models:
                self._hold(path.name, descriptor)
                yield kept
            else:  # another start may serve it
                os.close(descriptor)

    def _put_aside(self, path: Path) -> Path:
        """Under another ending, in place of the oldest such files where there are too many."""
        aside = path.with_suffix(BAD_SUFFIX)
        with contextlib.suppress(OSError):
            path.replace(aside)
            found = [(file, file.stat()) for file in self._path.glob(f"*{BAD_SUFFIX}")]
            found.sort(key=lambda each: each[1].st_mtime_ns, reverse=True)
            num_bytes = 0
            for number, (file, stat) in enumerate(found):
                num_bytes += stat.st_size
                if number >= MAX_BAD_FILES or num_bytes > MAX_BAD_BYTES:
                    file.unlink(missing_ok=True)
        return aside

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


def _summed(part: bytes) -> bytes:
    return hashlib.sha256(part).digest() + part


def _read(descriptor: int) -> KeptFile:
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes > MAX_FILE_BYTES:
        raise ValueError(f"it has {size_bytes} bytes, {MAX_FILE_BYTES} are read at most")
    with os.fdopen(os.dup(descriptor), "rb") as file:
        _read_label(file)
        return _decode(_unsummed(file.read()))


def _label_of(descriptor: int) -> KeptRequest | None:
    """The label of a damaged file, if that is whole."""
    with contextlib.suppress(OSError, ValueError, StokerError):
        os.lseek(descriptor, 0, os.SEEK_SET)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return _read_label(file)
    return None


def _read_label(file: BinaryIO) -> KeptRequest:
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it is no kept request of this version")
    length = int.from_bytes(file.read(_LENGTH_BYTES), "big")
    if length > MAX_LABEL_BYTES:
        raise ValueError(f"its label has {length} bytes, {MAX_LABEL_BYTES} are possible")
    return _decode_label(_unsummed(file.read(_HASH_BYTES + length)))


def _unsummed(data: bytes) -> bytes:
    body = data[_HASH_BYTES:]
    if hashlib.sha256(body).digest() != data[:_HASH_BYTES]:
        raise ValueError("its checksum is wrong")
    return body
