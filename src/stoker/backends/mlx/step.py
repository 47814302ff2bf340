"""One step: the passes that a plan becomes, and what comes of them.

Items of one token each, or few, are one pass over rows; every other item is a pass of its own. All passes of
a plan are one graph, which is evaluated at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from stoker.backends.mlx.caches import kinds
from stoker.backends.mlx.native import Array
from stoker.backends.protocol.backend import (
    BatchPlan,
    Candidates,
    Computed,
    InFlight,
    PlanItem,
)
from stoker.errors import StepFailedError, StepMemoryError, StokerError

if TYPE_CHECKING:
    from stoker.backends.mlx.caches.batch import RowBatch
    from stoker.backends.mlx.caches.kinds import Cache
    from stoker.backends.mlx.network import Network
    from stoker.backends.mlx.sequences import Adapters, MlxSequences
    from stoker.backends.protocol.backend import Placed, Rows

NUM_CANDIDATES = 64
"""Logits of a row that are found on the device."""
_FEW_TOKENS = 16
"""Tokens of an item up to which it may be a row; the others are guesses."""
_OF_MEMORY = ("malloc", "memory", "allocate")
_WASTE = 2
"""How often the tokens of rows may be computed, counting those that fill up shorter rows."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """Logits that a pass gives, and the places of its items in the plan with their number of rows."""

    logits: Array | None
    items: list[tuple[int, int]]


class Steps:
    """Computes plans of the sequences of one network.

    Args:
        network: computes passes.
        is_async: whether a launch returns before its graph was computed.
    """

    def __init__(self, network: Network, *, is_async: bool) -> None:
        caches = network.new_caches()
        self._network = network
        self._can_be_rows = kinds.can_be_rows(caches)
        self._most_tokens = _FEW_TOKENS if kinds.keeps_every_token(caches) else 1
        self._is_async = is_async

    def __repr__(self) -> str:
        return f"<Steps of {self._network!r}>"

    def launch(self, sequences: MlxSequences, plan: BatchPlan) -> InFlight:
        """Begin a plan that was checked. Raises StepFailedError, and the sequences are as they were."""
        try:
            passes, held = self._passes(sequences, plan)
            wanted = self._sorted_out(plan, passes)
            begin = mx.async_eval if self._is_async else mx.eval
            begin([array for array in wanted if array is not None], held)
        except Exception as error:
            sequences.spoil(item.seq for item in plan.items)
            if isinstance(error, StokerError):
                raise
            raise failure(error) from error
        sequences.advance(plan)
        if self._is_async:
            return _Computing(sequences, plan, wanted, self._network.n_vocab)
        return computed(wanted, self._network.n_vocab)

    def append(
        self, caches: list[Cache], tokens: Sequence[int], adapters: Adapters, embeddings: Rows | None = None
    ) -> None:
        """Append tokens to caches that are nobody's row, computed to the end. Raises StepFailedError."""
        if embeddings is None and min(tokens) < 0:  # there is no row of such a number: MLX would read beside
            raise StepFailedError("a picture has to be computed again, and its embeddings are not known")
        self.forward(caches, tokens, 0, adapters, embeddings)
        mx.eval(kinds.arrays(caches))

    def append_all(
        self,
        most: int,
        caches: list[Cache],
        tokens: Sequence[int],
        adapters: Adapters,
        pictures: Sequence[Placed] = (),
    ) -> None:
        """The same in passes of at most `most` tokens; pictures' embeddings stand in some of their places."""
        begin = 0
        while begin < len(tokens):
            end = min(begin + most, len(tokens))
            shown: Rows | None = None
            for placed in pictures:
                offset, last = begin - placed.start, placed.start + len(placed.embeddings)
                if offset < 0:
                    end = min(end, placed.start)
                elif begin < last:
                    end = min(end, last)
                    shown = placed.embeddings[offset:]
            self.append(caches, tokens[begin:end], adapters, None if shown is None else shown[: end - begin])
            begin = end

    def forward(
        self,
        caches: list[Cache],
        tokens: Sequence[int],
        num_logits: int,
        adapters: Adapters = (),
        embeddings: Rows | None = None,
    ) -> Array | None:
        """The graph of a pass over one sequence: float32 logits of its last tokens; None: none asked.

        `embeddings` stand in the tokens' place, (tokens, width).
        """
        count = len(tokens)
        rows = list(range(count - num_logits, count))
        if embeddings is None:
            return self._network.forward(mx.array([list(tokens)]), caches, rows, adapters)
        blank = mx.zeros((1, count), dtype=mx.int32)
        return self._network.forward(blank, caches, rows, adapters, mx.array(embeddings[None]))

    def _passes(self, sequences: MlxSequences, plan: BatchPlan) -> tuple[list[_Pass], list[Array]]:
        passes: list[_Pass] = []
        held: list[Array] = []
        for adapters, places in self._rows(sequences, plan).items():
            by_seq = {plan.items[place].seq: place for place in places}
            for batch in sequences.rows(list(by_seq), adapters):
                passes.append(self._over_rows(batch, plan, by_seq, adapters))
                held += batch.arrays
        in_rows = {place for each in passes for place, _ in each.items}
        for place, item in enumerate(plan.items):
            if place not in in_rows:
                caches = sequences.own(item.seq)
                adapters, shown = sequences.adapters(item.seq), sequences.embeddings(item)
                logits = self.forward(caches, item.tokens, item.num_logits, adapters, shown)
                passes.append(_Pass(logits, [(place, item.num_logits)]))
                held += kinds.arrays(caches)
        return passes, held

    def _rows(self, sequences: MlxSequences, plan: BatchPlan) -> dict[Adapters, list[int]]:
        """Places of the items that are rows of one pass, by what they are computed with."""
        if not self._can_be_rows or len(plan.items) == 1:
            return {}
        found: dict[Adapters, list[int]] = {}
        for place, item in enumerate(plan.items):
            if len(item.tokens) <= self._most_tokens and item.start and item.tokens[0] >= 0:
                found.setdefault(sequences.adapters(item.seq), []).append(place)
        for adapters, places in list(found.items()):
            counts = [len(plan.items[place].tokens) for place in places]
            if len(places) * max(counts) > _WASTE * sum(counts):
                places = [place for place in places if len(plan.items[place].tokens) == 1]  # noqa: PLW2901
            found[adapters] = places
        return {adapters: places for adapters, places in found.items() if len(places) > 1}

    def _over_rows(
        self, batch: RowBatch, plan: BatchPlan, by_seq: dict[int, int], adapters: Adapters
    ) -> _Pass:
        items = [plan.items[by_seq[seq]] for seq in batch.seqs]
        count = max(len(item.tokens) for item in items)
        tokens = [[*item.tokens, *[item.tokens[-1]] * (count - len(item.tokens))] for item in items]
        rows = [
            number * count + at
            for number, item in enumerate(items)
            for at in range(len(item.tokens) - item.num_logits, len(item.tokens))
        ]
        logits = self._network.forward(mx.array(tokens), batch.caches, rows, adapters)
        batch.advance([len(item.tokens) for item in items])
        return _Pass(logits, [(by_seq[item.seq], item.num_logits) for item in items])

    @staticmethod
    def _sorted_out(plan: BatchPlan, passes: list[_Pass]) -> tuple[Array | None, Array | None, Array | None]:
        """Rows in the plan's order of items that want them; ids and logits of the largest of the others."""
        parts = [each.logits for each in passes if each.logits is not None]
        if not parts:
            return None, None, None
        begins, at = {}, 0
        for each in passes:
            for place, num_rows in each.items:
                begins[place] = at
                at += num_rows
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        whole: list[int] = []
        best: list[int] = []
        for place, item in enumerate(plan.items):
            rows = best if item.takes_candidates else whole
            rows.extend(range(begins[place], begins[place] + item.num_logits))
        found = None
        if whole:
            is_as_it_is = whole == list(range(logits.shape[0]))
            found = logits if is_as_it_is else logits[mx.array(whole, dtype=mx.int32)]
        return (found, *_largest(logits[mx.array(best, dtype=mx.int32)])) if best else (found, None, None)


class _Computing:
    """A step whose graph is computed meanwhile."""

    def __init__(
        self, sequences: MlxSequences, plan: BatchPlan, wanted: tuple[Array | None, ...], n_vocab: int
    ) -> None:
        self._sequences = sequences
        self._plan = plan
        self._wanted = wanted
        self._n_vocab = n_vocab
        self._found: Computed | None = None

    def rows(self) -> Rows:
        if self._found is None:
            try:
                self._found = computed(self._wanted, self._n_vocab)
            except Exception as error:
                self._sequences.take_back(self._plan)
                raise failure(error) from error
        return self._found.rows()

    def candidates(self) -> Candidates:
        assert self._found is not None, "candidates before rows"
        return self._found.candidates()


def computed(wanted: tuple[Array | None, ...], n_vocab: int) -> Computed:
    """What was asked for, as numpy has it; waits for the device."""
    rows, ids, logits = wanted
    found = np.empty((0, n_vocab), np.float32) if rows is None else np.asarray(rows)
    if ids is None or logits is None:
        return Computed(found)
    return Computed(found, Candidates(np.asarray(ids), np.asarray(logits)))


def failure(error: Exception) -> StepFailedError:
    """What a failed pass is to the engine."""
    text = f"MLX could not compute the step: {error}"
    words = str(error).lower()
    is_memory = isinstance(error, MemoryError) or any(word in words for word in _OF_MEMORY)
    return StepMemoryError(text) if is_memory else StepFailedError(text)


def _largest(logits: Array) -> tuple[Array, Array]:
    """Ids and logits of the largest of each row, the largest first; NaN anywhere makes the first one NaN."""
    count = min(NUM_CANDIDATES, logits.shape[1])
    ids = mx.argpartition(-logits, kth=count - 1, axis=1)[:, :count]
    found = mx.take_along_axis(logits, ids, axis=1)
    order = mx.argsort(-found, axis=1)
    ids, found = mx.take_along_axis(ids, order, axis=1), mx.take_along_axis(found, order, axis=1)
    is_broken = mx.isnan(logits).any(axis=1, keepdims=True)
    first = mx.arange(count)[None] == 0
    return ids.astype(mx.int32), mx.where(is_broken & first, mx.array(np.nan, dtype=mx.float32), found)


def single(seq: int, start: int, tokens: Sequence[int], num_logits: int = 0) -> BatchPlan:
    """A plan of one item."""
    return BatchPlan((PlanItem(seq, start, tokens, num_logits),))
