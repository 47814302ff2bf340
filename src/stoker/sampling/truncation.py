"""Truncation: which candidates stay for the draw (SPEC D1).

top_k, typical_p, top_p and min_p are llama.cpp's own samplers, in its order, over an array of candidates;
they need no model, so every backend has them. XTC is ours because its randomness must be counter-based.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp

from stoker.backends.protocol.backend import Rows
from stoker.ipc.request import Sampling
from stoker.sampling.dry import BreakerTable
from stoker.sampling.rng import probabilities

TokenIds = npt.NDArray[np.int32]

# llama_token_data: id, logit, probability
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
# Further below the best logit than this, a float32 probability turns into 0 and typical_p's entropy into NaN.
_TYPICAL_DEPTH = 70.0
_XTC_MAX_THRESHOLD = 0.5  # above it no two tokens can both reach the threshold


class TruncationChain:
    """The native chain of one choice, empty if the settings truncate nothing; `close` frees it.

    Args:
        sampling: the settings.
        workspace: holds the candidates.
    """

    def __init__(self, sampling: Sampling, workspace: Workspace) -> None:
        self._workspace = workspace
        self._is_typical = sampling.typical_p < 1.0
        samplers = _native_samplers(sampling)
        self._is_empty = not samplers
        self._chain: int = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        self._free = weakref.finalize(self, llama_cpp.llama_sampler_free, self._chain)
        for sampler in samplers:
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def apply(self, row: Rows) -> tuple[TokenIds, Rows]:
        """The candidates left of `row`, float32 (n_vocab,): ids, ascending, and their logits."""
        ids = self._workspace.ids
        if self._is_empty:
            return ids, row
        assert self._free.alive, "applied after close"
        if self._is_typical:
            ids = np.flatnonzero(row >= row.max() - np.float32(_TYPICAL_DEPTH)).astype(np.int32)
            row = row[ids]
        return self._workspace.truncate(self._chain, ids, row)

    def close(self) -> None:
        """Free the native chain; idempotent. Nothing may be applied afterwards."""
        self._free()


def _native_samplers(sampling: Sampling) -> list[int]:
    """Addresses of the samplers that are active, in llama.cpp's order; each keeps one candidate at least."""
    samplers: list[int] = []
    if sampling.top_k > 0:
        samplers.append(llama_cpp.llama_sampler_init_top_k(sampling.top_k))
    if sampling.typical_p < 1.0:
        samplers.append(llama_cpp.llama_sampler_init_typical(sampling.typical_p, 1))
    if sampling.top_p < 1.0:
        samplers.append(llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0.0:
        samplers.append(llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1))
    return samplers


class Xtc:
    """Exclude top choices: now and then all tokens above a threshold but the least likely of them go.

    Args:
        sampling: `xtc_probability` and `xtc_threshold`; `can_act` tells whether they do anything.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._probability = sampling.xtc_probability
        self._threshold = sampling.xtc_threshold

    @staticmethod
    def can_act(sampling: Sampling) -> bool:
        """Whether the settings can ever exclude a token."""
        return sampling.xtc_probability > 0.0 and sampling.xtc_threshold <= _XTC_MAX_THRESHOLD

    def apply(self, ids: TokenIds, logits: Rows, u: float) -> tuple[TokenIds, Rows]:
        """The candidates left; `u` in [0, 1) decides whether the exclusion happens this time."""
        if u >= self._probability:
            return ids, logits
        chances = probabilities(logits, 1.0)
        above = np.flatnonzero(chances >= self._threshold)
        if len(above) < 2:  # noqa: PLR2004 - one token above the threshold is the one that stays
            return ids, logits
        by_chance = above[np.argsort(-chances[above], kind="stable")]
        return np.delete(ids, by_chance[:-1]), np.delete(logits, by_chance[:-1])


class Workspace:
    """Buffers and tables that all generations of one model share.

    The buffers are as large as the vocabulary; sharing them keeps a generation small and a draw free of large
    allocations. They belong to the thread that draws; only `breakers` may be used from other threads.

    Attributes:
        num_vocab: tokens in the vocabulary.
        ids: all of them, ascending; read only.
        breakers: DRY sequence breakers found so far.
    """

    def __init__(self, num_vocab: int) -> None:
        self.num_vocab = num_vocab
        self.breakers = BreakerTable(num_vocab)
        self.ids: TokenIds = np.arange(num_vocab, dtype=np.int32)
        self._raw = np.empty(num_vocab, np.float32)
        self._candidates = np.zeros(num_vocab, _CANDIDATE)
        self._array = llama_cpp.llama_token_data_array()
        self._data = ctypes.cast(self._candidates.ctypes.data, llama_cpp.llama_token_data_p)

    def __repr__(self) -> str:
        return f"Workspace(num_vocab={self.num_vocab})"

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
