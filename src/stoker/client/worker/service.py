"""A worker process from inside: one job after another, under limits that the system keeps.

The client ends a process that passes the time limit; the processor time allowed here ends one whose client is
gone while it computes.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.client.worker.jobs import FrameError, FrameKind, WorkerJob, do, receive, send
from stoker.errors import EngineError, StokerError, WorkLimitError
from stoker.wording import size_text

try:
    import resource
except ImportError:  # the system has no such limits; the time limit holds nevertheless
    resource = None  # type: ignore[assignment]

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
