"""Texts that are computed without a slot: an encoder's, and choices (SPEC Q2, Q6, Q7, Q11).

An encoder's text is computed in one call: it waits, is in the call, and is done. Choices keep their place in
the line while they are computed slice by slice. Pure but for what it holds; time is an argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.kv.sequence import SequenceState
from stoker.scheduler.aging import Aging
from stoker.scheduler.queue import RequestQueue
from stoker.scheduler.throttle import Throttle

if TYPE_CHECKING:
    from stoker.ipc.request import FinishReason, Priority
    from stoker.kv.sequence import Sequence


SharedText = tuple[bytes, tuple[int, ...]]


def shared_text(sequence: Sequence) -> SharedText:
    """Namespace and tokens: sequences in which both are equal are computed once (SPEC C1)."""
    return sequence.namespace, tuple(sequence.tokens)


class TextQueue:
    """Texts of one model, in the order they will be computed.

    Attributes:
        throttle: who may not run for now.
        chosen: what the next call carries.
        paused: those that stand still until they are resumed.
    """

    def __init__(self, max_queue: int, patience_s: float) -> None:
        self.throttle = Throttle()
        self.chosen: list[Sequence] = []
        self.paused: list[Sequence] = []
        self._line = RequestQueue(max_queue)
        self._patience = Aging(patience_s)
        self._num_retired_total = 0

    def __repr__(self) -> str:
        return f"<TextQueue {len(self._line)} wait, {len(self.chosen)} chosen, {len(self.paused)} paused>"

    def __len__(self) -> int:
        return len(self._line)

    # ------------------------------------------------------------ questions

    @property
    def has_work(self) -> bool:
        """Whether a call could carry something."""
        return bool(self.chosen) or any(not self.throttle.holds(sequence) for sequence in self._line)

    @property
    def has_requests(self) -> bool:
        """Whether anybody waits; those that are paused are not counted."""
        return bool(self.chosen) or len(self._line) > 0

    @property
    def has_people(self) -> bool:
        """Whether somebody who may run waits for an answer."""
        return any(not sequence.is_background for sequence in self._allowed())

    def is_owed(self, now: float) -> bool:
        """Whether some background has waited over its patience."""
        return any(self._patience.is_owed(sequence, now) for sequence in self._allowed())

    def next_deadline_s(self) -> float | None:
        """When the first text passes its deadline."""
        return min((s.deadline_s for s in self._everybody() if s.deadline_s is not None), default=None)

    def waiting(self) -> list[Sequence]:
        """Those in the line, next first."""
        return list(self._line)

    def num_tokens_before(self, position: int) -> int:
        """Tokens to be computed before that place of the line has its turn."""
        return sum(len(sequence.tokens) for sequence in self.waiting()[:position])

    def stats(self) -> dict[str, float]:
        """Every counter."""
        return {
            "num_waiting": len(self._line),
            "num_paused": len(self.paused),
            "num_running": len(self.chosen),
            "num_retired_total": self._num_retired_total,
        }

    # ------------------------------------------------------------ commands

    def check_queue(self, priority: Priority, num_arriving: int, retry_after_s: float) -> None:
        """Raises QueueFullError when the line is at its bound; `num_arriving` are on their way."""
        self._line.check_queue(priority, len(self._line) + num_arriving, retry_after_s)

    def enqueue(self, sequence: Sequence, now: float) -> int:
        """Put a new text in the line; returns its position."""
        sequence.tell(now, "queued: arrived")
        sequence.last_step_s = now
        return self._line.push(sequence)

    def retire(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a text wherever it is."""
        if sequence.state is SequenceState.PAUSED:
            self.paused.remove(sequence)
        elif sequence.state is SequenceState.QUEUED:
            self._line.remove(sequence)
        else:
            self.chosen.remove(sequence)
        sequence.finish_reason = reason
        sequence.move(SequenceState.DONE, now, reason)
        self._num_retired_total += 1

    def pause(self, sequence: Sequence, now: float) -> None:
        """Take a waiting text out of the line until `resume` (SPEC Q17)."""
        self._line.remove(sequence)
        sequence.move(SequenceState.PAUSED, now, "asked to")
        self.paused.append(sequence)

    def resume(self, sequence: Sequence, now: float) -> int:
        """Put a paused text back where its arrival places it; returns the position."""
        self.paused.remove(sequence)
        sequence.move(SequenceState.QUEUED, now, "resumed")
        sequence.last_step_s = now
        return self._line.rejoin(sequence)

    # ------------------------------------------------------------ a turn

    def expire(self, now: float) -> list[Sequence]:
        """Those past their deadline; the caller ends them."""
        return [s for s in self._everybody() if s.deadline_s is not None and s.deadline_s <= now]

    def first(self, now: float, *, lets_jobs: bool) -> Sequence | None:
        """Whose slice it is; it keeps its place.

        Background that waited over its patience has one slice in ten (SPEC Q7); with `lets_jobs` false it has
        none but those.
        """
        line = self._allowed()
        favoured = self._patience.next_owed(line, now)
        if line:
            self._patience.stepped(favoured)
        if favoured is None and line and (lets_jobs or not line[0].is_background):
            favoured = line[0]
        if favoured is not None:
            favoured.last_step_s, favoured.owed_since_s = now, None
        return favoured

    def choose(self, max_tokens: int, max_texts: int, now: float) -> list[Sequence]:
        """Take the next call's texts out of the line: the first one, then whole ones while they fit.

        Who waits with a text that is in the call already, in the same namespace, comes along at no cost.
        Background that waited over its patience is the first of one call in ten (SPEC Q7).
        """
        assert not self.chosen, f"{self.chosen} were chosen and not computed"
        line = self._allowed()
        favoured = self._patience.next_owed(line, now)
        if favoured is not None:
            line.remove(favoured)
            line.insert(0, favoured)
        self.chosen = _call_of(line, max_tokens, max_texts)
        for sequence in self.chosen:
            self._line.remove(sequence)
            sequence.started_s = now
            sequence.move(SequenceState.PREFILL, now, f"in a call of {len(self.chosen)}")
        if self.chosen:
            self._patience.stepped(favoured)
        return list(self.chosen)

    def _allowed(self) -> list[Sequence]:
        return [sequence for sequence in self._line if not self.throttle.holds(sequence)]

    def _everybody(self) -> list[Sequence]:
        return [*self._line, *self.paused, *self.chosen]


def _call_of(line: list[Sequence], max_tokens: int, max_texts: int) -> list[Sequence]:
    """The first of the line, those after it while they fit, and whoever has one of their texts."""
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
