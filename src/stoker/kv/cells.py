"""Counts KV cells exactly, shared ones once, and says what bounds the use of them.

A sequence's cells are a list of spans; a fork shares spans by reference count, so a cell is free when no
sequence holds it. `CellPool` mirrors what a unified KV pool does natively, so that the scheduler knows
before a step whether the cells suffice. `SchedulerLimits` are what the loaded model and the settings allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.ipc.model import CacheMode, Policy

if TYPE_CHECKING:
    from stoker.backends.protocol.extensions import Tiles


@dataclass(slots=True, eq=False)
class _Span:
    length: int
    num_refs: int
    num_before: int


class CellPool:
    """Exact occupancy of `total` cells by sequence number."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._spans: dict[int, list[_Span]] = {}

    def __repr__(self) -> str:
        return f"<CellPool {self.used}/{self.total} cells, {len(self._spans)} sequences>"

    @property
    def free(self) -> int:
        """Cells no sequence holds."""
        return self.total - self.used

    def length(self, seq: int) -> int:
        """Cells in the sequence's view, shared ones included."""
        return sum(span.length for span in self._spans.get(seq, ()))

    def exclusive(self, seq: int) -> int:
        """Cells that would be freed if the sequence were dropped."""
        return sum(span.length for span in self._spans.get(seq, ()) if span.num_refs == 1)

    def held(self, seqs: Iterable[int]) -> int:
        """Cells that these sequences hold together, shared ones once."""
        spans = {id(span): span.length for seq in seqs for span in self._spans.get(seq, ())}
        return sum(spans.values())

    def num_before(self, seq: int) -> int:
        """Cells that were in use when the first of a sequence was taken: it lies no further back than that.

        A pool gives the lowest that is free.
        """
        spans = self._spans.get(seq)
        return spans[0].num_before if spans else 0

    def extend(self, seq: int, num_tokens: int) -> None:
        """Take `num_tokens` free cells for the end of the sequence."""
        num_before = self.used
        self.used += num_tokens
        assert self.used <= self.total, f"{num_tokens} cells more than there are: {self!r}"
        spans = self._spans.get(seq)
        if spans and spans[-1].num_refs == 1:
            spans[-1].length += num_tokens
        else:
            self._spans.setdefault(seq, []).append(_Span(num_tokens, 1, num_before))

    def fork(self, src: int, dst: int, length: int) -> None:
        """Share the first `length` cells of `src` with the empty sequence `dst`."""
        assert not self._spans.get(dst), f"sequence {dst} is not empty"
        self._split(src, length)
        shared: list[_Span] = []
        for span in self._spans.get(src, ()):
            if length <= 0:
                break
            span.num_refs += 1
            shared.append(span)
            length -= span.length
        assert length == 0, f"sequence {src} is {length} cells shorter than the fork"
        self._spans[dst] = shared

    def trim(self, seq: int, length: int) -> None:
        """Keep the first `length` cells."""
        self._split(seq, length)
        kept: list[_Span] = []
        for span in self._spans.pop(seq, ()):
            if length > 0:
                kept.append(span)
                length -= span.length
                continue
            span.num_refs -= 1
            if span.num_refs == 0:
                self.used -= span.length
        if kept:
            self._spans[seq] = kept

    def drop(self, seq: int) -> None:
        """Give back what only this sequence holds."""
        self.trim(seq, 0)

    def check(self) -> None:
        """Assert that counts and references agree."""
        refs: dict[int, int] = {}
        spans = {id(span): span for held in self._spans.values() for span in held}
        for held in self._spans.values():
            for span in held:
                refs[id(span)] = refs.get(id(span), 0) + 1
        assert all(span.length > 0 for span in spans.values()), "an empty span"
        assert all(span.num_refs == refs[key] for key, span in spans.items()), "reference counts are off"
        assert self.used == sum(span.length for span in spans.values()) <= self.total, repr(self)

    def _split(self, seq: int, length: int) -> None:
        """Make `length` a span boundary of `seq`, in every sequence that shares the span."""
        for span in self._spans.get(seq, ()):
            if length < span.length:
                break
            length -= span.length
        else:
            return
        if length == 0:
            return
        tail = _Span(span.length - length, span.num_refs, span.num_before)  # asked of first ones alone
        span.length = length
        for held in self._spans.values():
            if span in held:
                held.insert(held.index(span) + 1, tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of one model's scheduler.

    Attributes:
        num_slots: sequences that run at once.
        num_sequences: sequences the backend knows; those beyond the slots are spare.
        num_cells: tokens that all sequences may hold together.
        n_batch: tokens a step may carry.
        max_prompt_rows: rows of logits one prompt may ask for in a step.
        shares_cells: what forks share they have once, without a copy, and any part of it can be trimmed off.
        is_on_device: steps are computed beside the loop, and cost more where their shape changes.
        has_streams: each sequence has cells of its own, and those of others cost a step nothing.
        tiles: what prompts cost where they are computed in tiles; None: it grows evenly.
        cell_bytes: what a token takes in a snapshot, about.
        state_bytes: what a snapshot takes besides; both 0: the backend exports no state.
        target_step_s: of a step while interactive sequences decode; `max_step_s`: of any.
        park_bytes: what snapshots of waiting sequences may take together.
        cache_mode: what is kept of sequences that have ended.
        model, source: fingerprint of the model, and the path of its file.
    """

    num_slots: int
    num_sequences: int = 0
    num_cells: int
    n_batch: int
    max_queue: int = 512
    max_prompt_rows: int = 64
    can_trim: bool = True
    can_fork: bool = True
    shares_cells: bool = False
    has_streams: bool = False
    is_on_device: bool = False
    tiles: Tiles | None = None
    cell_bytes: int = 0
    state_bytes: int = 0
    park_bytes: int = 0
    policy: Policy = Policy.LATENCY
    target_step_s: float = 0.05
    max_step_s: float = math.inf
    background_patience_s: float = 30.0
    cache_mode: CacheMode = CacheMode.BOTH
    model: str = ""
    source: str = ""

    @property
    def can_export(self) -> bool:
        """Whether a sequence's state can be had as bytes."""
        return self.cell_bytes > 0 or self.state_bytes > 0

    @property
    def can_share_cells(self) -> bool:
        """Whether sequences of several requests share cells."""
        return self.can_fork and self.cache_mode.keeps_cells

    def snapshot_bytes(self, num_tokens: int) -> int:
        """What the state of so many tokens takes, about."""
        return self.state_bytes + self.cell_bytes * num_tokens
