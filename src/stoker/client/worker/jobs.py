"""What a worker process does: jobs, values in and values out, the frames in which they travel, its limits.

A frame is a byte for its kind, a length, a body. Bodies are msgpack, which copies texts as they are: 16 MiB
of line breaks as JSON would hold the interpreter's lock for 100 ms. A job with integers over 64 bits, which
msgpack has not, is JSON. The caller sets the socket's deadline.

In the process `serve` does one job after another, under limits that the system keeps. The client ends a
process that passes the time limit; the processor time allowed here ends one whose client is gone while it
computes.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import ClassVar, TypeAlias

import msgspec

from stoker.chat.conversation import Conversation, Layout, lay_out
from stoker.errors import EngineError, StokerError, WorkLimitError
from stoker.ipc.constraint import Constraint, NativeGrammar
from stoker.wording import size_text

try:
    import resource
except ImportError:  # the system has no such limits; the time limit holds nevertheless
    resource = None  # type: ignore[assignment]

MAX_BODY_BYTES = 256 * 1024**2
"""Eight times the largest request body: a rendered prompt is seldom longer than what it was made of."""
_HEADER = struct.Struct("<BQ")
_DOCUMENT_NICENESS = 10


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


class DocumentPages(msgspec.Struct, frozen=True):
    """The text of each page of a document."""

    pages: list[str]


class ReadDocument(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read the text of a PDF; answered with `DocumentPages`.

    Attributes:
        name: of the file.
        param: as of `RenderChat`.
        data: the file.
        max_pages: it may have.
        max_chars: its text may have.
    """

    remedy: ClassVar[str] = "send fewer of its pages, or their text"

    name: str
    param: str
    data: bytes
    max_pages: int
    max_chars: int

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return f"{self.param}: reading {self.name}"


WorkerJob: TypeAlias = RenderChat | TranslateGrammar | ReadDocument


def do(job: WorkerJob) -> Layout | NativeGrammar | DocumentPages:
    """The answer to a job. Raises whatever the work raises."""
    match job:
        case RenderChat(conversation=conversation):
            return lay_out(conversation)
        case TranslateGrammar(constraint=constraint):
            from stoker.grammar.source import native_grammar  # noqa: PLC0415 - a chat loads none of it

            return native_grammar(constraint)
        case ReadDocument(name=name, param=param):
            from stoker.documents.pdf import pages_of  # noqa: PLC0415 - likewise

            _give_way()
            label = f"{param}: {name}"
            return DocumentPages(pages_of(job.data, label, param, job.max_pages, job.max_chars))


def _give_way() -> None:
    """Leave the cores to whoever computes answers: a document takes seconds, a step milliseconds."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _DOCUMENT_NICENESS)


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


_SPARE_S = 2.0
_RETIRE_BYTES = 64 * 1024**2
"""A process that holds this much after an answer ends, as that is the only way to give it all back."""
_STATM = Path("/proc/self/statm")

_decode: dict[FrameKind, Callable[[bytearray], WorkerJob]] = {
    FrameKind.JOB: msgspec.msgpack.Decoder(WorkerJob).decode,
    FrameKind.JSON_JOB: msgspec.json.Decoder(WorkerJob).decode,
}
_encode = msgspec.msgpack.Encoder().encode


def serve(descriptor: int, limit_s: float, max_bytes: int) -> None:
    """Answer jobs on a socket until its other end closes.

    Args:
        descriptor: of a connected stream socket.
        limit_s: seconds that the client gives to one job.
        max_bytes: memory that a job may take beside what the process takes by itself.
    """
    _bound_memory(max_bytes)
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(FrameError, OSError):
        send(connection, FrameKind.READY)
        while _memory()[1] < _RETIRE_BYTES:
            kind, body = receive(connection)
            _bound_time(limit_s)
            send(connection, *_answer(kind, body, max_bytes))


def _answer(kind: FrameKind, body: bytearray, max_bytes: int) -> tuple[FrameKind, bytes]:
    job = None
    try:
        job = _decode[kind](body)
        return FrameKind.ANSWER, _encode(do(job))
    except StokerError as error:
        return FrameKind.ERROR, _encode(error.info())
    except MemoryError:
        pass  # said when everything that took the memory is gone
    except Exception as error:  # noqa: BLE001 - a bug ends one job; the client gets it
        return FrameKind.ERROR, _encode(EngineError(f"a worker: {type(error).__name__}: {error}").info())
    return FrameKind.ERROR, _encode(_too_much(job, max_bytes).info())


def _too_much(job: WorkerJob | None, max_bytes: int) -> WorkLimitError:
    text = f"needs more than {size_text(max_bytes)} of memory and was stopped"
    if job is None:
        return WorkLimitError(f"reading the request {text}; shorten it", limit_bytes=max_bytes)
    return WorkLimitError(f"{job.label} {text}; {job.remedy}", param=job.param, limit_bytes=max_bytes)


def _bound_memory(max_bytes: int) -> None:
    if resource is None:
        return
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _memory()[0] + max_bytes)


def _bound_time(limit_s: float) -> None:
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        total_s = math.ceil(used.ru_utime + used.ru_stime + limit_s + _SPARE_S)
        _limit(resource.RLIMIT_CPU, total_s)


def _limit(which: int, wanted: int) -> None:
    _, hard = resource.getrlimit(which)
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses some
        resource.setrlimit(which, (soft, hard))


def _memory() -> tuple[int, int]:
    """Bytes of address space and of memory that this process takes; (0, 0) where the system does not say."""
    if not _STATM.exists():
        return 0, 0
    mapped, resident, *_ = map(int, _STATM.read_text().split())
    return mapped * os.sysconf("SC_PAGE_SIZE"), resident * os.sysconf("SC_PAGE_SIZE")
