"""Whether a prefix is got from a shared store or computed, and when the store is not asked at all (SPEC C19).

Pure. Both sides are measured: what getting takes by `StoreSpeed`, what computing takes by the model's steps.
After failures the store is left alone for a growing while.
"""

from __future__ import annotations

LEAST_GAIN = 1.5
"""Times as long as getting a state that computing its tokens has to take: it is put into cells too."""
MAX_WAIT_S = 2.0
"""The longest that a request waits for the store, whatever is measured."""
FIRST_LATENCY_S = 0.02
FIRST_BYTES_PER_S = 100e6
"""What a store is held for before anything was measured: one near by, over a gigabit."""
SMALL_BYTES = 1 << 18
"""A transfer of fewer tells of the latency, one of more of the bandwidth."""
_FOLLOW = 0.4
MAX_FAILURES = 3
"""In a row; each may have cost a request what `rule.wait_limit_s` allows."""
FIRST_PAUSE_S = 5.0
LAST_PAUSE_S = 300.0


class StoreSpeed:
    """How quick a store is, by moving averages of its transfers.

    Attributes:
        latency_s: of a call.
        bytes_per_s: behind it.
    """

    def __init__(self) -> None:
        self.latency_s = FIRST_LATENCY_S
        self.bytes_per_s = FIRST_BYTES_PER_S

    def __repr__(self) -> str:
        return f"<StoreSpeed {self.latency_s * 1000:.1f} ms, {self.bytes_per_s / 1e6:.1f} MB/s>"

    def learn(self, num_bytes: int, took_s: float) -> None:
        """So many bytes came, or went, in one call."""
        if took_s <= 0.0:
            return
        if num_bytes < SMALL_BYTES:
            self.latency_s += _FOLLOW * (took_s - self.latency_s)
            return
        behind_s = max(took_s - self.latency_s, took_s / 10)
        self.bytes_per_s += _FOLLOW * (num_bytes / behind_s - self.bytes_per_s)

    def get_s(self, num_bytes: int) -> float:
        """Seconds that getting so many bytes takes."""
        return self.latency_s + num_bytes / self.bytes_per_s


def wait_limit_s(get_s: float, compute_s: float | None) -> float:
    """Seconds that a request waits for the store at most; 0: computing is about as quick.

    What is waited in vain is at most what computing takes, and at most `MAX_WAIT_S`.

    Args:
        get_s: seconds that getting the state takes.
        compute_s: seconds that computing the tokens takes that it would save; None: nothing was measured.
    """
    if compute_s is None:
        return MAX_WAIT_S if get_s <= MAX_WAIT_S else 0.0
    if LEAST_GAIN * get_s > min(compute_s, MAX_WAIT_S):
        return 0.0
    return min(compute_s, MAX_WAIT_S)


class StoreBreaker:
    """Of one store.

    Attributes:
        problem: why it is not asked; empty: it is.
        until_s: when it is tried again.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.until_s = 0.0
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S

    def __repr__(self) -> str:
        return f"<StoreBreaker {self.problem or 'closed'}>"

    @property
    def is_open(self) -> bool:
        """Whether the store is left alone, but for one trial when that is due."""
        return bool(self.problem)

    def worked(self) -> None:
        """The store did what it was asked."""
        self.problem, self.until_s, self._num_failures, self._pause_s = "", 0.0, 0, FIRST_PAUSE_S

    def failed(self, reason: str, now: float) -> None:
        """It did not."""
        self._num_failures += 1
        if self.problem:
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        if self.problem or self._num_failures >= MAX_FAILURES:
            self.problem, self.until_s = reason, now + self._pause_s
