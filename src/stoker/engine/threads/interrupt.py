"""Ends a long step as soon as something arrives that somebody waits for (SPEC Q27).

Whoever puts into the inbox reports an arrival; the loop has a step watched while it computes it. Under one
lock an arrival either comes before the step, which then does not begin, or ends it. Apart because the inbox
and the runners of steps share it, and threads of several owners call it.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.backends.protocol.extensions import StepAbort


def _always() -> bool:
    return True


class Interrupt:
    """The step that arrivals end.

    Attributes:
        has_arrived: something has arrived that the loop has not looked at.
    """

    def __init__(self) -> None:
        self.has_arrived = False
        self._lock = RLock()  # a signal handler may put while its thread does
        self._step: StepAbort | None = None
        self._may_end = _always
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Interrupt has_arrived={self.has_arrived} watches={self._step is not None}>"

    @contextmanager
    def arrival(self) -> Iterator[None]:
        """Put into the inbox inside the block, from any thread; afterwards a step that is watched may end."""
        with self._lock:
            self.has_arrived = True
            yield
            if self._step is not None and self._may_end():
                self._step.abort_step()

    def looked(self) -> None:
        """The loop is about to take what has arrived."""
        with self._lock:
            self.has_arrived = False

    def watch(self, step: StepAbort, may_end: Callable[[], bool] | None = None) -> bool:
        """Let arrivals end the step that is about to begin; False: something has arrived already.

        Args:
            step: ends it.
            may_end: whether an arrival of this moment does; None: each. Called on any thread.
        """
        with self._lock:
            if self.has_arrived or self._is_closed:
                return False
            self._step, self._may_end = step, may_end or _always
        return True

    def unwatch(self) -> None:
        """The step is over, or was ended; no other is ended by what has arrived."""
        with self._lock:
            step, self._step = self._step, None
            if step is not None:
                step.allow_steps()

    def close(self) -> None:
        """Let no further step be watched: the engine is about to end."""
        self._is_closed = True
