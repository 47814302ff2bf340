"""How many tokens each sequence of a backend holds, and whether a plan continues from there.

Owns the numbers; the cells and states behind them are the backend's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.errors import StepFailedError

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import BatchPlan, PlanItem


class Lengths:
    """Lengths of `num_sequences` sequences, all empty at first.

    Args:
        num_sequences: sequences are numbered 0 .. num_sequences - 1.
        n_vocab: token ids are 0 .. n_vocab - 1, those that stand for a picture negative.
        n_batch: tokens one plan may carry.
    """

    def __init__(self, num_sequences: int, n_vocab: int, n_batch: int) -> None:
        self._lengths = [0] * num_sequences
        self._n_vocab = n_vocab
        self._n_batch = n_batch

    def __repr__(self) -> str:
        held = {seq: length for seq, length in enumerate(self._lengths) if length}
        return f"<Lengths of {len(self._lengths)} sequences: {held}>"

    def __getitem__(self, seq: int) -> int:
        if not 0 <= seq < len(self._lengths):
            raise IndexError(f"sequence {seq} is not in 0 .. {len(self._lengths) - 1}")
        return self._lengths[seq]

    def __setitem__(self, seq: int, length: int) -> None:
        self._lengths[seq] = length

    def check(self, plan: BatchPlan) -> None:
        """Raise StepFailedError where an item is malformed or does not continue its sequence."""
        assert plan.items, "a plan without items"
        assert plan.num_tokens <= self._n_batch, f"{plan.num_tokens} tokens in a batch of {self._n_batch}"
        for item in plan.items:
            self._check_item(item)
        assert len({item.seq for item in plan.items}) == len(plan.items), "a sequence twice in one plan"

    def advance(self, plan: BatchPlan) -> None:
        """Count the tokens of a plan that was computed."""
        for item in plan.items:
            self._lengths[item.seq] = item.start + len(item.tokens)

    def _check_item(self, item: PlanItem) -> None:
        seq, tokens = item.seq, item.tokens
        if not 0 <= seq < len(self._lengths):
            raise StepFailedError(f"sequence {seq} is not in 0 .. {len(self._lengths) - 1}", seq=seq)
        length = self._lengths[seq]
        if item.start != length:
            raise StepFailedError(
                f"sequence {seq} holds {length} tokens, the step starts at {item.start}",
                seq=seq,
                length=length,
            )
        if not tokens or not 0 <= item.num_logits <= len(tokens):
            raise StepFailedError(
                f"sequence {seq}: {item.num_logits} rows of logits asked of {len(tokens)} tokens", seq=seq
            )
        if len(tokens) == 1 and 0 <= tokens[0] < self._n_vocab:
            return  # a decode row, the common case
        if max(tokens) < 0:
            return  # a picture's: whether its embeddings are there is the backend's to see
        if min(tokens) < 0 or max(tokens) >= self._n_vocab:
            raise StepFailedError(
                f"sequence {seq} has tokens {min(tokens)} .. {max(tokens)}, 0 .. {self._n_vocab - 1} exist",
                seq=seq,
            )
