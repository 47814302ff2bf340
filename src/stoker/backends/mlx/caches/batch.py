"""MlxSequences that are computed together: a row each, in every layer's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from stoker.backends.mlx.caches.kinds import Cache, arrays, compacted
from stoker.backends.mlx.caches.rows import QuantisedRowsCache, RowPlaces, RowsCache
from stoker.backends.mlx.native import Array


class _MergedRows:
    """A layer whose rows are one of mlx-lm's own batches: a sliding window, or a recurrent state."""

    def __init__(self) -> None:
        self.cache: Any = None

    def add(self, fresh: Sequence[Cache]) -> None:
        merged = type(fresh[0]).merge(list(fresh))
        if self.cache is None:
            self.cache = merged
        else:
            self.cache.extend(merged)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these, in this order."""
        if rows:
            self.cache.filter(mx.array(rows))
        else:
            self.cache = None


class RowBatch:
    """MlxSequences in rows; which of them has which row is its own."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self._places = RowPlaces()
        self._layers: list[RowsCache | _MergedRows] = []

    def __repr__(self) -> str:
        return f"<RowBatch of {self.seqs}, {self._places.lengths} tokens>"

    @property
    def caches(self) -> list[Any]:
        """A cache a layer, as a model takes them for a pass over all rows."""
        return [layer.cache if isinstance(layer, _MergedRows) else layer for layer in self._layers]

    @property
    def arrays(self) -> list[Array]:
        """All arrays that it holds."""
        return arrays([cache for cache in self.caches if cache is not None])

    @property
    def size_bytes(self) -> int:
        """Bytes of them."""
        return sum(int(array.nbytes) for array in self.arrays)

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._places.lengths[self.seqs.index(seq)]

    def add(self, fresh: Mapping[int, tuple[Sequence[Cache], int]]) -> None:
        """Give each of these sequences a row: its caches, which are free from here on, and its tokens."""
        if not fresh:
            return
        if not self._layers:
            caches, _ = next(iter(fresh.values()))
            self._layers = [self._layer(cache) for cache in caches]
        for seq, (caches, length) in fresh.items():
            for layer, cache in zip(self._layers, caches, strict=True):
                if isinstance(layer, RowsCache):
                    layer.put(len(self.seqs), cache, length)
            self.seqs.append(seq)
            self._places.lengths.append(length)
        for number, layer in enumerate(self._layers):
            if isinstance(layer, _MergedRows):
                layer.add([caches[number] for caches, _ in fresh.values()])
        self._places.changed()

    def copied(self, seq: int) -> list[Cache]:
        """A sequence's own caches; its row stays."""
        row = self.seqs.index(seq)
        length = self._places.lengths[row]
        found = compacted(
            [
                layer.taken(row, length) if isinstance(layer, RowsCache) else layer.cache.extract(row)
                for layer in self._layers
            ]
        )
        mx.eval(arrays(found))
        return found

    def remove(self, seq: int) -> None:
        """Let the last row take the place of the sequence's."""
        row, last = self.seqs.index(seq), len(self.seqs) - 1
        if row != last:
            self._move(last, row)
        kept = [last if each == row else each for each in range(last)]
        for layer in self._layers:
            if isinstance(layer, _MergedRows):
                layer.keep(kept)
        self.seqs[row] = self.seqs[last]
        self._places.lengths[row] = self._places.lengths[last]
        self.seqs.pop()
        self._places.lengths.pop()
        self._places.changed()
        if not self.seqs:
            self._layers.clear()
            return
        for layer in self._layers:
            if isinstance(layer, RowsCache):
                layer.shrink()

    def cut(self, seq: int, length: int) -> None:
        """Keep a sequence's first `length` tokens; only where every layer keeps every token."""
        self._places.lengths[self.seqs.index(seq)] = length
        self._places.changed()

    def advance(self, counts: Sequence[int]) -> None:
        """A pass has appended so many tokens to each row."""
        lengths = self._places.lengths
        lengths[:] = [length + count for length, count in zip(lengths, counts, strict=True)]
        self._places.changed()

    def _move(self, last: int, row: int) -> None:
        length = self._places.lengths[last]
        moved = {
            number: layer.taken(last, length)
            for number, layer in enumerate(self._layers)
            if isinstance(layer, RowsCache)
        }
        mx.eval(arrays(moved.values()))
        for number, cache in moved.items():
            layer = self._layers[number]
            assert isinstance(layer, RowsCache)
            layer.put(row, cache, length)

    def _layer(self, like: Cache) -> RowsCache | _MergedRows:
        if type(like) is KVCache:
            return RowsCache(self._places)
        if type(like) is QuantizedKVCache:
            return QuantisedRowsCache(self._places, like.bits, like.group_size)
        return _MergedRows()
