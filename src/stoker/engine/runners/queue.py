"""The queue of one-shot work: texts that are computed without a slot (SPEC Q2, Q6, Q7, Q11).

An encoder's text is computed in one call: it waits, is in the call, and is done. A request to choose keeps
its place while it is computed slice by slice. Pure but for what it holds; time is an argument.
"""

from __future__ import annotations

from itertools import accumulate, islice
from typing import TYPE_CHECKING

from stoker.kv.sequence import Hindrance, SequenceState
from stoker.scheduler.queue import Aging, RequestQueue, Throttle

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.ipc.request import FinishReason, Priority
    from stoker.kv.sequence import Sequence


LEAST_RETRY_S = 1.0
_PEOPLE_FIRST = Hindrance("interactive requests are computed first")
_CALL_IS_FULL = Hindrance("the call under way is full")
SharedText = tuple[bytes, tuple[int, ...]]


def shared_text(sequence: Sequence) -> SharedText:
    """Namespace and tokens: sequences in which both are equal are computed once (SPEC C1)."""
    return sequence.namespace, tuple(sequence.tokens)


class OneShotQueue:
    """Texts of one model, in the order they will be computed.

    Args:
        max_queue: how many may wait.
        patience_s: how long background waits before it is owed a turn.
        wait_s: seconds that computing so many tokens takes; None: nothing was measured yet.
        num_tokens: of what is computed for a sequence.

    Attributes:
        queue: those that wait, next first.
        throttle: what may not run for now.
        chosen: what the next call carries.
        paused: those that stand still until they are resumed.
    """

    def __init__(
        self,
        max_queue: int,
        patience_s: float,
        wait_s: Callable[[int], float | None],
        num_tokens: Callable[[Sequence], int],
    ) -> None:
        self.throttle = Throttle()
        self.chosen: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.queue = RequestQueue(max_queue)
        self._aging = Aging(patience_s)
        self._wait_s = wait_s
        self._num_tokens = num_tokens
        self._num_retired_total = 0

    def __repr__(self) -> str:
        return f"<OneShotQueue {len(self)} wait, {len(self.chosen)} chosen, {len(self.paused)} paused>"

    def __len__(self) -> int:
        return len(self.queue)

    # ------------------------------------------------------------ questions

    @property
    def has_work(self) -> bool:
        """Whether a call could carry something."""
        return bool(self.chosen) or any(not self.throttle.holds(sequence) for sequence in self.queue)

    @property
    def has_people(self) -> bool:
        """Whether an interactive request that may run waits for its answer."""
        return any(not sequence.is_background for sequence in self._allowed())

    def is_owed(self, now: float) -> bool:
        """Whether some background has waited longer than its patience."""
        return any(self._aging.is_owed(sequence, now) for sequence in self._allowed())

    def eta_s(self, position: int) -> float | None:
        """Seconds until the text at that position is computed; None: nothing was measured yet."""
        return self._wait_s(sum(map(self._num_tokens, islice(self.queue, position))))

    def etas_s(self) -> list[float | None]:
        """The same for each text, next first."""
        before = accumulate(map(self._num_tokens, self.queue), initial=0)
        return [self._wait_s(num_tokens) for num_tokens, _ in zip(before, self.queue, strict=False)]

    def stats(self) -> dict[str, float]:
        """Every counter."""
        return {
            "num_waiting": len(self.queue),
            "num_paused": len(self.paused),
            "num_running": len(self.chosen),
            "num_retired_total": self._num_retired_total,
        }

    # ------------------------------------------------------------ commands

    def check_queue(self, priority: Priority, num_arriving: int) -> None:
        """Raises QueueFullError when the queue is at its bound; `num_arriving` are on their way."""
        retry_after_s = max(LEAST_RETRY_S, self.eta_s(len(self)) or 0.0)
        self.queue.check_queue(priority, len(self) + num_arriving, retry_after_s)

    def enqueue(self, sequence: Sequence, now: float) -> int:
        """Put a new text in the queue; returns its position."""
        sequence.tell(now, "queued: arrived")
        sequence.last_step_s = now
        return self.queue.push(sequence)

    def retire(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a text wherever it is."""
        if sequence.state is SequenceState.PAUSED:
            self.paused.remove(sequence)
        elif sequence in self.chosen:
            self.chosen.remove(sequence)
        else:
            self.queue.remove(sequence)
        sequence.finish_reason = reason
        sequence.move(SequenceState.DONE, now, reason)
        self._num_retired_total += 1

    def pause(self, sequence: Sequence, now: float) -> None:
        """Take a waiting text out of the queue until `resume` (SPEC Q17)."""
        self.queue.remove(sequence)
        sequence.move(SequenceState.PAUSED, now, "asked to")
        self.paused.append(sequence)

    def resume(self, sequence: Sequence, now: float) -> int:
        """Put a paused text back where its arrival places it; returns the position."""
        self.paused.remove(sequence)
        sequence.move(SequenceState.QUEUED, now, "resumed")
        sequence.last_step_s = now
        return self.queue.rejoin(sequence)

    # ------------------------------------------------------------ a turn

    def first(self, now: float, *, lets_background: bool) -> Sequence | None:
        """Whose slice it is; it keeps its place.

        Background that waited longer than its patience has one slice in ten (SPEC Q7); with `lets_background`
        false it has none but those.
        """
        allowed = self._allowed()
        favoured = self._aging.next_owed(allowed, now)
        if allowed:
            self._aging.stepped(favoured)
        if favoured is None and allowed and (lets_background or not allowed[0].is_background):
            favoured = allowed[0]
        if favoured is not None:
            favoured.last_step_s, favoured.owed_since_s = now, None
        return favoured

    def begin(self, sequence: Sequence, now: float) -> bool:
        """Its slices are computed from now on, while it keeps its place; returns whether that is new."""
        is_new = sequence.state is SequenceState.QUEUED
        if is_new:
            sequence.move(SequenceState.PREFILL, now, "computed in slices")
        return is_new

    def choose(self, max_tokens: int, max_texts: int, now: float) -> list[Sequence]:
        """Take the next call's texts out of the queue: the first one, then whole ones while they fit.

        A text that is in the call already, in the same namespace, comes along at no cost. Background that
        waited longer than its patience is the first of one call in ten (SPEC Q7).
        """
        assert not self.chosen, f"{self.chosen} were chosen and not computed"
        allowed = self._allowed()
        favoured = self._aging.next_owed(allowed, now)
        if favoured is not None:
            allowed.remove(favoured)
            allowed.insert(0, favoured)
        self.chosen = _call_of(allowed, max_tokens, max_texts)
        for sequence in self.chosen:
            self.queue.remove(sequence)
            sequence.started_s = now
            sequence.move(SequenceState.PREFILL, now, f"in a call of {len(self.chosen)}")
        if self.chosen:
            self._aging.stepped(favoured)
        return list(self.chosen)

    def hinder_rest(self) -> list[Sequence]:
        """Note why those wait that are not computed; returns those that waited for something else before."""
        held, found = Hindrance(self.throttle.reason), []
        others = self._others()
        for sequence in self.queue:
            if sequence.state is not SequenceState.QUEUED:
                continue
            why = held if self.throttle.holds(sequence) else others
            if sequence.hindrance != why:
                sequence.hindrance = why
                found.append(sequence)
        return found

    def _others(self) -> Hindrance:
        """What is computed before those that wait."""
        if self.chosen:
            return _CALL_IS_FULL
        first = next((each for each in self.queue if each.state is not SequenceState.QUEUED), None)
        if first is None:
            return _PEOPLE_FIRST
        request_id = first.key.request_id
        return Hindrance(f"{request_id} is computed first", by=request_id)

    def _allowed(self) -> list[Sequence]:
        return [sequence for sequence in self.queue if not self.throttle.holds(sequence)]


def _call_of(line: list[Sequence], max_tokens: int, max_texts: int) -> list[Sequence]:
    """The first of the queue, those after it while they fit, and whatever has one of their texts."""
    found: list[Sequence] = []
    texts: set[SharedText] = set()
    num_tokens, is_full = 0, False
    for sequence in line:
        text = shared_text(sequence)
        if text not in texts:
            num_tokens += len(sequence.tokens)
            is_full = is_full or len(texts) >= max_texts or (bool(texts) and num_tokens > max_tokens)
            if is_full:
                continue
            texts.add(text)
        found.append(sequence)
    return found
