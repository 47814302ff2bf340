"""What a worker process does, values in and values out, and the frames in which they travel.

A frame is a byte for its kind, a length, a body. Bodies are msgpack, which copies texts as they are: 16 MiB
of line breaks as JSON would hold the interpreter's lock for 100 ms. A job with integers over 64 bits, which
msgpack has not, is JSON. The caller sets the socket's deadline.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import ClassVar, TypeAlias

import msgspec

from stoker.chat.conversation import Conversation, Layout, lay_out
from stoker.ipc.constraint import Constraint, NativeGrammar

MAX_BODY_BYTES = 256 * 1024**2
"""Eight times the largest request body: a rendered prompt is seldom longer than what it was made of."""
_HEADER = struct.Struct("<BQ")


class RenderChat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Render a conversation with the chat template of a model; answered with a `Layout`.

    Attributes:
        param: the request field at fault where it fails.
        remedy: what helps where it takes too long or too much.
    """

    param: ClassVar[str] = "messages"
    remedy: ClassVar[str] = "shorten the conversation, or use a model with another template"

    model: str
    conversation: Conversation

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return f"the chat template of {self.model}"


class TranslateGrammar(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check a constraint and translate it for the grammar engine; answered with a `NativeGrammar`."""

    remedy: ClassVar[str] = "make it smaller or less recursive"

    constraint: Constraint

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return f"the {self.constraint.kind.label}"

    @property
    def param(self) -> str:
        """As of `RenderChat`."""
        return self.constraint.param


WorkerJob: TypeAlias = RenderChat | TranslateGrammar


def do(job: WorkerJob) -> Layout | NativeGrammar:
    """The answer to a job. Raises whatever the work raises."""
    match job:
        case RenderChat(conversation=conversation):
            return lay_out(conversation)
        case TranslateGrammar(constraint=constraint):
            from stoker.grammar.source import native_grammar  # noqa: PLC0415 - a chat loads none of it

            return native_grammar(constraint)


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
