"""Buffers and tables that all generations of one model share.

The buffers are as large as the vocabulary; sharing them keeps a generation small and a draw free of large
allocations. They belong to the thread that draws; only `breakers` may be used from other threads.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp

from stoker.backends.protocol.backend import Rows
from stoker.sampling.dry import BreakerTable

TokenIds = npt.NDArray[np.int32]

# llama_token_data: id, logit, probability
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Workspace:
    """Scratch memory for one model's draws.

    Args:
        num_vocab: tokens in the vocabulary.

    Attributes:
        num_vocab: as given.
        breakers: DRY sequence breakers found so far; safe from any thread.
    """

    def __init__(self, num_vocab: int) -> None:
        self.num_vocab = num_vocab
        self.breakers = BreakerTable(num_vocab)
        self._ids = np.arange(num_vocab, dtype=np.int32)
        self._raw = np.empty(num_vocab, np.float32)
        self._candidates = np.zeros(num_vocab, _CANDIDATE)
        self._array = llama_cpp.llama_token_data_array()
        self._data = ctypes.cast(self._candidates.ctypes.data, llama_cpp.llama_token_data_p)

    def __repr__(self) -> str:
        return f"Workspace(num_vocab={self.num_vocab})"

    @property
    def ids(self) -> TokenIds:
        """All token ids, ascending; read only."""
        return self._ids

    def keep_raw(self, row: Rows) -> Rows:
        """A copy of `row`, valid until the next call."""
        np.copyto(self._raw, row)
        return self._raw

    def truncate(self, chain: int, ids: TokenIds, logits: Rows) -> tuple[TokenIds, Rows]:
        """Run a native sampler chain over candidates.

        Args:
            chain: address of a `llama_sampler`.
            ids: token ids of the candidates, int32 (n,), ascending.
            logits: their logits, float32 (n,).

        Returns:
            Ids, ascending, and logits of the candidates that are left, at least one; copies.
        """
        count = len(ids)
        self._candidates["id"][:count] = ids
        self._candidates["logit"][:count] = logits
        array = self._array
        array.data, array.size, array.selected, array.sorted = self._data, count, -1, False
        llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
        # Samplers may move `data` forward; none of ours does, and `size` is what they shorten.
        left = self._candidates[: array.size]
        left = left[np.argsort(left["id"])]
        return left["id"], left["logit"]
