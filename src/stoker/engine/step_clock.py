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


class StepClock:
    """Times each native step.

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

    def __repr__(self) -> str:
        return f"<StepClock {self.num_steps} steps, {(self._token_s or 0.0) * 1000:.2f} ms a token at most>"

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
        took_s = self.now() - self._running[0]
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
        """Seconds the running step has taken and may take; (0, watchdog_s) between steps."""
        running = self._running
        if running is None:
            return 0.0, self.watchdog_s
        started_s, limit_s = running
        return self.now() - started_s, limit_s
