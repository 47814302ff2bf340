"""A place where jobs are done: one process at a time, started when it is needed and replaced when it is lost.

Owns what the end of a process means to the job that it was given. `pool` decides which job is next.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stoker.client.worker import frames
from stoker.client.worker.process import LateError, LostError, WorkerProcess
from stoker.errors import (
    ErrorInfo,
    InvalidRequestError,
    NotReadyError,
    WorkerLostError,
    WorkLimitError,
    error_from_info,
)

if TYPE_CHECKING:
    from stoker.client.worker.jobs import Job

NUM_ATTEMPTS = 2
"""Jobs leave nothing behind, so one whose process was killed is done again; once, as it may be the reason."""

T = TypeVar("T")


class Place:
    """Does one job at a time, in one thread.

    Args:
        limit_s: seconds that a job may take.
        max_bytes: memory that it may take.
    """

    def __init__(self, limit_s: float, max_bytes: int) -> None:
        self._limit_s = limit_s
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Place {self._process!r}>"

    @property
    def pid(self) -> int:
        """Of its process; 0: there is none."""
        process = self._process
        return process.pid if process else 0

    def start(self) -> WorkerProcess:
        """Its process, started if there is none.

        Raises:
            NotReadyError: it cannot be started, or the place is closed.
        """
        if self._is_closed:
            raise NotReadyError("the runtime is closed")
        if self._process is None:
            process = WorkerProcess(self._limit_s, self._max_bytes)
            with self._lock:
                if not self._is_closed:
                    self._process = process
            if self._process is None:
                process.end()
                raise NotReadyError("the runtime is closed")
        return self._process

    def do(self, job: Job, answer: type[T]) -> T:
        """The answer to a job, of that type. Raises what `WorkerPool.run` raises."""
        kind, body = _encoded(job)
        for _ in range(NUM_ATTEMPTS):
            process = self.start()
            try:
                frame = process.ask(kind, body)
            except LostError:
                self.end()
            except LateError:
                self.end()
                text = f"{job.label} did not end within {self._limit_s:g} s and was stopped; {job.remedy}"
                raise WorkLimitError(text, param=job.param, limit_s=self._limit_s) from None
            else:
                return _decoded(frame, answer)
        text = f"{job.label}: the process that worked on it ended {NUM_ATTEMPTS} times before it answered"
        raise WorkerLostError(text, param=job.param)

    def end(self) -> None:
        """End its process, if there is one; the next job starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def close(self) -> None:
        """Kill its process and start no other; may be called from any thread while a job runs."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()


def _encoded(job: Job) -> tuple[frames.FrameKind, bytes]:
    try:
        try:
            kind, body = frames.FrameKind.JOB, msgspec.msgpack.encode(job)
        except OverflowError:
            kind, body = frames.FrameKind.JSON_JOB, msgspec.json.encode(job)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{job.label} takes JSON values only: {error}", param=job.param) from error
    if len(body) > frames.MAX_BODY_BYTES:
        text = f"{job.label}: {len(body)} bytes are too many, at most {frames.MAX_BODY_BYTES} are taken"
        raise WorkLimitError(text, param=job.param, limit_bytes=frames.MAX_BODY_BYTES)
    return kind, body


def _decoded(frame: tuple[frames.FrameKind, bytearray], answer: type[T]) -> T:
    kind, body = frame
    if kind is frames.FrameKind.ERROR:
        raise error_from_info(msgspec.msgpack.decode(body, type=ErrorInfo))
    return msgspec.msgpack.decode(body, type=answer)
