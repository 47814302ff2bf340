"""Worker processes behind one queue of jobs: started on demand, ended when idle, shared between groups.

Owns the order of jobs, and what the end of a process means to the job it was given. A thread serves each
place, so that event loops and plain callers are served alike.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from stoker.client.worker.jobs import MAX_BODY_BYTES, FrameError, FrameKind, receive, send
from stoker.errors import (
    EngineError,
    ErrorInfo,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    RequestCancelledError,
    StokerError,
    WorkerLostError,
    WorkLimitError,
    error_from_info,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.client.worker.jobs import WorkerJob

log = logging.getLogger(__name__)

CHILD = "stoker.client.worker.child"
START_LIMIT_S = 30.0
"""A start takes a tenth of a second; this is for a machine that is short of everything."""
RETRY_AFTER_S = 1.0
_NUM_SLICES = 20
NUM_ATTEMPTS = 2
"""Jobs leave nothing behind, so one whose process was killed is done again; once, as it may be the reason."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a pool may take.

    Attributes:
        limit_s: seconds of one job, some hundred times what an honest one takes.
        max_bytes: memory of one job: a conversation of 32 MiB is laid out in less.
        num_places: processes at most; each is started when those there are busy.
        max_of_group: places that the jobs of one group may take at a time, so that others find one.
        max_waiting: jobs of one group that may wait.
        idle_s: seconds without a job after which a process is ended.
    """

    limit_s: float = 2.0
    max_bytes: int = 512 * 1024**2
    num_places: int = 4
    max_of_group: int = 2
    max_waiting: int = 64
    idle_s: float = 300.0


DEFAULT = Bounds()


@dataclass(frozen=True, slots=True, eq=False)
class _Task(Generic[T]):
    job: WorkerJob
    answer: type[T]
    group: str
    future: Future[T]
    is_stopped: threading.Event


class LostError(Exception):
    """The process ended before it answered."""


class LateError(Exception):
    """There was no answer within the limit."""


class WorkerProcess:
    """A child process that has said that it is ready, asked one thing at a time by one thread.

    Nothing of this process is imported or run again in it, and it inherits its socket only.

    Args:
        limit_s: seconds for one job.
        max_bytes: memory for one job.

    Raises:
        NotReadyError: the machine refuses another process, or it does not come up.
    """

    def __init__(self, limit_s: float, max_bytes: int) -> None:
        self._limit_s = limit_s
        try:
            self._connection, self._process = _started(limit_s, max_bytes)
        except OSError as error:
            text = f"no worker process can be started: {error}"
            raise NotReadyError(text, retry_after_s=RETRY_AFTER_S) from error
        try:
            self._receive(START_LIMIT_S)
        except (LostError, LateError) as error:
            self.end()
            text = f"the worker process does not come up: {error} ({self._ending()})"
            raise NotReadyError(text, retry_after_s=RETRY_AFTER_S) from error

    def __repr__(self) -> str:
        return f"<WorkerProcess pid={self.pid}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, kind: FrameKind, job: bytes) -> tuple[FrameKind, bytearray]:
        """The frame that answers a job of that kind.

        Raises:
            LostError: the process ended; it is of no more use.
            LateError: no answer within the limit; it is of no more use.
        """
        self._connection.settimeout(self._limit_s)
        try:
            send(self._connection, kind, job)
        except TimeoutError:
            raise LateError from None
        except OSError as error:
            raise LostError(str(error)) from None
        return self._receive(self._limit_s)

    def kill(self) -> None:
        """Kill it, from any thread; an `ask` that waits in another thread raises LostError."""
        self._process.kill()

    def end(self) -> None:
        """End it, reap it and close the socket. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _receive(self, limit_s: float) -> tuple[FrameKind, bytearray]:
        """The next frame; waited for in slices: while this process stands still, none of them pass."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not any(poll.poll(limit_s / _NUM_SLICES * 1000) for _ in range(_NUM_SLICES)):
            raise LateError(f"no answer in {limit_s:g} s")
        self._connection.settimeout(limit_s)
        try:
            return receive(self._connection)
        except TimeoutError:
            raise LateError(f"half an answer in {limit_s:g} s") from None
        except (OSError, FrameError) as error:
            raise LostError(str(error)) from None

    def _ending(self) -> str:
        status = self._process.returncode or 0
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
        return f"exit status {status}"


class _WorkerPlace:
    """A thread with one process at a time, started when needed and replaced when lost, for one job at a time.

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
        return f"<_WorkerPlace {self._process!r}>"

    @property
    def pid(self) -> int:
        """Of its process; 0: there is none."""
        process = self._process
        return process.pid if process else 0

    def start(self) -> WorkerProcess:
        """Its process, started if there is none.

        Raises:
            NotReadyError: it cannot be started, or the pool is closed.
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

    def do(self, task: _Task[T]) -> T:
        """The answer to a task's job. Raises what the future of `WorkerPool.submit` does."""
        job = task.job
        kind, body = _encoded(job)
        for _ in range(NUM_ATTEMPTS):
            process = self.start()
            if task.is_stopped.is_set():
                break
            try:
                frame = process.ask(kind, body)
            except LostError:
                self.end()
            except LateError:
                self.end()
                text = f"{job.label} did not end within {self._limit_s:g} s and was stopped; {job.remedy}"
                raise WorkLimitError(text, param=job.param, limit_s=self._limit_s) from None
            else:
                return _decoded(frame, task.answer)
        if task.is_stopped.is_set():
            raise RequestCancelledError(f"{job.label} was stopped: nobody waits for it", param=job.param)
        text = f"{job.label}: the process that worked on it ended {NUM_ATTEMPTS} times before it answered"
        raise WorkerLostError(text, param=job.param)

    def end(self) -> None:
        """End its process, if there is one; the next job starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def kill(self) -> None:
        """Kill its process, if there is one; may be called from any thread while a job runs."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Kill its process and start no other; may be called from any thread while a job runs."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()


class WorkerPool:
    """Does jobs in processes that can be ended. Safe to use from any thread and event loop.

    Args:
        bounds: how much it may take.
    """

    def __init__(self, bounds: Bounds = DEFAULT) -> None:
        self.bounds = bounds
        self._changed = threading.Condition()
        self._waiting: list[_Task[Any]] = []
        self._running: Counter[str] = Counter()  # by group
        self._places: dict[_WorkerPlace, threading.Thread] = {}
        self._begun: dict[Future[Any], tuple[_Task[Any], _WorkerPlace]] = {}
        self._is_closed = False
        self._num_releases = 0

    def __repr__(self) -> str:
        return f"<WorkerPool {self.stats()}>"

    def stats(self) -> dict[str, int]:
        """Places that are open, jobs that run and that wait."""
        with self._changed:
            return {
                "places": len(self._places),
                "running": self._running.total(),
                "waiting": len(self._waiting),
            }

    def pids(self) -> Sequence[int]:
        """Ids of the processes that live."""
        with self._changed:
            return [place.pid for place in self._places if place.pid]

    def warm(self) -> None:
        """Start a process if there is none, without waiting for it: the first job finds it there."""
        with self._changed:
            if not self._places and not self._is_closed:
                with contextlib.suppress(NotReadyError):  # the first job tries again, and gets the error
                    self._open_place()

    def submit(self, job: WorkerJob, answer: type[T], *, group: str = "") -> Future[T]:
        """Do a job; cancelling the future takes it out of the queue, `stop` ends it in any case.

        The future's error is a WorkLimitError where the job takes longer, or more memory, than it may; a
        WorkerLostError where the processes that did it ended; NotReadyError where none can be started; or the
        StokerError that the work itself raised.

        Args:
            job: what to do.
            answer: type of the answer.
            group: jobs that share their places, such as those of one caller.

        Raises:
            QueueFullError: as many jobs of the group wait as may.
            NotReadyError: the pool is closed, or the machine refuses a thread.
        """
        task = _Task(job, answer, group, Future(), threading.Event())
        with self._changed:
            if self._is_closed:
                raise NotReadyError("the runtime is closed")
            self._waiting = [other for other in self._waiting if not other.future.cancelled()]
            num_waiting = sum(other.group == group for other in self._waiting)
            if num_waiting >= self.bounds.max_waiting:
                text = f"{num_waiting} requests wait for {job.label} or the like, no more are taken"
                raise QueueFullError(text, retry_after_s=RETRY_AFTER_S)
            self._waiting.append(task)
            num_idle = len(self._places) - self._running.total()
            if len(self._ready_tasks()) > num_idle and len(self._places) < self.bounds.num_places:
                try:
                    self._open_place()
                except NotReadyError:
                    if not self._places:  # else one of them does it
                        self._waiting.remove(task)
                        raise
            self._changed.notify()
        return task.future

    def stop(self, future: Future[Any]) -> None:
        """End the job that this future is of, in the queue or at work; the next job finds another process."""
        if future.cancel():
            return
        with self._changed:
            task, place = self._begun.get(future, (None, None))
            if task is not None and place is not None:
                task.is_stopped.set()
                place.kill()

    def release(self) -> None:
        """End the processes that have nothing to do; the next job starts one again."""
        with self._changed:
            self._num_releases += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End every process, and every job with NotReadyError. Idempotent; blocks for some milliseconds."""
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
            places = dict(self._places)
            for place in places:
                place.close()
            self._changed.notify_all()
        for task in waiting:
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(NotReadyError("the runtime is closed"))
        for thread in places.values():
            thread.join()

    # ------------------------------------------------------------ the queue; the lock is held

    def _open_place(self) -> None:
        place = _WorkerPlace(self.bounds.limit_s, self.bounds.max_bytes)
        thread = threading.Thread(target=self._serve, args=(place,), name="stoker-worker", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            text = f"no thread for a worker process can be started: {error}"
            raise NotReadyError(text, retry_after_s=RETRY_AFTER_S) from error
        self._places[place] = thread

    def _ready_tasks(self) -> list[_Task[Any]]:
        """Those that may be begun now: as many of each group as may run beside those that do."""
        taken = Counter(self._running)
        ready = []
        for task in self._waiting:
            if taken[task.group] < self.bounds.max_of_group:
                taken[task.group] += 1
                ready.append(task)
        return ready

    # ------------------------------------------------------------ the thread of a place

    def _serve(self, place: _WorkerPlace) -> None:
        with contextlib.suppress(NotReadyError):  # the next job tries again, and gets the error
            place.start()
        while (task := self._next(place)) is not None:
            if task.future.set_running_or_notify_cancel():
                _do(task, place)
            with self._changed:
                self._running -= Counter((task.group,))
                self._begun.pop(task.future, None)
        place.end()

    def _next(self, place: _WorkerPlace) -> _Task[Any] | None:
        """Wait for a task that may be begun; None: none came for `idle_s` or until `release` or `close`."""
        with self._changed:
            num_releases = self._num_releases
            self._changed.wait_for(
                lambda: self._is_closed or self._ready_tasks() or self._num_releases > num_releases,
                self.bounds.idle_s,
            )
            ready = [] if self._is_closed else self._ready_tasks()
            if not ready:
                self._places.pop(place, None)
                return None
            self._waiting.remove(ready[0])
            self._running[ready[0].group] += 1
            self._begun[ready[0].future] = (ready[0], place)
            return ready[0]


def _do(task: _Task[Any], place: _WorkerPlace) -> None:
    try:
        task.future.set_result(place.do(task))
    except StokerError as error:
        task.future.set_exception(error)
    except Exception as error:  # a bug must neither end the thread nor leave the caller waiting
        log.exception("%r failed on a job", place)
        task.future.set_exception(EngineError(f"{type(error).__name__}: {error}"))


def _encoded(job: WorkerJob) -> tuple[FrameKind, bytes]:
    try:
        try:
            kind, body = FrameKind.JOB, msgspec.msgpack.encode(job)
        except OverflowError:
            kind, body = FrameKind.JSON_JOB, msgspec.json.encode(job)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{job.label} takes JSON values only: {error}", param=job.param) from error
    if len(body) > MAX_BODY_BYTES:
        text = f"{job.label}: {len(body)} bytes are too many, at most {MAX_BODY_BYTES} are taken"
        raise WorkLimitError(text, param=job.param, limit_bytes=MAX_BODY_BYTES)
    return kind, body


def _decoded(frame: tuple[FrameKind, bytearray], answer: type[T]) -> T:
    kind, body = frame
    if kind is FrameKind.ERROR:
        raise error_from_info(msgspec.msgpack.decode(body, type=ErrorInfo))
    return msgspec.msgpack.decode(body, type=answer)


def _started(limit_s: float, max_bytes: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        try:
            return ours, subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD, str(descriptor), str(limit_s), str(max_bytes)],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=2,  # our stdout belongs to the application
                start_new_session=True,  # the terminal's Ctrl-C and hang-up are for this program
            )
        except BaseException:
            ours.close()
            raise
