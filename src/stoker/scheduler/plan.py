"""What one step computes: decode rows first, then fair slices of prefill (SPEC Q8, Q9).

Pure: from the running sequences and budgets of tokens (`budget`) to plan items. The scheduler has made sure
before that there are cells for the tokens.
"""

from __future__ import annotations

import msgspec

from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.kv.sequence import Sequence, SequenceState
from stoker.scheduler.budget import StepBudget


class Planned(msgspec.Struct, frozen=True):
    """One sequence's part of a step."""

    sequence: Sequence
    item: PlanItem

    @property
    def num_drafted(self) -> int:
        """How many of its last tokens are a draft; asked before the step counts as computed."""
        return max(0, len(self.item.tokens) - self.sequence.num_pending)


class StepPlan(msgspec.Struct, frozen=True):
    """The step: who takes part, with what."""

    parts: tuple[Planned, ...]

    @property
    def has_draft(self) -> bool:
        """Whether it computes tokens that are not drawn yet; asked before it counts as computed."""
        return any(part.num_drafted for part in self.parts)

    def without_draft(self) -> StepPlan:
        """The step as it would have been."""
        return StepPlan(tuple(Planned(part.sequence, _item(part.sequence, 1)) for part in self.parts))

    def batch(self) -> BatchPlan:
        """The backend's view of it."""
        return BatchPlan(tuple(part.item for part in self.parts))


def fair_shares(wanted: list[int], budget: int) -> list[int]:
    """Split `budget` tokens evenly; what one does not need goes to the others.

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
    """Builds one step after the other; remembers only which sequence is first.

    Args:
        budget: how many tokens of each kind a step may carry.
        max_prompt_rows: rows of logits one prompt may ask for in a step; they take memory.
    """

    def __init__(self, budget: StepBudget, max_prompt_rows: int) -> None:
        self.budget = budget
        self.max_prompt_rows = max_prompt_rows
        self._turn = 0

    def plan(self, running: list[Sequence], favoured: Sequence | None = None) -> StepPlan | None:
        """The next step over `running` sequences, or None when nothing is ready.

        `favoured` is background whose turn this step is (SPEC Q7): no target of time keeps it out.
        """
        self._turn += 1
        interactive = [s for s in running if not s.is_background and s is not favoured]
        background = [s for s in running if s.is_background and s is not favoured]
        if favoured is not None:
            interactive.append(favoured)
        parts = self._interactive(interactive, favoured)
        if background:
            parts += self._background(background, parts)
        return StepPlan(tuple(parts)) if parts else None

    def _interactive(self, sequences: list[Sequence], favoured: Sequence | None) -> list[Planned]:
        """Every decode row that fits the batch, then prefill within its budget."""
        decoding = self._rotated([s for s in sequences if s.state is SequenceState.DECODE])
        prefilling = self._rotated([s for s in sequences if s.state is SequenceState.PREFILL])
        rows = decoding[: self.budget.decode_rows(len(prefilling))]
        parts = [Planned(s, _item(s, 1)) for s in rows]
        if rows:
            self.budget.bursts.stepped()
        at_images = [s for s in prefilling if rows and s.is_at_image and s is not favoured]
        if at_images:
            prefilling = [s for s in prefilling if s not in at_images]
        return self._beside(prefilling, favoured, parts) + self._at_images(at_images, parts)

    def _beside(
        self, prefilling: list[Sequence], favoured: Sequence | None, rows: list[Planned]
    ) -> list[Planned]:
        """The decode rows, and prefill of text within its budget."""
        parts = list(rows)
        if favoured is not None and favoured in prefilling:
            num_left = self.budget.n_batch - len(rows)
        else:
            num_left = self.budget.prefill(len(rows), len(prefilling))
        last = self._to_finish(prefilling, num_left, parts)
        if last is not None:
            prefilling.remove(last)
            num_left -= min(last.num_pending, num_left // (len(prefilling) + 1))
            parts.append(Planned(last, _item(last, last.num_pending)))
        return parts + self._prefill(prefilling, num_left, self.budget.n_batch - _num_tokens(parts))

    def _at_images(self, sequences: list[Sequence], rows: list[Planned]) -> list[Planned]:
        """Prompts that are at an image beside decode rows: seldom, as their work is long."""
        if not sequences:
            return []
        num_others = _num_tokens(rows)
        num_left = self.budget.image_prefill(num_others)
        parts = self._prefill(sequences, num_left, self.budget.n_batch - num_others)
        if parts:
            self.budget.bursts.taken()
        return parts

    def _to_finish(self, prefilling: list[Sequence], num_left: int, rows: list[Planned]) -> Sequence | None:
        """The prompt nearest to its end, if this step can bring it there: its first token is worth the delay.

        What it takes beyond its share of `num_left` is not taken from the others.
        """
        nearest = min(prefilling, key=lambda s: s.num_pending, default=None)
        if nearest is None or _asks_all(nearest) or nearest.num_in_reach < nearest.num_pending:
            return None
        num_others = len(rows) + max(0, num_left - nearest.num_pending)
        return nearest if self.budget.can_finish(nearest.num_pending, num_others) else None

    def _background(self, sequences: list[Sequence], others: list[Planned]) -> list[Planned]:
        """Background: decode rows, then prefill, within what the `others` of the step leave it."""
        num_others = _num_tokens(others)
        has_decoding = any(part.sequence.state is SequenceState.DECODE for part in others)
        num_left = self.budget.background(num_others, has_decoding=has_decoding)
        if num_left == 0:
            return []
        decoding = self._rotated([s for s in sequences if s.state is SequenceState.DECODE])
        prefilling = self._rotated([s for s in sequences if s.state is SequenceState.PREFILL])
        rows = decoding[: max(1, num_left - len(prefilling))]
        parts = [Planned(s, _item(s, 1)) for s in rows]
        parts += self._prefill(prefilling, num_left - len(rows), self.budget.n_batch - num_others - len(rows))
        self.budget.joined(num_others, _num_tokens(parts))
        return parts

    def _prefill(self, sequences: list[Sequence], budget: int, batch_room: int) -> list[Planned]:
        """Fair slices of `budget`; a prompt whose every logit is asked comes whole, or waits for its turn.

        One that comes in slices all the same is brought to its end before the next one begins: the backend
        holds the beginning of one such text.
        """
        if min(budget, batch_room) <= 0:
            return []
        parts: list[Planned] = []
        for sequence in sorted(filter(_asks_all, sequences), key=lambda each: -each.num_computed):
            wanted = min(sequence.num_in_reach, self.max_prompt_rows)
            if wanted <= batch_room or not parts:
                parts.append(Planned(sequence, _item(sequence, min(wanted, batch_room))))
                batch_room -= len(parts[-1].item.tokens)
            if wanted < sequence.num_pending:
                break
        others = [sequence for sequence in sequences if not _asks_all(sequence)]
        shares = fair_shares([s.num_in_reach for s in others], min(budget, batch_room))
        return parts + [Planned(s, _item(s, n)) for s, n in zip(others, shares, strict=True) if n]

    def _rotated(self, sequences: list[Sequence]) -> list[Sequence]:
        if not sequences:
            return sequences
        first = self._turn % len(sequences)
        return sequences[first:] + sequences[:first]


def _num_tokens(parts: list[Planned]) -> int:
    return sum(len(part.item.tokens) for part in parts)


def _asks_all(sequence: Sequence) -> bool:
    return sequence.wants_prompt_logits and sequence.num_computed < sequence.num_prompt


def _item(sequence: Sequence, count: int) -> PlanItem:
    start = sequence.num_computed
    assert sequence.slot is not None, f"{sequence!r} runs without a slot"
    is_whole = start + count == len(sequence.tokens)
    num_logits = count if _asks_all(sequence) else int(is_whole)
    return PlanItem(sequence.slot, start, sequence.tokens[start : start + count], num_logits)
