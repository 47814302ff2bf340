"""One file of the disk tier: its layout, and what is checked before it is used (SPEC C9).

`encode` and `decode` are the same as bytes, for prefixes that travel without a file.

Numbers are little-endian. A fixed head, then the model's fingerprint and its path as text, then the token
ids (`cache.radix`), then the state as the native library gave it out:

    magic 8, byte-order mark 4, version 2, flags 2, size of head and texts 4, namespace 32,
    length of fingerprint 2, length of path 2, number of tokens 4, size of state 8, SHA-256 of state 32,
    CRC-32 of all before the state (the CRC itself as 0) 4

The mark is in the order of the machine that wrote it, as the state is. The salt of a namespace is in its
digest only. No length is used before it fits the real size of the file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self

from stoker.cache.radix import DIGEST_BYTES, TOKEN_BYTES, num_tokens

MAGIC = b"STKPREFX"
VERSION = 1
MAX_TOKENS = 1 << 24
"""More than any context; what a listing may have to hold for one file."""
_MARK = (0x01020304).to_bytes(4, sys.byteorder)
_HEAD = struct.Struct(f"<8s4sHHI{DIGEST_BYTES}sHHIQ32sI")
_CRC_BYTES = 4
_BACKGROUND, _EXACT = 1, 2  # flags
_PIECE_BYTES = 1 << 20
_OTHER_STATE = "its state has another checksum than was written"


class DamagedError(ValueError):
    """The file is not one of ours, or no longer what was written; it can only be removed."""


@dataclass(frozen=True, slots=True)
class NewPrefix:
    """What a file is to be made for.

    Attributes:
        namespace: digest of who may share it.
        model: fingerprint of the model.
        source: path of the model, by which the files of a replaced model are known.
        tokens: key of its tokens.
        is_background: it was made for background.
        is_exact: its model cannot go back, so it serves only prompts with all of its tokens.
    """

    namespace: bytes
    model: str
    source: str
    tokens: bytes
    is_background: bool = False
    is_exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFile(NewPrefix):
    """A file of the folder whose head was found right.

    Attributes:
        name: its name in the folder.
        size_bytes: of the whole file.
        payload_bytes: of the state in it.
        used_s: seconds since the epoch of its last use or of its making.
    """

    name: str
    size_bytes: int
    payload_bytes: int
    used_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens it stands for."""
        return num_tokens(self.tokens)


class _Head(NamedTuple):
    magic: bytes
    mark: bytes
    version: int
    flags: int
    size: int
    namespace: bytes
    model_size: int
    source_size: int
    num_tokens: int
    payload_bytes: int
    checksum: bytes
    crc: int


def head_of(new: NewPrefix, payload: memoryview) -> bytes:
    """Everything that stands before the state in its file."""
    model, source = _encode(new.model), _encode(new.source)
    assert len(new.namespace) == DIGEST_BYTES, f"a namespace of {len(new.namespace)} bytes"
    assert len(new.tokens) % TOKEN_BYTES == 0, f"{len(new.tokens)} bytes are no whole number of tokens"
    assert 0 < num_tokens(new.tokens) <= MAX_TOKENS, f"{num_tokens(new.tokens)} tokens"
    fields = (
        MAGIC,
        _MARK,
        VERSION,
        _BACKGROUND * new.is_background | _EXACT * new.is_exact,
        _HEAD.size + len(model) + len(source),
        new.namespace,
        len(model),
        len(source),
        num_tokens(new.tokens),
        payload.nbytes,
        hashlib.sha256(payload).digest(),
    )
    rest = model + source + new.tokens
    return _HEAD.pack(*fields, _crc(_HEAD.pack(*fields, 0), rest)) + rest


def head_bytes(model: str, count: int) -> int:
    """Bytes before the state in a file for so many tokens that names no path."""
    return _HEAD.size + len(_encode(model)) + count * TOKEN_BYTES


def encode(new: NewPrefix, payload: memoryview) -> bytes:
    """A whole file as bytes."""
    return b"".join((head_of(new, payload), payload))


def decode(data: bytes | bytearray | memoryview) -> tuple[NewPrefix, memoryview]:
    """What `encode` was given, the state as a view of `data`.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    view = memoryview(data).cast("B")
    new, checksum, start = decode_head(view, view.nbytes)
    payload = view[start:]
    if hashlib.sha256(payload).digest() != checksum:
        raise DamagedError(_OTHER_STATE)
    return new, payload


def decode_head(data: memoryview, size_bytes: int) -> tuple[NewPrefix, bytes, int]:
    """What a file is made for, the SHA-256 of its state, and where that begins.

    Args:
        data: the file's first bytes, all before the state at least.
        size_bytes: of the whole file.

    Raises:
        DamagedError: it is not to be believed, or `data` ends before the state.
    """
    raw = bytes(data[: _HEAD.size])
    head = _parse(raw, size_bytes)
    start = size_bytes - head.payload_bytes
    if data.nbytes < start:
        raise DamagedError(f"its head ends after {data.nbytes} of {start} bytes")
    rest = bytes(data[_HEAD.size : start])
    if _crc(raw[:-_CRC_BYTES] + bytes(_CRC_BYTES), rest) != head.crc:
        raise DamagedError("its head has another checksum than was written")
    texts = head.size - _HEAD.size
    new = NewPrefix(
        namespace=head.namespace,
        model=_decode(rest[: head.model_size]),
        source=_decode(rest[head.model_size : texts]),
        tokens=rest[texts:],
        is_background=bool(head.flags & _BACKGROUND),
        is_exact=bool(head.flags & _EXACT),
    )
    return new, head.checksum, start


class PrefixReader:
    """An open prefix file with its head read and checked.

    Raises:
        DamagedError: it is not to be believed.
        OSError: it is gone or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:  # a pipe must not be waited for, a link not be followed
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP}:
                raise DamagedError("it is no regular file") from error
            raise
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedError("it is no regular file")  # noqa: TRY301 - closed below
            new, self._checksum, start = self._read_head(found.st_size)
        except BaseException:
            os.close(self._fd)
            raise
        self.file = PrefixFile(
            **asdict(new),
            name=path.name,
            size_bytes=found.st_size,
            payload_bytes=found.st_size - start,
            used_s=found.st_mtime,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def __repr__(self) -> str:
        return f"<PrefixReader {self.file.name}>"

    def payload(self) -> bytearray:
        """The state. Raises DamagedError: it is not what was written."""
        data = bytearray(self.file.payload_bytes)
        room = memoryview(data)
        start = 0
        while start < len(data):
            count = os.preadv(self._fd, [room[start:]], self._payload_start + start)
            if count == 0:
                raise DamagedError(f"its state ends after {start} of {len(data)} bytes")
            start += count
        self._compare(hashlib.sha256(data).digest())
        return data

    def verify(self) -> None:
        """As `payload`, a piece at a time, keeping nothing."""
        digest = hashlib.sha256()
        for piece in self._pieces():
            digest.update(piece)
        self._compare(digest.digest())

    def touch(self) -> None:
        """Note that it was used now; a file system that will not be written is left alone."""
        with suppress(OSError):
            os.utime(self._fd)

    @property
    def _payload_start(self) -> int:
        return self.file.size_bytes - self.file.payload_bytes

    def _pieces(self) -> Iterator[bytes]:
        start, end = self._payload_start, self.file.size_bytes
        while start < end and (piece := os.pread(self._fd, min(_PIECE_BYTES, end - start), start)):
            yield piece
            start += len(piece)

    def _compare(self, checksum: bytes) -> None:
        if checksum != self._checksum:
            raise DamagedError(_OTHER_STATE)

    def _read_head(self, file_size: int) -> tuple[NewPrefix, bytes, int]:
        """As `decode_head`."""
        raw = os.pread(self._fd, _HEAD.size, 0)
        rest = os.pread(self._fd, file_size - _parse(raw, file_size).payload_bytes - _HEAD.size, _HEAD.size)
        return decode_head(memoryview(raw + rest), file_size)


def _parse(raw: bytes, file_size: int) -> _Head:
    """The head, its lengths checked against the size of the file."""
    if len(raw) < _HEAD.size:
        raise DamagedError(f"it has {file_size} bytes, a head takes {_HEAD.size}")
    head = _Head(*_HEAD.unpack(raw))
    if head.magic != MAGIC:
        raise DamagedError("it is no prefix file")
    if head.mark != _MARK:
        raise DamagedError("it was written on a machine of another byte order")
    if head.version != VERSION:
        raise DamagedError(f"it is of version {head.version}, this is {VERSION}")
    size, count = head.size, head.num_tokens
    if size != _HEAD.size + head.model_size + head.source_size or not 0 < count <= MAX_TOKENS:
        raise DamagedError(f"its lengths cannot be: {size} bytes of head, {count} tokens")
    wanted = size + count * TOKEN_BYTES + head.payload_bytes
    if wanted != file_size:
        raise DamagedError(f"it has {file_size} bytes, its head tells of {wanted}")
    return head


def _crc(head: bytes, rest: bytes) -> int:
    return zlib.crc32(rest, zlib.crc32(head))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")  # names of files need not be UTF-8


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")
