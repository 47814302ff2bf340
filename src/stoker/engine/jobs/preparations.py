"""What is being prepared: requests turned into live ones, and questions about text (SPEC Q2).

Owns the lanes they are prepared in and each job's end: its result is posted to the inbox, or the error of
one that took too long, or nothing where the request has ended meanwhile. A native call cannot be stopped: a
job that is given up goes on until it returns and keeps its thread; the lane bounds how many such jobs it has.

Only the loop's thread calls; jobs run on the lanes' threads and touch their own state alone.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from stoker.engine.inbox import Released
from stoker.engine.jobs.lane import Lane
from stoker.errors import EngineError, MachineSetupError, PreparationTimeoutError, StokerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from stoker.engine.inbox import Inbox, Posted
    from stoker.engine.jobs.prepare import PrepContext

QUICK_PATIENCE_S = 0.25
"""How long a job of the quick lane delays those behind it; they keep their order meanwhile."""
NUM_LONG = 2
"""Long texts and new grammars at once: of two cores one is left for what runs."""
MAX_OVERDUE = 3
"""Jobs of a lane that may be over its patience beside those in time."""
CLOSE_S = 5.0
"""How long jobs may go on when the engine ends, those of both lanes together."""


class Preparation:
    """One job.

    Attributes:
        owner: whose vocabulary it uses.
        lane: where it waits and runs.
        is_over: it uses nothing of its model any more.
        began_s: when it began, by `time.monotonic`; None: it waits.
    """

    def __init__(
        self, owner: PrepContext, lane: Lane, inbox: Inbox, failed: Callable[[StokerError], Posted]
    ) -> None:
        self.owner = owner
        self.lane = lane
        self.is_over = False
        self.began_s: float | None = None
        self._future: Future[None] | None = None
        self._inbox = inbox
        self._failed = failed
        self._is_told = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Preparation for {self.owner.model} over={self.is_over} told={self._is_told}>"

    @property
    def is_open(self) -> bool:
        """Whether its result is still to be posted."""
        return not self._is_told

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
        if not self._tell(post):
            self._inbox.put(Released.RELEASED)

    def give_up(self, error: StokerError | None = None) -> None:
        """Post no result but this `error`, or nothing; a job that has not begun never begins."""
        self.withdraw()
        self._tell(None if error is None else self._failed(error))

    def withdraw(self) -> None:
        """Leave the lane, if it has not begun."""
        if self._future is not None and self.lane.withdraw(self._future):
            self.is_over = True

    def _tell(self, post: Posted | None) -> bool:
        """Post what came of it, unless that was told before; returns whether it was not."""
        with self._lock:
            is_first, self._is_told = not self._is_told, True
        if is_first and post is not None:
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
        self._jobs = [other for other in self._jobs if not other.is_over]
        self._jobs.append(job)
        job.submit(work)
        return job

    def uses(self, owner: PrepContext) -> bool:
        """Whether a job uses that model, one that was given up included."""
        return any(job.owner is owner and not job.is_over for job in self._jobs)

    def next_due_s(self, now: float) -> float | None:
        """When the first may have taken too long: one that has not begun cannot sooner than this."""
        due = [(now if job.began_s is None else job.began_s) + self._max_s for job in self._open()]
        return min(due, default=None)

    def expire(self, now: float) -> None:
        """Fail those that take too long, and those that wait in a lane where every job takes too long."""
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

    def _too_long(self) -> PreparationTimeoutError:
        return PreparationTimeoutError(
            f"turning the request into tokens took over max_prepare_s {self._max_s:g} s;"
            " send less text or a simpler constraint, or raise max_prepare_s",
            max_prepare_s=self._max_s,
        )
