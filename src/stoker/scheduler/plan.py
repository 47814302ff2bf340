"""What one step computes: decode rows first, then fair slices of prefill (SPEC Q9).

Pure: from the running sequences and a token budget to plan items. Whether there is room for the tokens is
decided before, by the scheduler.
"""

from __future__ import annotations

import msgspec

from stoker.backends.protocol import BatchPlan, PlanItem
from stoker.scheduler.sequence import Sequence, SequenceState


class Planned(msgspec.Struct, frozen=True):
    """One sequence's part of a step."""

    sequence: Sequence
    item: PlanItem


class StepPlan(msgspec.Struct, frozen=True):
    """The step: who takes part, with what."""

    parts: tuple[Planned, ...]

    def batch(self) -> BatchPlan:
        """The backend's view of it."""
        return BatchPlan(tuple(part.item for part in self.parts))


def fair_shares(wanted: list[int], budget: int) -> list[int]:
    """Split `budget` tokens: everyone the same, what one does not need goes to the others.

    A ready prefill gets at least one token while the budget has one for it.
    """
    shares = [0] * len(wanted)
    open_ends = [at for at, tokens in enumerate(wanted) if tokens]
    while budget > 0 and open_ends:
        each = max(1, budget // len(open_ends))
        for at in list(open_ends):
            given = min(each, wanted[at] - shares[at], budget)
            shares[at] += given
            budget -= given
            if shares[at] == wanted[at]:
                open_ends.remove(at)
    return shares


class Planner:
    """Builds one step after the other; remembers only whose turn is first.

    Args:
        n_batch: tokens one step may carry.
        max_prompt_rows: rows of logits one prompt may ask for in a step; they take memory.
    """

    def __init__(self, n_batch: int, max_prompt_rows: int) -> None:
        self.n_batch = n_batch
        self.max_prompt_rows = max_prompt_rows
        self._turn = 0

    def plan(self, running: list[Sequence]) -> StepPlan | None:
        """The next step over `running` sequences, or None when nothing is ready."""
        decoding = self._rotated([s for s in running if s.state is SequenceState.DECODE])
        prefilling = self._rotated([s for s in running if s.state is SequenceState.PREFILL])
        self._turn += 1
        rows = decoding[: self.n_batch - 1 if prefilling else self.n_batch]
        parts = [Planned(s, _item(s, 1)) for s in rows]
        parts += self._prefill(prefilling, self.n_batch - len(rows))
        return StepPlan(tuple(parts)) if parts else None

    def _prefill(self, sequences: list[Sequence], budget: int) -> list[Planned]:
        """Fair slices of `budget`; a prompt whose every logit is asked comes whole, or waits for a turn."""
        parts: list[Planned] = []
        for sequence in filter(_asks_all, sequences):
            wanted = min(sequence.num_pending, self.max_prompt_rows)
            if wanted <= budget or not parts:
                parts.append(Planned(sequence, _item(sequence, min(wanted, budget))))
                budget -= len(parts[-1].item.tokens)
        others = [sequence for sequence in sequences if not _asks_all(sequence)]
        shares = fair_shares([sequence.num_pending for sequence in others], budget)
        return parts + [Planned(s, _item(s, n)) for s, n in zip(others, shares, strict=True) if n]

    def _rotated(self, sequences: list[Sequence]) -> list[Sequence]:
        if not sequences:
            return sequences
        first = self._turn % len(sequences)
        return sequences[first:] + sequences[:first]


def _asks_all(sequence: Sequence) -> bool:
    return sequence.wants_prompt_logits and sequence.num_computed < sequence.num_prompt


def _item(sequence: Sequence, count: int) -> PlanItem:
    start = sequence.num_computed
    assert sequence.slot is not None, f"{sequence!r} runs without a slot"
    is_whole = start + count == len(sequence.tokens)
    num_logits = count if _asks_all(sequence) else int(is_whole)
    return PlanItem(sequence.slot, start, sequence.tokens[start : start + count], num_logits)
