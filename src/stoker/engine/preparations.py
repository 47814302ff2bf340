"""What is being prepared: requests turned into live ones, and questions about text (SPEC Q2).

Owns the lanes they are prepared in and each job's end: its result is posted to the inbox, or the error of
one that took too long, or nothing, where nobody waits any more. A native call cannot be ended: a job that is
given up goes on until it returns, in a place that its lane leaves it; how many such there may be is bounded.

Only the loop's thread calls; jobs run on the lanes' threads and touch their own state alone.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from stoker.engine.inbox import Released
from stoker.engine.lane import Lane
from stoker.errors import EngineError, PreparationTimeoutError, StokerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from stoker.engine.inbox import Inbox, Posted
    from stoker.engine.preparation import PrepContext

QUICK_PATIENCE_S = 0.25
"""How long what should be quick holds those behind it up; they keep their order meanwhile."""
NUM_LONG = 2
"""Long texts and new grammars at once: of two cores one is left for what runs."""
MAX_OVERDUE = 3
"""Jobs of a lane that may be over its patience beside those in time."""
CLOSE_S = 5.0
"""How long what runs may go on when the engine ends."""


class Preparation:
    """One job. `is_over`: it uses nothing of its model any more."""

    def __init__(self, owner: PrepContext, inbox: Inbox, failed: Callable[[StokerError], Posted]) -> None:
        self.owner = owner
        self.is_over = False
        self.began_s: float | None = None
        self.future: Future[None] | None = None
        self._inbox = inbox
        self._failed = failed
        self._is_told = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Preparation for {self.owner.model} over={self.is_over} told={self._is_told}>"

    @property
    def is_open(self) -> bool:
        """Whether somebody waits for what comes of it."""
        return not self._is_told

    def run(self, work: Callable[[], Posted]) -> None:
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
        """Nobody waits any more; with an `error` that is told. One that has not begun never begins."""
        if self.future is not None and self.future.cancel():
            self.is_over = True
        self._tell(None if error is None else self._failed(error))

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
        job = Preparation(owner, self._inbox, failed)
        self._jobs = [other for other in self._jobs if not other.is_over]
        self._jobs.append(job)
        job.future = (self._quick if is_quick else self._long).submit(lambda: job.run(work))
        return job

    def uses(self, owner: PrepContext) -> bool:
        """Whether a job uses that model, one that was given up included."""
        return any(job.owner is owner and not job.is_over for job in self._jobs)

    def next_due_s(self, now: float) -> float | None:
        """When the first may have taken too long: one that has not begun cannot sooner than this."""
        due = [(now if job.began_s is None else job.began_s) + self._max_s for job in self._open()]
        return min(due, default=None)

    def expire(self, now: float) -> None:
        """Fail those that have taken too long, and those that no place will be free for."""
        for job in self._open():
            if job.began_s is not None and job.began_s + self._max_s <= now:
                job.give_up(self._too_long())
        if self._quick.is_jammed(now - self._max_s) or self._long.is_jammed(now - self._max_s):
            for job in self._open():
                if job.began_s is None:
                    job.give_up(self._too_long())

    def settle(self) -> None:
        """Return when nothing is prepared."""
        self._quick.settle()
        self._long.settle()

    def close(self) -> None:
        """Drop what waits; what runs has a little time to end."""
        self._quick.close(CLOSE_S)
        self._long.close(CLOSE_S)

    def _open(self) -> list[Preparation]:
        return [job for job in self._jobs if job.is_open and not job.is_over]

    def _too_long(self) -> PreparationTimeoutError:
        return PreparationTimeoutError(
            f"turning the request into tokens took over max_prepare_s {self._max_s:g} s;"
            " send less text or a simpler constraint, or raise max_prepare_s",
            max_prepare_s=self._max_s,
        )
