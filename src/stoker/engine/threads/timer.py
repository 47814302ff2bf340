"""How long the running native step has taken, and how long it may (SPEC L3, watchdog).

Written by the loop thread, read by the heartbeat thread. A step's limit follows the cost per token that
was measured, so that a slow machine is not taken for a hung one.
"""

from __future__ import annotations

import time

UNMEASURED_STEP_S = 60.0
"""What the first step may take, before any was measured: weights may still come from the disk."""
SLACK = 10.0
"""A step may take that many times its prediction, and never less than the watchdog's time."""
READ_EVERY_S = 0.5
STALL_S = 1.0
"""A reading this late means that the process stood still: it was stopped, or the whole machine was."""


class StepTimer:
    """Times each native step. Time in which the process stood still does not count.

    Attributes:
        num_steps: steps that succeeded.
        busy_s: seconds spent in them.
    """

    def __init__(self, watchdog_s: float) -> None:
        self.watchdog_s = watchdog_s
        self.num_steps = 0
        self.busy_s = 0.0
        self._token_s: float | None = None
        self._running: tuple[float, float] | None = None
        self._read_s: float | None = None
        self._stalled = (0.0, 0.0)  # the start of a step, and how long it has stood still

    def __repr__(self) -> str:
        return f"<StepTimer {self.num_steps} steps, {(self._token_s or 0.0) * 1000:.2f} ms a token at most>"

    def begin(self, num_tokens: int) -> None:
        """A native step over `num_tokens` starts."""
        predicted_s = UNMEASURED_STEP_S / SLACK if self._token_s is None else num_tokens * self._token_s
        self._running = (self.now(), max(self.watchdog_s, SLACK * predicted_s))

    def end(self, num_tokens: int) -> float:
        """It succeeded; its cost per token is remembered, large ones fade slowly.

        Returns:
            Seconds it took.
        """
        assert self._running is not None, "a step ended that had not begun"
        took_s = self._spent_s(self._running[0], self.now())
        self._running = None
        token_s = took_s / num_tokens
        self._token_s = max(token_s, 0.99 * (self._token_s or 0.0))
        self.num_steps += 1
        self.busy_s += took_s
        return took_s

    def abandon(self) -> None:
        """It failed."""
        self._running = None

    @staticmethod
    def now() -> float:
        """The engine's clock, in seconds."""
        return time.monotonic()

    def read(self) -> tuple[float, float]:
        """Seconds the running step has taken and may take; (0, watchdog_s) between steps.

        Called every READ_EVERY_S by one thread, or never.
        """
        now, running = self.now(), self._running
        if running is None:
            self._read_s = now
            return 0.0, self.watchdog_s
        started_s, limit_s = running
        spent_s = self._spent_s(started_s, now)
        self._stalled = (started_s, now - started_s - spent_s)
        self._read_s = now
        return spent_s, limit_s

    def _spent_s(self, started_s: float, now: float) -> float:
        """How long a step has run: a reading that is overdue shows that the whole process has not."""
        step_s, stalled_s = self._stalled
        if step_s != started_s:
            stalled_s = 0.0
        if self._read_s is not None and (late_s := now - self._read_s - READ_EVERY_S) > STALL_S:
            stalled_s += late_s
        return max(0.0, now - started_s - stalled_s)
