"""The sequences of a model: their tokens, and where what was computed of them lies.

A sequence's caches are its own, or a row of a batch while it decodes beside others. What a failed pass may
have spoiled is given up and computed again from the tokens when it is next needed, so a failure leaves every
sequence as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from stoker.backends.cell_map import CellMap
from stoker.backends.mlx.caches import kinds
from stoker.backends.mlx.caches.batch import RowBatch
from stoker.backends.mlx.caches.kinds import Cache
from stoker.backends.protocol.backend import BatchPlan, Capabilities, Lengths, Placed, PlanItem
from stoker.backends.protocol.vision import embeddings_of, placed_at
from stoker.errors import PoolFullError

if TYPE_CHECKING:
    from stoker.backends.mlx.state import HeldSequence
    from stoker.backends.protocol.backend import Rows

Adapters: TypeAlias = tuple[tuple[str, float], ...]
"""Names and scales, in the order of names."""
Compute: TypeAlias = Callable[[list[Cache], Sequence[int], Adapters, Sequence[Placed]], None]
"""Appends tokens, and pictures in some of their places, to caches, to the end."""

MOST_COPIES = 4
"""How often a pool's tokens may lie in memory: those that sequences share part when one of them goes on."""
_SHORT = 1024
"""Sequences of up to so many tokens are rows of one batch, those of up to four times as many of another: rows
are as long as the longest."""
_GROWTH = 4


@dataclass(slots=True)
class _Held:
    """One sequence.

    Attributes:
        tokens: all that it holds.
        caches: its own; None: it has a row, or its tokens have to be computed.
        start: where it begins; empty: where the model does.
        adapters: what its next tokens are computed with.
        given: pictures that its next tokens may be of.
        pictures: those that it holds, or a part of them, in order of their starts.
    """

    tokens: list[int] = field(default_factory=list)
    caches: list[Cache] | None = None
    start: list[Cache] = field(default_factory=list)
    adapters: Adapters = ()
    given: tuple[Placed, ...] = ()
    pictures: list[Placed] = field(default_factory=list)

    def keep_pictures(self) -> None:
        """Forget those that it holds nothing of."""
        self.pictures = [each for each in self.pictures if each.start < len(self.tokens)]


class MlxSequences:
    """See the module.

    Args:
        lengths: the limits that plans are held to.
        limits: how many there are, and how many tokens all of them may hold, shared ones counted once.
        make: caches of a sequence without tokens.
        compute: as `Compute`.
    """

    def __init__(
        self, lengths: Lengths, limits: Capabilities, make: Callable[[], list[Cache]], compute: Compute
    ) -> None:
        self.lengths = lengths
        self._cells = CellMap(limits.num_cells)
        self._num_cells = limits.num_cells
        self._make = make
        self._compute = compute
        self._held = [_Held() for _ in range(limits.num_sequences)]
        self._batches: dict[tuple[Adapters, int], RowBatch] = {}
        self._places: dict[int, tuple[Adapters, int]] = {}  # the batch of each sequence that has a row

    def __repr__(self) -> str:
        return f"<MlxSequences {self.lengths!r} {self._cells!r} in {len(self._batches)} batches>"

    @property
    def size_bytes(self) -> int:
        """What caches hold; those that are shared count for each who shares them."""
        own = sum(kinds.size_bytes(held.caches) for held in self._held if held.caches)
        return own + sum(batch.size_bytes for batch in self._batches.values())

    def tokens(self, seq: int) -> list[int]:
        """All that a sequence holds."""
        return self._held[seq].tokens

    def adapters(self, seq: int) -> Adapters:
        """What its next tokens are computed with."""
        return self._held[seq].adapters

    def adapt(self, seq: int, adapters: Adapters) -> None:
        """Compute its next tokens with these."""
        self._held[seq].adapters = adapters

    def pictures(self, seq: int) -> list[Placed]:
        """Those that it holds, or a part of them."""
        return self._held[seq].pictures

    def show(self, seq: int, pictures: tuple[Placed, ...]) -> None:
        """Its next tokens may be of these."""
        self._held[seq].given = pictures

    def embeddings(self, item: PlanItem) -> Rows | None:
        """What stands in the place of an item's tokens; None: they are tokens. Raises StepFailedError."""
        return embeddings_of(item, self._held[item.seq].given) if item.tokens[0] < 0 else None

    def start(self, seq: int) -> list[Cache]:
        """Caches from which it begins; empty: as the model does."""
        return self._held[seq].start

    # ------------------------------------------------------------ changes that compute nothing

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty `dst` share the first `length` tokens of `src`."""
        held, source = self._held[dst], self._held[src]
        held.tokens, held.start = source.tokens[:length], source.start
        held.pictures = list(source.pictures)
        held.keep_pictures()
        if source.caches is not None:
            held.caches = kinds.forked(source.caches, length)
        elif src in self._places:
            held.caches = self._batch_of(src).copied(src)
            kinds.cut(held.caches, length)
        self._cells.fork(src, dst, length)
        self.lengths[dst] = length

    def trim(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens; 0 forgets where it began, too."""
        held = self._held[seq]
        if length == 0:
            self.lose([seq])
            held.start, held.given = [], ()
        elif length == self.lengths[seq]:
            return
        elif held.caches is not None:
            kinds.cut(held.caches, length)
        elif seq in self._places:
            self._batch_of(seq).cut(seq, length)
        del held.tokens[length:]
        held.keep_pictures()
        self._cells.trim(seq, length)
        self.lengths[seq] = length

    def take(self, seq: int, state: HeldSequence) -> None:
        """Give the empty sequence what was exported of one. Raises PoolFullError."""
        self._cells.append(seq, len(state.tokens))
        held = self._held[seq]
        held.tokens, held.caches, held.start = list(state.tokens), state.caches or None, state.start
        held.pictures = list(state.pictures)
        self.lengths[seq] = len(state.tokens)

    def begin_from(self, seq: int, start: list[Cache]) -> None:
        """Let the empty sequence begin from these caches."""
        self._held[seq].start = start
        self._held[seq].caches = None

    def lose(self, seqs: Iterable[int]) -> None:
        """Give up what was computed of these; their tokens stay."""
        for seq in seqs:
            if seq in self._places:
                self._leave(seq)
            self._held[seq].caches = None

    def spoil(self, seqs: Iterable[int]) -> None:
        """The same after a failed pass: rows are not moved, as what is in them may be broken."""
        for seq in seqs:
            if seq in self._places:
                for other in self._batches.pop(self._places[seq]).seqs:
                    del self._places[other]
            self._held[seq].caches = None

    # ------------------------------------------------------------ steps

    def check_room(self, plan: BatchPlan) -> None:
        """Raise PoolFullError where a plan's tokens find no cells."""
        self._cells.check_free(plan.num_tokens)
        held = sum(len(each.tokens) for each in self._held)
        most = MOST_COPIES * self._num_cells
        if held + plan.num_tokens > most:
            text = (
                f"{plan.num_tokens} tokens do not fit beside {held}: sequences that share cells have copies"
            )
            raise PoolFullError(
                f"{text} of them when they go on, {most} tokens at most", needed=plan.num_tokens
            )

    def own(self, seq: int) -> list[Cache]:
        """A sequence's own caches with all its tokens; takes it out of its batch, computes what was lost."""
        held = self._held[seq]
        if seq in self._places:
            held.caches = self._batch_of(seq).copied(seq)
            self._leave(seq)
        if held.caches is None:
            caches = kinds.shared(held.start) if held.start else self._make()
            if held.tokens:
                self._compute(caches, held.tokens, held.adapters, held.pictures)
            held.caches = caches
        return held.caches

    def copied(self, seq: int) -> list[Cache]:
        """The same to be read at once; a row stays where it is."""
        if seq in self._places:
            return self._batch_of(seq).copied(seq)
        return self.own(seq)

    def rows(self, seqs: Sequence[int], adapters: Adapters) -> list[RowBatch]:
        """Batches in which exactly these sequences have rows."""
        keys = {seq: (adapters, _bound(self.lengths[seq])) for seq in seqs}
        for seq in seqs:
            if seq in self._places and self._places[seq] != keys[seq]:
                self.own(seq)
        wanted = set(keys.values())
        for key in wanted:
            batch = self._batches.setdefault(key, RowBatch())
            for other in [each for each in batch.seqs if keys.get(each) != key]:
                self.own(other)
        for key in wanted:
            fresh = {
                seq: (self.own(seq), self.lengths[seq])
                for seq in seqs
                if keys[seq] == key and seq not in self._places
            }
            batch = self._batches.setdefault(key, RowBatch())
            batch.add(fresh)
            mx.eval(batch.arrays)
            for seq in fresh:
                self._held[seq].caches = None
                self._places[seq] = key
        return [self._batches[key] for key in sorted(wanted, key=lambda key: key[1])]

    def advance(self, plan: BatchPlan) -> None:
        """Count the tokens of a plan that was launched."""
        for item in plan.items:
            self._cells.append(item.seq, len(item.tokens))
            held = self._held[item.seq]
            held.tokens.extend(item.tokens)
            if item.tokens[0] < 0:
                placed = placed_at(item, held.given)
                held.pictures = [each for each in held.pictures if each.start != placed.start] + [placed]
        self.lengths.advance(plan)

    def take_back(self, plan: BatchPlan) -> None:
        """The plan that was counted has failed: its sequences hold what they held before it."""
        self.spoil([item.seq for item in plan.items])
        for item in plan.items:
            del self._held[item.seq].tokens[item.start :]
            self._held[item.seq].keep_pictures()
            self._cells.trim(item.seq, item.start)
            self.lengths[item.seq] = item.start

    def clear(self) -> None:
        """Free everything."""
        for held in self._held:
            held.caches, held.start, held.given, held.pictures = None, [], (), []
        self._batches.clear()
        self._places.clear()

    def check(self) -> None:
        """Assert that tokens, lengths, cells and rows agree."""
        self._cells.check()
        for seq, held in enumerate(self._held):
            assert len(held.tokens) == self.lengths[seq] == len(self._cells.cells(seq)), f"sequence {seq}"
            assert held.caches is None or seq not in self._places, f"sequence {seq} lies in two places"
        for key, batch in self._batches.items():
            assert {seq for seq, place in self._places.items() if place == key} == set(batch.seqs)
            assert all(batch.length(seq) == self.lengths[seq] for seq in batch.seqs), f"{batch!r}"

    def _batch_of(self, seq: int) -> RowBatch:
        return self._batches[self._places[seq]]

    def _leave(self, seq: int) -> None:
        key = self._places.pop(seq)
        batch = self._batches[key]
        batch.remove(seq)
        if not batch.seqs:
            del self._batches[key]


def _bound(length: int) -> int:
    """The most tokens of the batch that a sequence of so many belongs to."""
    bound = _SHORT
    while bound <= length:
        bound *= _GROWTH
    return bound
