"""Frames between the front and a worker process: a byte for what it is, a length, a body.

Bodies are msgpack, which copies texts as they are: spelling 16 MiB of line breaks as JSON would hold the
interpreter's lock for 100 ms. A job with integers over 64 bits, which msgpack has not, is JSON. Sets no
deadline: the caller sets the socket's.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

MAX_BODY_BYTES = 256 * 1024**2
"""Eight times the largest request body: a rendered prompt is seldom longer than what it was made of."""
_HEADER = struct.Struct("<BQ")


class FrameKind(IntEnum):
    """What a frame is."""

    READY = 0
    JOB = 1
    JSON_JOB = 2
    ANSWER = 3
    ERROR = 4


class FrameError(Exception):
    """The other end closed the connection, or sent no frame."""


def send(connection: socket.socket, kind: FrameKind, body: bytes = b"") -> None:
    """Send one frame. Raises OSError, and FrameError over `MAX_BODY_BYTES`."""
    size_bytes = len(body)
    if size_bytes > MAX_BODY_BYTES:
        raise FrameError(f"{size_bytes} bytes are over the bound of {MAX_BODY_BYTES}")
    connection.sendall(_HEADER.pack(kind, size_bytes))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[FrameKind, bytearray]:
    """The next frame. Raises FrameError at the end of the connection, and OSError."""
    kind, size_bytes = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if size_bytes > MAX_BODY_BYTES:
        raise FrameError(f"{size_bytes} bytes are over the bound of {MAX_BODY_BYTES}")
    return FrameKind(kind), _exactly(connection, size_bytes)


def _exactly(connection: socket.socket, size_bytes: int) -> bytearray:
    body = bytearray(size_bytes)
    rest = memoryview(body)
    while rest:
        num_read = connection.recv_into(rest)
        if not num_read:
            raise FrameError("the connection was closed")
        rest = rest[num_read:]
    return body
