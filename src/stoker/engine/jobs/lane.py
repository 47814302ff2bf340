"""A lane of work off the loop: a few threads that begin jobs in the order they came.

Jobs of a lane run beside each other up to its bound. One that takes longer than the lane's patience no longer
counts: the next one begins beside it, on a thread of its own, so that a slow job delays itself only. How many
may be overdue at once is bounded too. The caller knows what a job is and reports how it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

STACK_BYTES = 16 * 2**20
"""Of a thread: what std::regex takes for the longest run that is read at once, four times over."""
log = logging.getLogger(__name__)
_starting = threading.Lock()  # the size of a stack is set for the whole process


class Lane:
    """Threads of one kind of work.

    Args:
        name: of the threads.
        num_places: jobs that run at once and in order.
        max_overdue: jobs beside them that have taken longer than `patience_s`.
        patience_s: how long a job holds the next one up.
    """

    def __init__(self, name: str, num_places: int, max_overdue: int, patience_s: float) -> None:
        self._name = name
        self._num_places = num_places
        self._max_threads = num_places + max_overdue
        self._patience_s = patience_s
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: dict[Future[Any], float] = {}
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False
        self._moved = threading.Condition()

    def __repr__(self) -> str:
        return f"<Lane {self._name}: {len(self._running)} run, {len(self._waiting)} wait>"

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have `work` done on a thread.

        Raises:
            RuntimeError: the lane has no thread yet, and the system starts none.
        """
        future: Future[Any] = Future()
        with self._moved:
            assert not self._is_closed, f"{self!r} is closed"
            if self._num_idle <= len(self._waiting) and len(self._threads) < self._max_threads:
                self._start_thread()
            self._waiting.append((future, work))
            self._moved.notify()
        return future

    def withdraw(self, future: Future[Any]) -> bool:
        """Take a job out that has not begun, with all that it holds; returns False for one that has begun."""
        with self._moved:
            if not future.cancel():
                return False
            self._waiting = deque(job for job in self._waiting if job[0] is not future)
            self._moved.notify_all()
        return True

    def is_jammed(self, before_s: float) -> bool:
        """Whether every thread runs a job from before that time (`time.monotonic`), so that none begins."""
        with self._moved:
            began = list(self._running.values())
            return len(began) == self._max_threads and max(began) < before_s

    def settle(self) -> None:
        """Return when nothing runs and nothing waits."""
        with self._moved:
            self._moved.wait_for(lambda: not self._waiting and not self._running)

    def close(self, wait_s: float) -> None:
        """Drop what waits, and let what runs end for so long; its threads do not keep the process alive."""
        with self._moved:
            self._is_closed = True
            for future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
            self._moved.notify_all()
            self._moved.wait_for(lambda: not self._running, wait_s)

    def _start_thread(self) -> None:
        name = f"stoker-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        with _starting:
            usual = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise
                log.warning("%r goes on with %d threads: %s", self, len(self._threads), error)
                return
            finally:
                threading.stack_size(usual)
        self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            future, work = job
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the future carries it
                future.set_exception(error)
            with self._moved:
                del self._running[future]
                self._moved.notify_all()
            del job, future, work  # nothing of a job is kept until the next one

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The next job, as soon as it may begin; None: the lane is closed."""
        with self._moved:
            self._num_idle += 1
            try:
                while not self._is_closed:
                    wait_s = self._wait_s(time.monotonic())
                    if wait_s == 0:
                        future, work = self._waiting.popleft()
                        if future.set_running_or_notify_cancel():
                            self._running[future] = time.monotonic()
                            return future, work
                    else:
                        self._moved.wait(wait_s)
                return None
            finally:
                self._num_idle -= 1

    def _wait_s(self, now: float) -> float | None:
        """Seconds until the first that waits may begin, as far as is known; None: until something moves."""
        if not self._waiting:
            return None
        due_s = sorted(began + self._patience_s - now for began in self._running.values())
        in_time = [wait_s for wait_s in due_s if wait_s > 0]
        return 0.0 if len(in_time) < self._num_places else in_time[0]
