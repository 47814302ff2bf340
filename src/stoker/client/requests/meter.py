"""The clock of one request: when it was admitted and wrote, and what it waited for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from stoker.ipc.events import Admitted, Delta, Parked, Paused, PrefillProgress, Preparing, Queued, Resumed
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import GapStatus

if TYPE_CHECKING:
    from stoker.ipc.events import RequestEvent
    from stoker.ipc.usage import CacheSource

MIN_TOLD_WAIT_S = 0.5
"""A shorter wait is not worth a word."""
PROGRESS_EVERY_S = 0.5
"""How often others than its own client are told of a prompt's progress."""
PROGRESS_OVERDUE_S = 1.4
"""After so long it is told again, though nothing is new: with the clock's period every two seconds."""
GAP_CLASS_GROWTH = 1.05
"""Between the bounds of one class of gaps and the next: a percentile is told within half of the step."""
SHORTEST_GAP_S = 1e-5
"""Lower bound of the first class of gaps; shorter ones are counted in it."""
MAX_GAP_CLASSES = 400
"""The last one has all gaps from some 50 minutes on."""
_CLASSES_PER_E = 1.0 / math.log(GAP_CLASS_GROWTH)


class TokenGaps:
    """Times between deliveries of tokens of one request, over all its choices, in bounded memory.

    Gaps are counted in classes whose bounds grow by 5 %, so that a percentile is told within 2.5 % of a gap
    that there was; mean and maximum are exact. At most 400 classes: 0.01 ms to some 50 minutes.
    """

    __slots__ = ("_counts", "_last_s", "_longest_s", "_num_gaps", "_sum_s")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._last_s: dict[int, float] = {}
        self._num_gaps = 0
        self._sum_s = self._longest_s = 0.0

    def __repr__(self) -> str:
        return f"<TokenGaps {self._num_gaps} in {len(self._counts)} classes>"

    def delivered(self, index: int, now: float) -> None:
        """A choice got tokens at `now`, in seconds."""
        last_s = self._last_s.get(index)
        self._last_s[index] = now
        if last_s is None:
            return
        gap_s = now - last_s
        self._num_gaps += 1
        self._sum_s += gap_s
        self._longest_s = max(self._longest_s, gap_s)
        place = (
            0
            if gap_s <= SHORTEST_GAP_S
            else min(int(math.log(gap_s / SHORTEST_GAP_S) * _CLASSES_PER_E), MAX_GAP_CLASSES - 1)
        )
        self._counts[place] = self._counts.get(place, 0) + 1

    def interrupted(self, index: int | None = None) -> None:
        """A choice, or with None every one, stands still: the time until its next token is no gap."""
        if index is None:
            self._last_s.clear()
        else:
            self._last_s.pop(index, None)

    def status(self) -> GapStatus | None:
        """The figures in milliseconds; None: there was no gap."""
        if not self._num_gaps:
            return None
        return GapStatus(
            mean=self._sum_s / self._num_gaps * 1000.0,
            p50=self._percentile_s(0.5) * 1000.0,
            p99=self._percentile_s(0.99) * 1000.0,
            max=self._longest_s * 1000.0,
        )

    def _percentile_s(self, share: float) -> float:
        """The gap below or at which that share of all lies: the nearest rank."""
        rank, seen = math.ceil(share * self._num_gaps), 0
        for place in sorted(self._counts):
            seen += self._counts[place]
            if seen >= rank:
                return min(SHORTEST_GAP_S * math.exp((place + 0.5) / _CLASSES_PER_E), self._longest_s)
        return self._longest_s


class Wait(StrEnum):
    """Why a request does not compute."""

    PREPARING = "its preparation and the step under way"
    QUEUE = "a free slot"
    MODEL = "its model was being loaded"
    RESTART = "the engine was restarting"
    SUSPENDED = "the engine was suspended"
    PAUSED = "it was paused"
    PARKED = "its slot was given to others"


@dataclass(slots=True)
class RequestMeter:
    """Times of one request, in seconds on a monotonic clock unless said otherwise.

    Attributes:
        arrived_at: seconds since the epoch.
        arrived_s: when it arrived.
        admitted_s, first_token_s: when its first choice got a slot, when its first token came; None: not yet.
        prompt_tokens, cached_tokens: of the prompt, once known.
        processed_tokens: prompt tokens that are computed or cached, while the prompt is read.
        num_parks: how often a choice was parked.
        num_restarts: how often an engine went while it lived.
        position: its place in the queue; None: it is in none.
        cache_source: of the cached tokens, once known.
        load_fraction: how far its model is loaded while it waits for that.
        gaps: between its tokens.
        ended_s: when it ended.
    """

    arrived_at: float
    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    processed_tokens: int = 0
    num_parks: int = 0
    num_restarts: int = 0
    position: int | None = None
    cache_source: CacheSource | None = None
    load_fraction: float = 0.0
    gaps: TokenGaps = field(default_factory=TokenGaps)
    ended_s: float | None = None
    _runs_at_s: float | None = None
    _told_s: float = -PROGRESS_EVERY_S
    _waits_s: dict[Wait, float] = field(default_factory=dict)
    _waits_for: Wait | None = None
    _since_s: float = 0.0
    _num_before: int = 0

    def take(self, event: RequestEvent, now: float) -> None:
        """Take note of an engine's event."""
        match event:
            case Queued():
                self._queue(event, now)
            case Delta():
                self.wrote(event, now)
            case Preparing():
                self.wait(Wait.PREPARING, now)
            case Admitted():
                self._go_on(now)
                self.position = self._runs_at_s = None
                self.admitted_s = self.admitted_s or now
                self.prompt_tokens = event.prompt_tokens or self.prompt_tokens
                self.cached_tokens = self.processed_tokens = event.cached_tokens
                self.cache_source = event.cache_source
            case PrefillProgress():
                self.prompt_tokens, self.processed_tokens = event.total, event.processed
            case Parked():
                self.num_parks += 1
                self.wait(Wait.PARKED, now)
                self.gaps.interrupted(event.index)

    def wrote(self, delta: Delta, now: float) -> None:
        """Take note of what a choice wrote."""
        if delta.token_ids:
            self.gaps.delivered(delta.index, now)
            if self._waits_for is not None or self.first_token_s is None:
                self._go_on(now)
                self.first_token_s = self.first_token_s or now
        if delta.finish_reason is not FinishReason.CANCELLED:  # else it comes after the whole prompt
            self.processed_tokens = self.prompt_tokens

    def _queue(self, event: Queued, now: float) -> None:
        """It waits for a slot, or its model."""
        self.position = event.position
        self._runs_at_s = None if event.eta_s is None else now + event.eta_s
        wait = Wait.MODEL if event.awaits_model else Wait.QUEUE
        if self._waits_for not in {wait, Wait.PARKED}:
            self._num_before = max(self._num_before, event.position)
            self.wait(wait, now)

    def steer(self, event: Paused | Resumed, now: float) -> None:
        """Its caller, or a suspension, stops it or lets it go on."""
        if isinstance(event, Paused) and self._waits_for is not Wait.SUSPENDED:
            self.wait(Wait.PAUSED, now)
        elif isinstance(event, Resumed) and self._waits_for is Wait.PAUSED:
            self.wait(Wait.QUEUE, now)

    def wait(self, wait: Wait, now: float) -> None:
        """From now on it waits for this."""
        if self._waits_for is not wait:
            self._go_on(now)
            self._waits_for, self._since_s = wait, now
            if wait is not Wait.PARKED:  # which may be one choice of several
                self.gaps.interrupted()

    def end(self, now: float) -> None:
        """It has ended, perhaps in the queue: it has no place there any more."""
        self.ended_s, self.position, self._runs_at_s = now, None, None

    def eta_s(self, now: float) -> float | None:
        """Seconds until it runs, as it was last told less what has passed; None: not known."""
        return None if self._runs_at_s is None else max(0.0, self._runs_at_s - now)

    def tell_progress(self, now: float, every_s: float = PROGRESS_EVERY_S) -> bool:
        """Note that others than its own client are told of its progress; False: they just were."""
        is_due = now - self._told_s >= every_s
        if is_due:
            self._told_s = now
        return is_due

    def is_progress_overdue(self, now: float) -> bool:
        """Whether nothing was told of its prompt for so long that it is told again how far that is."""
        if self.admitted_s is None or self.first_token_s is not None:
            return False
        return now - max(self._told_s, self.admitted_s) >= PROGRESS_OVERDUE_S

    def progress(self, request_id: str, now: float) -> PrefillProgress:
        """How far its prompt is, as it was last heard of."""
        return PrefillProgress(
            request_id=request_id,
            total=self.prompt_tokens,
            cached=self.cached_tokens,
            processed=self.processed_tokens,
            time_ms=(now - (self.admitted_s or now)) * 1000.0,
        )

    def _go_on(self, now: float) -> None:
        if self._waits_for is not None:
            self._waits_s[self._waits_for] = self.waited_s(self._waits_for, now)
            self._waits_for = None

    def waited_s(self, wait: Wait, now: float) -> float:
        """Seconds it has waited for that."""
        open_s = now - self._since_s if self._waits_for is wait else 0.0
        return self._waits_s.get(wait, 0.0) + open_s

    def longest_wait(self, now: float) -> tuple[float, str]:
        """How long it waited for what it waited for longest, and what that was; empty: nothing much."""
        waits_s = dict(self._waits_s)
        if self._waits_for is not None:
            waits_s[self._waits_for] = self.waited_s(self._waits_for, now)
        wait = max(waits_s, key=waits_s.__getitem__, default=Wait.QUEUE)
        waited_s = waits_s.get(wait, 0.0)
        if waited_s < MIN_TOLD_WAIT_S:
            return waited_s, ""
        if wait is Wait.QUEUE and self._num_before:
            return waited_s, f"{self._num_before} before it in the queue"
        return waited_s, str(wait)

    def at(self, now: float) -> float:
        """Seconds since the epoch at `now`."""
        return self.arrived_at + now - self.arrived_s

    def end_to_end_s(self, now: float) -> float:
        """Seconds from arrival to the end, or to now."""
        return (now if self.ended_s is None else self.ended_s) - self.arrived_s

    def queue_s(self, now: float) -> float:
        """Seconds from arrival to the first slot, or to now."""
        return (now if self.admitted_s is None else self.admitted_s) - self.arrived_s

    def to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token; None: there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def decode_s(self, now: float) -> float:
        """Seconds from the first token to now."""
        return 0.0 if self.first_token_s is None else now - self.first_token_s


def tokens_per_second(num_tokens: int, num_first: int, decode_s: float) -> float | None:
    """Tokens a second after the first ones; None where that says nothing.

    Args:
        num_tokens: all that were written.
        num_first: those of them that came with no step before: one a choice.
        decode_s: seconds of writing.
    """
    num_later = num_tokens - num_first
    return num_later / decode_s if num_later > 0 and decode_s > 0 else None
