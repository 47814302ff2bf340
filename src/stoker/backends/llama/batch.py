"""What one native call is given: a plan cut into passes, and the batches that they are laid out in.

A context has one set of adapters at a time, and a call takes tokens or embeddings: items of sequences with
different sets, and those of images, go into different passes. The arrays of a batch are numpy's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from stoker.backends.llama.binding import llama
from stoker.backends.protocol.backend import BatchPlan, Candidates, Computed, PlanItem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from stoker.backends.protocol.backend import Rows


Natives: TypeAlias = "Mapping[int, int] | Sequence[int]"
"""The number by which llama.cpp knows each sequence."""
_SAME = range(256)
NUM_DIMENSIONS = 4
"""Of the positions of a model that has more than one (M-RoPE)."""


class TokenBatch:
    """Room for `capacity` tokens, each of one sequence. `native` is what llama_decode takes.

    `first_position` is the native position of a sequence's first token.
    """

    def __init__(self, capacity: int, first_position: int = 0) -> None:
        self._first_position = first_position
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._seq = np.zeros(capacity, np.int32)
        self._wants_logits = np.zeros(capacity, np.int8)
        # a few numbers are set one by one sooner than as arrays
        self._each = (
            self._token.data,
            self._pos.data,
            self._seq.data,
            self._wants_logits.data,
        )
        self._positions = np.arange(first_position, first_position + capacity, dtype=np.int32)
        self._num_seqs = np.ones(capacity, np.int32)
        addresses = self._seq.ctypes.data + self._seq.itemsize * np.arange(capacity)
        self._seq_pointers = addresses.astype(np.uintp)
        self._span = range(0)  # the streams of the last call, if it was laid out by these
        int32_p = ctypes.POINTER(ctypes.c_int32)
        self.native = llama.llama_batch()
        self.native.token = _pointer(self._token, int32_p)
        self.native.pos = _pointer(self._pos, int32_p)
        self.native.n_seq_id = _pointer(self._num_seqs, int32_p)
        self.native.seq_id = _pointer(self._seq_pointers, ctypes.POINTER(int32_p))
        self.native.logits = _pointer(self._wants_logits, ctypes.POINTER(ctypes.c_int8))

    def __repr__(self) -> str:
        return f"<TokenBatch {self.native.n_tokens} of {len(self._token)}>"

    def fill_rows(self, span: range, tokens: Sequence[int], starts: Sequence[int]) -> None:
        """Lay out a token of each of these native sequences, with a row of logits each."""
        count = len(span)
        self._token[:count] = tokens
        self._pos[:count] = starts
        if self._first_position:
            self._pos[:count] += self._first_position
        if span != self._span:
            self._seq[:count] = span
            self._wants_logits[:count] = 1
            self._span = span
        self.native.n_tokens = count

    def fill(self, plan: BatchPlan, natives: Natives = _SAME) -> None:
        """Lay out the plan's tokens in its order; the plan fits and its tokens are in range."""
        self._span = range(0)
        begin = self._fill_rows(plan.items, natives)
        for item in plan.items[begin:]:
            end = begin + len(item.tokens)
            self._token[begin:end] = item.tokens
            self._pos[begin:end] = self._positions[: len(item.tokens)]
            self._pos[begin:end] += item.start
            self._seq[begin:end] = natives[item.seq]
            self._wants_logits[begin : end - item.num_logits] = 0
            self._wants_logits[end - item.num_logits : end] = 1
            begin = end
        self.native.n_tokens = begin

    def _fill_rows(self, items: Sequence[PlanItem], natives: Natives) -> int:
        """Lay out the items of one token before the first of several; returns how many."""
        token, pos, seq, wants_logits = self._each
        first_position, at = self._first_position, 0
        for item in items:
            if len(item.tokens) != 1:
                break
            token[at] = item.tokens[0]
            pos[at] = item.start + first_position
            seq[at] = natives[item.seq]
            wants_logits[at] = item.num_logits
            at += 1
        return at


@dataclass(frozen=True, slots=True, eq=False)
class PictureCall:
    """What one native call computes of an image whose tokens are not computed as those of text are.

    Attributes:
        item: its sequence, tokens and rows of logits; not its places.
        embeddings: float32 (tokens, width).
        positions: int32 (1 or `NUM_DIMENSIONS`, tokens), native ones.
        is_mutual: its tokens see each other in both directions.
    """

    item: PlanItem
    embeddings: Rows
    positions: npt.NDArray[np.int32]
    is_mutual: bool


class EmbeddingBatch:
    """Room for `capacity` embeddings of `width` numbers in place of tokens. `native` is for llama_decode."""

    def __init__(self, capacity: int, width: int, first_position: int = 0) -> None:
        self._places = TokenBatch(capacity, first_position)
        self._embeddings = np.zeros((capacity, width), np.float32)
        self._grid = np.zeros(NUM_DIMENSIONS * capacity, np.int32)
        places, self.native = self._places.native, llama.llama_batch()
        for name in ("n_seq_id", "seq_id", "logits"):
            setattr(self.native, name, getattr(places, name))
        self.native.embd = _pointer(self._embeddings, ctypes.POINTER(ctypes.c_float))

    def __repr__(self) -> str:
        return f"<EmbeddingBatch {self.native.n_tokens} of {len(self._embeddings)}>"

    def fill(self, plan: BatchPlan, embeddings: Sequence[Rows], natives: Natives = _SAME) -> None:
        """Lay out the plan's places, and what stands there: of each item float32 (its tokens, width)."""
        self._places.fill(plan, natives)
        np.concatenate(embeddings, out=self._embeddings[: plan.num_tokens])
        self.native.pos = self._places.native.pos
        self.native.n_tokens = plan.num_tokens

    def fill_grid(self, call: PictureCall, natives: Natives = _SAME) -> None:
        """Lay out tokens of one image at positions of their own."""
        self.fill(BatchPlan((call.item,)), (call.embeddings,), natives)
        self._grid[: call.positions.size] = call.positions.ravel()
        self.native.pos = _pointer(self._grid, ctypes.POINTER(ctypes.c_int32))


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, kind)


AdapterSet = tuple[tuple[str, float], ...]
"""Name and scale of each adapter, in the order of names."""

NONE: AdapterSet = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """Items that are computed in one call.

    Attributes:
        adapters: what their sequences are computed with.
        is_pictured: embeddings stand at their places, and no tokens.
        plan: the items, in the order of the whole plan.
        rows: where each of its rows of logits goes among the rows of the whole plan.
    """

    adapters: AdapterSet
    is_pictured: bool
    plan: BatchPlan
    rows: Sequence[int]

    @property
    def is_in_order(self) -> bool:
        """Whether its rows are those of the whole plan, in the same order."""
        return isinstance(self.rows, range) or self.rows == tuple(range(len(self.rows)))


def passes(
    plan: BatchPlan,
    adapters: Mapping[int, AdapterSet],
    current: AdapterSet,
    order: Sequence[int],
    max_rows: int | None = None,
) -> list[Pass]:
    """The plan by adapter sets: that of the last call first, as changing it costs, and each set once.

    Args:
        plan: one step.
        adapters: the set of each sequence that has one.
        current: what the context computed with last.
        order: places of the plan's items, in the order in which a pass has them; a range: as they are.
        max_rows: rows that one call may compute, where they are bounded.
    """
    is_bounded = max_rows is not None and plan.num_rows > max_rows
    is_plain = current == NONE and not adapters and isinstance(order, range) and not is_bounded
    if is_plain and not plan.has_pictures:
        return [Pass(NONE, False, plan, range(plan.num_rows))]
    groups: dict[tuple[AdapterSet, bool], list[tuple[int, PlanItem]]] = {}
    first_rows = list(accumulate((item.num_logits for item in plan.items), initial=0))
    for place in order:
        item = plan.items[place]
        kind = adapters.get(item.seq, NONE), item.tokens[0] < 0
        groups.setdefault(kind, []).append((first_rows[place], item))

    def rank(kind: tuple[AdapterSet, bool]) -> tuple[bool, AdapterSet]:
        return kind[0] != current, kind[0]

    cut = [_pass(*each, groups[each]) for each in sorted(groups, key=rank)]
    if max_rows is None or not is_bounded:
        return cut
    return [part for each in cut for part in _bounded(each, max_rows)]


def _bounded(whole: Pass, max_rows: int) -> Iterator[Pass]:
    """The same items in passes of so many rows; those of one item may need several."""
    items: list[PlanItem] = []
    first = num_rows = 0
    for item in whole.plan.items:
        for part in _parts(item, max_rows):
            if num_rows + part.num_logits > max_rows:
                rows = whole.rows[first : first + num_rows]
                yield Pass(whole.adapters, whole.is_pictured, BatchPlan(tuple(items)), rows)
                items, first, num_rows = [], first + num_rows, 0
            items.append(part)
            num_rows += part.num_logits
    yield Pass(whole.adapters, whole.is_pictured, BatchPlan(tuple(items)), whole.rows[first:])


def _parts(item: PlanItem, max_rows: int) -> Iterator[PlanItem]:
    """An item of more rows as several: all before the last are full, so no call has two of them."""
    num_plain = len(item.tokens) - item.num_logits
    begin = 0
    for end in range(num_plain + max_rows, len(item.tokens), max_rows):
        yield msgspec.structs.replace(
            item, start=item.start + begin, tokens=item.tokens[begin:end], num_logits=max_rows
        )
        begin = end
    num_left = item.num_logits if begin == 0 else len(item.tokens) - begin
    yield msgspec.structs.replace(
        item, start=item.start + begin, tokens=item.tokens[begin:], num_logits=num_left
    )


class PartRows:
    """The rows and candidates of a plan, put together from those of its passes.

    Attributes:
        rows, best: as those of `InFlight`; what is not put there yet is anything.
    """

    def __init__(self, plan: BatchPlan, n_vocab: int, num_candidates: int) -> None:
        counts = [item.num_logits for item in plan.items]
        self._takes = np.repeat([item.takes_candidates for item in plan.items], counts)
        self._places = np.where(self._takes, np.cumsum(self._takes), np.cumsum(~self._takes)) - 1
        num_best = int(self._takes.sum())
        self.rows = np.empty((len(self._takes) - num_best, n_vocab), np.float32)
        shape = num_best, num_candidates
        self.best = Candidates(np.empty(shape, np.int32), np.empty(shape, np.float32))

    def __repr__(self) -> str:
        return f"<PartRows {len(self.rows)} whole, {len(self.best)} of candidates>"

    def put(self, each: Pass, rows: Rows, best: Candidates) -> None:
        """What a pass computed."""
        own = np.array(each.rows, np.intp)
        takes = self._takes[own]
        self.rows[self._places[own[~takes]]] = rows
        if len(best):
            self.best.ids[self._places[own[takes]]] = best.ids
            self.best.logits[self._places[own[takes]]] = best.logits

    def computed(self) -> Computed:
        """All of them."""
        return Computed(self.rows, self.best)


def _pass(adapters: AdapterSet, is_pictured: bool, group: list[tuple[int, PlanItem]]) -> Pass:  # noqa: FBT001
    rows = tuple(row + index for row, item in group for index in range(item.num_logits))
    return Pass(adapters, is_pictured, BatchPlan(tuple(item for _, item in group)), rows)
