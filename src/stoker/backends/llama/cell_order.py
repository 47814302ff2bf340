"""Keeps the cells of each sequence of a context in the order of its tokens (docs/adr/0019).

Mirrors where llama.cpp puts tokens, and before a step moves what has a free cell before it: the tokens are
taken out as bytes and put back, which computes nothing and changes no bit.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.cell_map import CellMap
from stoker.backends.llama.binding import llama
from stoker.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.cell_map import Stretch

MOVED_BYTES = 4 * 2**20
"""Keys and values that are moved at a time, at least one token's: about a millisecond's copying."""
_LEAST_CELL_BYTES = 1024  # where the library did not say what its buffers take
_BYTES_P = ctypes.POINTER(ctypes.c_uint8)


class CellOrder:
    """The cells of one native context.

    Args:
        handle: the context.
        num_cells: how many it has.
        cell_bytes: keys and values of one of them, over all layers.
        spare: a sequence number of the context that nobody else uses.
    """

    def __init__(self, handle: int, num_cells: int, cell_bytes: int, spare: int) -> None:
        self.map = CellMap(num_cells)
        self._handle = handle
        self._memory = llama.llama_get_memory(handle)
        self._spare = spare
        self._most = max(1, MOVED_BYTES // max(cell_bytes, _LEAST_CELL_BYTES))
        self._buffer = np.empty(
            2 * MOVED_BYTES, np.uint8
        )  # a token has some bytes beside its keys and values

    def __repr__(self) -> str:
        return f"<CellOrder {self.map!r}>"

    def close_up(self, seqs: Iterable[int]) -> None:
        """Move the tokens of these sequences that have a free cell before them, shared ones for all owners.

        Raises:
            EngineError: llama.cpp did not take back what it gave.
        """
        if self.map.has_hole:
            for stretch in self.map.loose(seqs, self._most):
                self._move(stretch)
                self.map.moved(stretch)

    def _move(self, stretch: Stretch) -> None:
        start, stop = stretch.start, stretch.stop
        llama.llama_memory_seq_cp(self._memory, stretch.owners[0], self._spare, start, stop)
        size = llama.llama_state_seq_get_size(self._handle, self._spare)
        if size > len(self._buffer):
            self._grow(size, stretch)
        address = ctypes.cast(self._buffer.ctypes.data, _BYTES_P)
        is_out = llama.llama_state_seq_get_data(self._handle, address, size, self._spare) == size
        for seq in (*stretch.owners, self._spare):
            llama.llama_memory_seq_rm(self._memory, seq, start, stop)
        if not is_out or not llama.llama_state_seq_set_data(self._handle, address, size, self._spare):
            raise EngineError(f"tokens {start} to {stop} of sequences {stretch.owners} could not be moved")
        for seq in stretch.owners:
            llama.llama_memory_seq_cp(self._memory, self._spare, seq, start, stop)
        llama.llama_memory_seq_rm(self._memory, self._spare, start, stop)

    def _grow(self, size: int, stretch: Stretch) -> None:
        try:
            self._buffer = np.empty(size, np.uint8)
        except MemoryError:  # nothing has moved yet
            llama.llama_memory_seq_rm(self._memory, self._spare, stretch.start, stretch.stop)
            raise
