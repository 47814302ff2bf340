"""Tells a hung engine from a busy one, and how long to wait before the next start.

Pure: time arrives as an argument. Killing and restarting is the host's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.ipc.events import Heartbeat

CLIENT_STALL_S = 1.0
"""A check this late means that the front itself stood still, and says nothing about the engine."""

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 2.0
HEALTHY_S = 10.0


class Watchdog:
    """Judges one life of the engine by its heartbeats.

    Args:
        limit_s: silence after which the engine counts as hung.
        now: seconds on a monotonic clock.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._last_sign = now
        self._last_check = now
        self._step_excess_s = 0.0
        self.stalled_s = 0.0
        """How long the front itself stood still, as shown by checks that came late."""

    def __repr__(self) -> str:
        return f"<Watchdog limit_s={self._limit_s} excess_s={self._step_excess_s:.1f}>"

    @property
    def period_s(self) -> float:
        """How often `check` wants to be called."""
        return min(0.5, self._limit_s / 4)

    def sign(self, now: float) -> None:
        """Something arrived from the engine: it is not silent."""
        self._last_sign = now

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat arrived; it also tells how the running step is doing."""
        self._last_sign = now
        over_s = heartbeat.step_s - heartbeat.step_limit_s
        self._step_excess_s = over_s if heartbeat.step_s > 0 else 0.0

    def check(self, now: float) -> str | None:
        """Why the engine has to be killed, or None."""
        late_s = now - self._last_check - self.period_s
        self._last_check = now
        if late_s > CLIENT_STALL_S:  # what was heard before says nothing any more
            self.stalled_s += late_s
            self._last_sign, self._step_excess_s = now, 0.0
            return None
        silence_s = now - self._last_sign
        if silence_s > self._limit_s:
            return f"no sign of life for {silence_s:.1f} s (limit {self._limit_s:g} s)"
        if self._step_excess_s > 0:
            return f"a step is {self._step_excess_s:.1f} s over its limit"
        return None


class Backoff:
    """Seconds to wait before a restart: doubling, and forgotten once the engine proved healthy."""

    def __init__(self) -> None:
        self._delay_s = FIRST_DELAY_S

    def __repr__(self) -> str:
        return f"<Backoff delay_s={self._delay_s}>"

    def reset(self) -> None:
        """The engine delivered a token: it works."""
        self._delay_s = FIRST_DELAY_S

    def after_life(self, lived_s: float) -> float:
        """The delay that follows a life of `lived_s` seconds of serving."""
        if lived_s >= HEALTHY_S:
            self.reset()
        delay_s = self._delay_s
        self._delay_s = min(LAST_DELAY_S, delay_s * 2)
        return delay_s
