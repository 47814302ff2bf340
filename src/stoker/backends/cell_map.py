"""Which cell of a unified KV pool holds which token of which sequence.

New tokens take the lowest free cells in ascending order, as llama.cpp fills its pool. Pure bookkeeping: what
lies in the cells, and how it is moved, is the backend's. Attention adds up in the order of the cells, so rows
are the same to the bit as long as the cells of a sequence's tokens ascend (docs/adr/0019). They do while no
cell before its last one is free when it grows: `loose` names the tokens that have to be moved before that.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stoker.errors import PoolFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    Cells = npt.NDArray[np.int32]


_NONE: array[int] = array("i")


@dataclass(frozen=True, slots=True)
class Stretch:
    """The tokens `start` to `stop` of the sequences `owners`, which share their cells."""

    owners: tuple[int, ...]
    start: int
    stop: int


class CellMap:
    """The pool of `num_cells` cells; each holds one token and may belong to several sequences.

    Attributes:
        num_used: cells that belong to a sequence at least.
    """

    def __init__(self, num_cells: int) -> None:
        self.num_used = 0
        self._num_owners = np.zeros(num_cells, np.int32)
        self._first_free = 0
        self._cells: defaultdict[int, array[int]] = defaultdict(partial(array, "i"))

    def __repr__(self) -> str:
        return f"<CellMap {self.num_used} of {len(self._num_owners)} used, first free {self._first_free}>"

    # ------------------------------------------------------------ questions

    def cells(self, seq: int) -> list[int]:
        """The cells of a sequence's tokens, in the order of the tokens."""
        return list(self._cells.get(seq, _NONE))

    def is_in_order(self, seq: int) -> bool:
        """Whether each token of the sequence lies behind the one before it."""
        return bool(np.all(np.diff(self._view(seq)) > 0))

    @property
    def has_hole(self) -> bool:
        """Whether a free cell lies before one in use."""
        return self._first_free < self.num_used

    def loose(self, seqs: Iterable[int], most: int) -> Iterator[Stretch]:
        """The tokens of these sequences that have a free cell before them, at most `most` at a time.

        Each stretch is to be `moved` before the next is asked for. Those that come first are moved first and
        take the lowest free cells, so whatever is behind them stays behind them.
        """
        for seq in seqs:
            length, stop = len(self._view(seq)), 0
            while (start := max(stop, self._num_settled(seq))) < length:
                owners = {other: self._num_shared(seq, other) for other in list(self._cells)}
                owners = {other: shared for other, shared in owners.items() if shared > start}
                stop = min(start + most, *owners.values())
                yield Stretch(tuple(owners), start, stop)

    def _num_settled(self, seq: int) -> int:
        """How many first tokens of the sequence have no free cell before them."""
        return int(np.searchsorted(self._view(seq), self._first_free))

    def _num_shared(self, seq: int, other: int) -> int:
        """How many first tokens two sequences have in the same cells."""
        mine, others = self._view(seq), self._view(other)
        length = min(len(mine), len(others))
        differ = mine[:length] != others[:length]
        return int(differ.argmax()) if differ.any() else length

    def _view(self, seq: int) -> Cells:
        """Its cells, to be let go before their number changes."""
        return np.frombuffer(self._cells.get(seq, _NONE), np.int32)

    # ------------------------------------------------------------ changes

    def check_free(self, count: int) -> None:
        """Raise PoolFullError where fewer than `count` cells are free."""
        free = len(self._num_owners) - self.num_used
        if count > free:
            raise PoolFullError(
                f"{count} cells are needed, {free} of {len(self._num_owners)} are free",
                needed=count,
                free=free,
            )

    def append(self, seq: int, count: int) -> None:
        """Put `count` more tokens of the sequence into the lowest free cells. Raises PoolFullError."""
        first = self._first_free
        if count == 1 and self.num_used <= first < len(self._num_owners):
            # a token of a decode row, before which no cell is free: without arrays
            self._cells[seq].append(first)
            self._num_owners[first] = 1
            self._first_free = first + 1
            self.num_used += 1
            return
        self._cells[seq].frombytes(self._take(count, 1).tobytes())

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty sequence `dst` share the first `length` cells of `src`."""
        self._cells[dst] = self._cells[src][:length]
        self._num_owners[self._view(dst)] += 1

    def trim(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens; a cell without owners is free."""
        gone = self._view(seq)[length:].copy()
        self._num_owners[gone] -= 1
        self._freed(gone[self._num_owners[gone] == 0])
        if length:
            del self._cells[seq][length:]
        else:
            self._cells.pop(seq, None)

    def moved(self, stretch: Stretch) -> None:
        """These tokens were taken out of all their owners, and put back into them."""
        gone = self._view(stretch.owners[0])[stretch.start : stretch.stop].copy()
        self._num_owners[gone] = 0
        self._freed(gone)
        taken = self._take(len(gone), len(stretch.owners))
        for seq in stretch.owners:
            self._view(seq)[stretch.start : stretch.stop] = taken

    def _freed(self, gone: Cells) -> None:
        self.num_used -= len(gone)
        self._first_free = min(self._first_free, int(gone.min(initial=self._first_free)))

    def _take(self, count: int, num_owners: int) -> Cells:
        """The `count` lowest free cells, for so many owners each."""
        self.check_free(count)
        total, first = len(self._num_owners), self._first_free
        if self.has_hole:
            free = np.append(np.flatnonzero(self._num_owners == 0), total).astype(np.int32)
            taken, self._first_free = free[:count], int(free[count])
        else:
            taken, self._first_free = np.arange(first, first + count, dtype=np.int32), first + count
        self._num_owners[taken] = num_owners
        self.num_used += count
        return taken

    def check(self) -> None:
        """Assert that every cell has as many owners as sequences that hold it."""
        owners = np.zeros_like(self._num_owners)
        for seq in self._cells:
            owners[self._view(seq)] += 1
        assert np.array_equal(owners, self._num_owners), "a cell's owners are miscounted"
        assert self.num_used == np.count_nonzero(owners), f"{self!r} holds {np.count_nonzero(owners)}"
        free = np.flatnonzero(owners == 0)
        assert self._first_free == (free[0] if len(free) else len(owners)), f"{self!r}"
