"""What a graph of MNN's says of itself: its attentions, and where the weights outside of it end.

The file is a FlatBuffer of MNN's public schema. It is read in place, with every offset compared with the
length of the file: native code reads the same file and takes its word for it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.models.folders.json_file import broken

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_OPS = 1 << 20
_MAX_NUMBERS = 16
_NET_OPS = 3  # fields by their numbers in the schema
_OP_MAIN, _OP_TYPE = 2, 5
_CONVOLUTION_EXTERNAL = 6
_CONVOLUTION, _ATTENTION, _LINEAR_ATTENTION = 12, 299, 305
_WORD = struct.Struct("<I")
_SIGNED = struct.Struct("<i")
_SHORT = struct.Struct("<H")
_LONG = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Graph:
    """What a graph says of itself.

    Attributes:
        num_ops: steps of it.
        num_attentions: those that keep keys and values.
        has_states: it keeps states too that cannot go back, as those of linear attention.
        end_of_weights: the last byte of the file of weights that it names; 0: none, as far as is read.
    """

    num_ops: int
    num_attentions: int
    has_states: bool
    end_of_weights: int


def read_graph(path: Path) -> Graph:
    """Read the graph at `path`. Raises ModelFileError where it is none, damaged, or no language model's."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            found = _read(_Table(data, _WORD.unpack_from(data, 0)[0]))
        except (struct.error, IndexError, ValueError):
            raise broken(path, "it is no graph of MNN's, or cut short") from None
    if not found.num_attentions and not found.has_states:
        raise broken(path, f"its {found.num_ops} steps have no attention: it is no language model of MNN's")
    return found


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the file, at a place in it."""

    data: mmap.mmap
    place: int

    def field(self, number: int) -> int:
        """Place of a field's value; 0: it is not there."""
        head = self.place - int(_SIGNED.unpack_from(self.data, self.place)[0])
        if head < 0:
            raise ValueError("a table before the file")
        at = 4 + 2 * number
        if at >= _SHORT.unpack_from(self.data, head)[0]:
            return 0
        offset = int(_SHORT.unpack_from(self.data, head + at)[0])
        return self.place + offset if offset else 0

    def number(self, number: int) -> int:
        """A whole number of 32 bits; 0 where it is not there."""
        place = self.field(number)
        return int(_SIGNED.unpack_from(self.data, place)[0]) if place else 0

    def table(self, number: int) -> _Table | None:
        """Another table; None where it is not there."""
        place = self.field(number)
        return _Table(self.data, place + _WORD.unpack_from(self.data, place)[0]) if place else None

    def tables(self, number: int) -> Iterator[_Table]:
        """Tables of a list."""
        place, count = self._list(number, _MAX_OPS)
        for at in range(place, place + 4 * count, 4):
            yield _Table(self.data, at + _WORD.unpack_from(self.data, at)[0])

    def longs(self, number: int) -> list[int]:
        """Whole numbers of 64 bits."""
        place, count = self._list(number, _MAX_NUMBERS)
        return [int(_LONG.unpack_from(self.data, place + 8 * at)[0]) for at in range(count)]

    def _list(self, number: int, most: int) -> tuple[int, int]:
        """Place of the first element and how many there are."""
        place = self.field(number)
        if not place:
            return 0, 0
        place += int(_WORD.unpack_from(self.data, place)[0])
        count = int(_WORD.unpack_from(self.data, place)[0])
        if count > most:
            raise ValueError("a list that is too long")
        return place + 4, count


def _read(net: _Table) -> Graph:
    num_ops = num_attentions = end = 0
    has_states = False
    for op in net.tables(_NET_OPS):
        num_ops += 1
        kind = op.number(_OP_TYPE)
        num_attentions += kind == _ATTENTION
        has_states |= kind == _LINEAR_ATTENTION
        if kind == _CONVOLUTION and (main := op.table(_OP_MAIN)):
            begin, *sizes = main.longs(_CONVOLUTION_EXTERNAL) or [0]
            end = max(end, begin + sum(sizes))
    return Graph(num_ops, num_attentions, has_states, end)
