"""Keys and values of many sequences in one array, a row for each, so that one pass computes a token of all.

Every row begins at column 0, unlike in mlx-lm's own batches, which are padded before the tokens. A row then
comes and goes without the others being moved, goes back by any number of tokens, and may take another number
of tokens than the row beside it: what is written behind a row's last token is not seen, and written again.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from stoker.backends.mlx.native import Array

STEP = 256
"""Columns are allocated in multiples of this, as mlx-lm's caches do it."""
_SLACK = 4
"""Rows likewise: a row that comes mostly finds room."""


class RowPlaces:
    """Where the next tokens of the rows go; shared by the caches of all layers.

    Attributes:
        lengths: tokens of each row.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._offset: Array = None
        self._masks: dict[tuple[int, int | None], Array] = {}
        self._columns: dict[tuple[int, int], Array] = {}

    def __repr__(self) -> str:
        return f"<RowPlaces {self.lengths}>"

    @property
    def stop(self) -> int:
        """The longest row's tokens."""
        return max(self.lengths, default=0)

    @property
    def is_even(self) -> bool:
        """Whether all rows have equally many tokens."""
        return len(set(self.lengths)) == 1

    @property
    def offset(self) -> Array:
        """The same as an array, which rotary embeddings take."""
        if self._offset is None:
            self._offset = mx.array(self.lengths)
        return self._offset

    def changed(self) -> None:
        """Lengths are others now."""
        self._offset = None
        self._masks.clear()
        self._columns.clear()

    def columns(self, num_rows: int, count: int) -> Array:
        """Where `count` more tokens of each row go, (rows, 1, count, 1), with rows to spare."""
        found = self._columns.get((num_rows, count))
        if found is None:
            lengths = mx.array([*self.lengths, *[0] * (num_rows - len(self.lengths))])
            found = lengths[:, None, None, None] + mx.arange(count)[None, None, :, None]
            self._columns[num_rows, count] = found
        return found

    def mask(self, count: int, window: int | None) -> Array:
        """Which columns each of `count` more tokens of each row sees, bool (rows, 1, count, columns)."""
        found = self._masks.get((count, window))
        if found is None:
            columns = mx.arange(self.stop + count)
            at = self.offset[:, None, None, None] + mx.arange(count)[None, None, :, None]
            found = columns <= at
            if window is not None:
                found = found & (columns > at - window)
            self._masks[count, window] = found
        return found


class RowsCache:
    """A layer's keys and values of several sequences; stands in for a `KVCache` in a model's pass.

    Keys are one array, or three where they are quantised: numbers, scales, biases; so are values.
    """

    def __init__(self, places: RowPlaces) -> None:
        self.places = places
        self._keys: list[Array] = []
        self._values: list[Array] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.places!r}>"

    # ------------------------------------------------------------ what models ask

    @property
    def offset(self) -> Array:
        """Tokens of each row before this pass."""
        return self.places.offset

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Array:  # noqa: ARG002, FBT001, FBT002 - mlx-lm's own signature
        """What each row's tokens see; None: everything."""
        if count == 1 and window_size is None and self.places.is_even:
            return None
        return self.places.mask(count, window_size)

    def update_and_fetch(self, keys: Array, values: Array) -> Any:
        """Take the next tokens of all rows; what they and those before them have."""
        count = keys.shape[2]
        self._make_room(count)
        for parts, fresh in ((self._keys, self._packed(keys)), (self._values, self._packed(values))):
            for number, part in enumerate(fresh):
                self._write(parts, number, part, count)
        num_rows, stop = len(self.places.lengths), self.places.stop + count
        return self._fetched(self._keys, num_rows, stop), self._fetched(self._values, num_rows, stop)

    def is_trimmable(self) -> bool:
        """Rows are cut one by one."""
        return False

    # ------------------------------------------------------------ rows

    def put(self, row: int, cache: Any, length: int) -> None:
        """Put a sequence's cache into a row: one that there is, or the one after the last."""
        for parts, theirs in self._with_parts(cache):
            for number, part in enumerate(theirs):
                self._reserve(parts, number, part, row + 1, length)
                held = parts[number]
                held[row : row + 1, :, :length] = part[..., :length, :]
                parts[number] = held

    def taken(self, row: int, length: int) -> Any:
        """The cache of a row's sequence, copied; to be evaluated before anything else is written."""
        keys, values = (
            [mx.contiguous(part[row : row + 1, :, :length]) for part in parts]
            for parts in (self._keys, self._values)
        )
        return self._own(keys, values, length)

    def shrink(self) -> None:
        """Free what more than half of is of no use."""
        rows, columns = _rounded(len(self.places.lengths), _SLACK), _rounded(self.places.stop, STEP)
        for parts in (self._keys, self._values):
            for number, part in enumerate(parts):
                if part.shape[0] * part.shape[2] > 2 * rows * columns:
                    parts[number] = mx.contiguous(part[:rows, :, :columns])

    def _own(self, keys: list[Array], values: list[Array], length: int) -> Any:
        return KVCache.from_state((keys[0], values[0], length))

    @property
    def state(self) -> list[Array]:
        """All arrays."""
        return [*self._keys, *self._values]

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return sum(int(part.nbytes) for part in self.state)

    def _packed(self, fresh: Array) -> list[Array]:
        return [fresh]

    def _with_parts(self, cache: Any) -> list[tuple[list[Array], list[Array]]]:
        """What there is of keys and of values, each with what a sequence's cache has of them."""
        return [(self._keys, self._parts_of(cache.keys)), (self._values, self._parts_of(cache.values))]

    def _parts_of(self, held: Any) -> list[Array]:
        return [held]

    def _fetched(self, parts: list[Array], num_rows: int, stop: int) -> Any:
        return parts[0][:num_rows, :, :stop]

    def _make_room(self, count: int) -> None:
        stop = self.places.stop + count
        for parts in (self._keys, self._values):
            for number, part in enumerate(parts):
                if part.shape[2] < stop:
                    wide = _rounded(stop, STEP) - part.shape[2]
                    parts[number] = mx.pad(part, ((0, 0), (0, 0), (0, wide), (0, 0)))

    def _reserve(self, parts: list[Array], number: int, like: Array, rows: int, columns: int) -> None:
        """Have room in part `number` for so many rows and columns."""
        _, heads, _, width = like.shape
        if len(parts) == number:
            shape = (_rounded(rows, _SLACK), heads, _rounded(columns, STEP), width)
            parts.append(mx.zeros(shape, like.dtype))
            return
        held = parts[number]
        more_rows = max(0, rows - held.shape[0]) and _rounded(rows, _SLACK) - held.shape[0]
        more_columns = max(0, columns - held.shape[2]) and _rounded(columns, STEP) - held.shape[2]
        if more_rows or more_columns:
            parts[number] = mx.pad(held, ((0, more_rows), (0, 0), (0, more_columns), (0, 0)))

    def _write(self, parts: list[Array], number: int, fresh: Array, count: int) -> None:
        part, num_rows, at = parts[number], len(self.places.lengths), self.places.stop
        if self.places.is_even:
            part[:num_rows, :, at : at + count] = fresh
        else:
            spare = part.shape[0] - num_rows  # rows of nobody, into which anything may be written
            if spare:
                fresh = mx.pad(fresh, ((0, spare), (0, 0), (0, 0), (0, 0)))
            columns = mx.broadcast_to(self.places.columns(part.shape[0], count), fresh.shape)
            part = mx.put_along_axis(part, columns, fresh, axis=2)
        parts[number] = part


class QuantisedRowsCache(RowsCache):
    """The same of quantised keys and values.

    Attributes:
        bits: of a number.
        group_size: numbers that share a scale.
    """

    def __init__(self, places: RowPlaces, bits: int, group_size: int) -> None:
        super().__init__(places)
        self.bits = bits
        self.group_size = group_size

    def _own(self, keys: list[Array], values: list[Array], length: int) -> Any:
        return QuantizedKVCache.from_state((tuple(keys), tuple(values), length, self.group_size, self.bits))

    def _packed(self, fresh: Array) -> list[Array]:
        return list(mx.quantize(fresh, group_size=self.group_size, bits=self.bits))

    def _parts_of(self, held: Any) -> list[Array]:
        return list(held)

    def _fetched(self, parts: list[Array], num_rows: int, stop: int) -> Any:
        return tuple(part[:num_rows, :, :stop] for part in parts)


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
