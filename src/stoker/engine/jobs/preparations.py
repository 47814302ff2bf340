"""What is being prepared: requests that are tokenised, and questions about text (SPEC Q2).

Owns the lanes they are prepared in and how each ends: its result is posted to the inbox, or the error of one
that took too long, or nothing where the request has ended meanwhile. A native call cannot be stopped: what is
given up goes on until it returns and keeps its thread; the lane bounds how many such jobs it has.

Only the loop's thread calls; jobs run on the lanes' threads and touch their own state alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from stoker.engine.inbox import Prepared, PrepareFailed, Released
from stoker.engine.jobs.prepare import answer, is_quick, is_quick_question, prepare
from stoker.errors import EngineError, MachineSetupError, PreparationTimeoutError, StokerError
from stoker.ipc.events import Reply

if TYPE_CHECKING:
    from stoker.engine.inbox import Inbox, Posted
    from stoker.engine.jobs.prepare import PrepContext
    from stoker.ipc.commands import Submit, TextQuestion

STACK_BYTES = 16 * 2**20
"""Of a thread: what std::regex takes for the longest run that is read at once, four times over."""
log = logging.getLogger(__name__)
_starting = threading.Lock()  # the size of a stack is set for the whole process
QUICK_PATIENCE_S = 0.25
"""How long a job of the quick lane delays those behind it; they keep their order meanwhile."""
NUM_LONG = 2
"""Long texts and new grammars at once: of two cores one is left for what runs."""
MAX_OVERDUE = 3
"""Jobs of a lane that may be over its patience beside those in time."""
CLOSE_S = 5.0
"""How long jobs may go on when the engine ends, those of both lanes together."""


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
        """Drop what waits, and give what runs so long to end; the threads do not keep the process alive."""
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


class Preparation:
    """One job.

    Attributes:
        owner: whose vocabulary it uses.
        lane: where it waits and runs.
        is_over: it uses nothing of its model any more.
        is_request: its result is a request, and not the answer to a question.
        began_s: when it began, by `time.monotonic`; None: it waits.
    """

    def __init__(
        self, owner: PrepContext, lane: Lane, inbox: Inbox, failed: Callable[[StokerError], Posted]
    ) -> None:
        self.owner = owner
        self.lane = lane
        self.is_over = self.is_request = False
        self.began_s: float | None = None
        self._future: Future[None] | None = None
        self._inbox = inbox
        self._failed = failed
        self._is_posted = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Preparation for {self.owner.model} over={self.is_over} posted={self._is_posted}>"

    @property
    def is_open(self) -> bool:
        """Whether its result is still to be posted."""
        return not self._is_posted

    def submit(self, work: Callable[[], Posted]) -> None:
        """Enter the lane; where that has no thread the job ends with MachineSetupError."""
        try:
            self._future = self.lane.submit(lambda: self._run(work))
        except RuntimeError as error:
            self.is_over = True
            self.give_up(MachineSetupError(f"no thread to prepare the request: {error}", retry_after_s=1.0))

    def _run(self, work: Callable[[], Posted]) -> None:
        """Do it and tell what came of it; on a lane's thread."""
        self.began_s = time.monotonic()
        post: Posted
        try:
            post = work()
        except StokerError as error:
            post = self._failed(error)
        except Exception as error:  # noqa: BLE001 - a bug must end one request, not the loop
            post = self._failed(EngineError(f"{type(error).__name__}: {error}"))
        self.is_over = True
        if not self._post(post):
            self._inbox.put(Released.RELEASED)

    def give_up(self, error: StokerError | None = None) -> None:
        """Post no result but this `error`, or nothing; a job that has not begun never begins."""
        self.withdraw()
        self._post(None if error is None else self._failed(error))

    def withdraw(self) -> None:
        """Leave the lane, if it has not begun."""
        if self._future is not None and self.lane.withdraw(self._future):
            self.is_over = True

    def _post(self, post: Posted | None) -> bool:
        """Post what came of it, unless it was posted before; returns whether it was not."""
        with self._lock:
            is_first, self._is_posted = not self._is_posted, True
        if is_first and post is not None:
            with self._inbox.interrupt.arrival():
                self._inbox.put(post)
        return is_first


class Preparations:
    """Every job that is not over.

    Args:
        inbox: where results go.
        max_prepare_s: how long one may take from its begin.
    """

    def __init__(self, inbox: Inbox, max_prepare_s: float) -> None:
        self._inbox = inbox
        self._max_s = max_prepare_s
        self._quick = Lane("prep", 1, MAX_OVERDUE, QUICK_PATIENCE_S)
        self._long = Lane("prep-long", NUM_LONG, MAX_OVERDUE, max_prepare_s)
        self._lanes = (self._quick, self._long)
        self._jobs: list[Preparation] = []

    def __repr__(self) -> str:
        return f"<Preparations {self._quick!r} {self._long!r}>"

    def prepare(self, submit: Submit, context: PrepContext, arrival_s: float) -> Preparation:
        """Tokenise a request; posts Prepared or PrepareFailed, unless it is given up."""

        def failed(error: StokerError) -> Posted:
            return PrepareFailed(submit.request_id, error, context)

        def work() -> Posted:
            return Prepared(prepare(submit, context, arrival_s), context)

        job = self.begin(work, failed, context, is_quick=is_quick(submit.request, context))
        job.is_request = True
        return job

    def answer(self, ask: TextQuestion, context: PrepContext) -> None:
        """Answer a question about text; posts Reply."""

        def work() -> Reply:
            return Reply(call_id=ask.call_id, value=answer(ask, context))

        def failed(error: StokerError) -> Posted:
            return Reply(call_id=ask.call_id, error=error.info())

        self.begin(work, failed, context, is_quick=is_quick_question(ask))

    def begin(
        self,
        work: Callable[[], Posted],
        failed: Callable[[StokerError], Posted],
        owner: PrepContext,
        *,
        is_quick: bool,
    ) -> Preparation:
        """Have `work` done and what it returns posted, or what `failed` makes of its error.

        Args:
            work: the job.
            failed: the post of an error.
            owner: whose vocabulary it uses.
            is_quick: it takes some hundredths of a second: such ones end in the order they began.
        """
        job = Preparation(owner, self._quick if is_quick else self._long, self._inbox, failed)
        self._forget_ended()
        self._jobs.append(job)
        job.submit(work)
        return job

    def num_quick(self, owner: PrepContext) -> int:
        """How many requests for that model are on their way that take some hundredths of a second at most."""
        quick = (job for job in self._jobs if job.owner is owner and job.lane is self._quick)
        return sum(job.is_request and job.is_open and not job.is_over for job in quick)

    def uses(self, owner: PrepContext) -> bool:
        """Whether a job uses that model, one that was given up included."""
        return any(job.owner is owner and not job.is_over for job in self._jobs)

    def next_due_s(self, now: float) -> float | None:
        """When the first may have taken too long: one that has not begun cannot sooner than this."""
        due = [(now if job.began_s is None else job.began_s) + self._max_s for job in self._open()]
        return min(due, default=None)

    def expire(self, now: float) -> None:
        """Fail those that take too long, and those that wait in a lane where every job takes too long."""
        if not self._jobs:
            return  # as in most turns
        self._forget_ended()
        begun_before_s = now - self._max_s
        jammed = [lane for lane in self._lanes if lane.is_jammed(begun_before_s)]
        for job in self._open():
            waits_in_vain = job.began_s is None and job.lane in jammed
            if waits_in_vain or (job.began_s is not None and job.began_s <= begun_before_s):
                job.give_up(self._too_long())

    def settle(self) -> None:
        """Return when nothing is prepared."""
        for lane in self._lanes:
            lane.settle()

    def close(self) -> None:
        """Drop what waits; what runs has a little time to end."""
        for job in self._jobs:
            job.withdraw()
        until_s = time.monotonic() + CLOSE_S
        for lane in self._lanes:
            lane.close(max(0.0, until_s - time.monotonic()))

    def _open(self) -> list[Preparation]:
        return [job for job in self._jobs if job.is_open and not job.is_over]

    def _forget_ended(self) -> None:
        self._jobs = [job for job in self._jobs if not job.is_over]

    def _too_long(self) -> PreparationTimeoutError:
        return PreparationTimeoutError(
            f"turning the request into tokens took over max_prepare_s {self._max_s:g} s;"
            " send less text or a simpler constraint, or raise max_prepare_s",
            max_prepare_s=self._max_s,
        )
