"""Whether a machine that has failed is asked again: back-off, then one trial. Pure: time is an argument."""

from __future__ import annotations

from enum import StrEnum

FIRST_S = 0.25
LAST_S = 10.0
MAX_FAILED_LOOKS = 2
"""In a row; a request that a machine loses says more, and one of these is enough."""
NOT_ASKED = "it was not asked yet"


class Gauge(StrEnum):
    """How a machine is trusted."""

    CLOSED = "closed"  # as any
    OPEN = "open"  # it gets nothing
    HALF_OPEN = "half_open"  # it answers again, and one request tries it


class Breaker:
    """Of one machine.

    Attributes:
        state: how it is trusted.
        reason: why it gets nothing; empty: it does.
        is_refused: it answers, and lets nobody in who has no other key.
    """

    def __init__(self) -> None:
        self.state = Gauge.OPEN  # until it has answered once
        self.reason = NOT_ASKED
        self.is_refused = False
        self._trial: object = None
        self._pause_s = FIRST_S
        self._num_failed = MAX_FAILED_LOOKS
        self._has_worked = False

    def __repr__(self) -> str:
        return f"<Breaker {self.state} {self.reason}>"

    @property
    def takes(self) -> bool:
        """Whether it may be given a request."""
        return self.state is Gauge.CLOSED or (self.state is Gauge.HALF_OPEN and self._trial is None)

    @property
    def pause_s(self) -> float:
        """Seconds until it is asked again, after a failure."""
        return self._pause_s

    def answered(self) -> None:
        """It has said how it is."""
        self._num_failed, self._pause_s = 0, FIRST_S
        if self.state is Gauge.OPEN:
            self.state = Gauge.HALF_OPEN if self._has_worked else Gauge.CLOSED
            self._trial = None
        self.reason, self.is_refused = "", False

    def silent(self, reason: str) -> None:
        """It was asked how it is, and did not say."""
        self._num_failed += 1
        if self._num_failed >= MAX_FAILED_LOOKS:
            self._fail(reason)
        else:
            self._pause_s = FIRST_S

    def began(self, request: object) -> None:
        """It was given that request, which tries it where it has come back."""
        if self.state is Gauge.HALF_OPEN:
            self._trial = request

    def ended(self, request: object) -> None:
        """That request is not there any more: another tries the machine, if it did and nothing was heard."""
        if request is self._trial:
            self._trial = None

    def worked(self) -> None:
        """A request has heard of it."""
        self._has_worked, self._trial = True, None
        if self.state is Gauge.HALF_OPEN:
            self.state = Gauge.CLOSED

    def lost(self, reason: str) -> None:
        """It has lost a request."""
        self._has_worked = True
        self._num_failed = MAX_FAILED_LOOKS
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        was_open = self.state is Gauge.OPEN
        self._pause_s = min(2 * self._pause_s, LAST_S) if was_open else FIRST_S
        self.state, self.reason = Gauge.OPEN, reason
