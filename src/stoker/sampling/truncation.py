"""Cuts the candidates of a draw down to those that may be drawn (SPEC D1).

top_k, typical_p, top_p and min_p are llama.cpp's own samplers, in its order, over an array of candidates;
they need no model, so every backend has them. With a top_k the candidates are selected here first, the best
of a row with ties by lower id: the native chain then sees dozens of tokens and not the vocabulary, and leaves
the same of them whether the whole row is here or only its best. top_n_sigma comes before all and is ours, as
llama.cpp's leaves candidates without probability, of which typical_p makes NaN (Tang et al., "Top-n sigma:
not all logits are you need").
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp

from stoker.backends.protocol.backend import Candidates, Rows
from stoker.ipc.request import Sampling
from stoker.sampling.logit_edits import BreakerTable, TokenIds

# llama_token_data: id, logit, probability
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
# llama_token_data_array
_ARRAY = np.dtype(
    [("data", np.uintp), ("size", np.uintp), ("selected", np.int64), ("sorted", np.bool_)], align=True
)
# Further below the best logit than this, a float32 probability turns into 0 and typical_p's entropy into NaN.
_TYPICAL_DEPTH = 70.0
_NO_TOKEN = 2**31 - 1
_MAX_BLOCK = 64  # values of which `largest` takes the peak to find its bound
_LOW = np.int64(2**32 - 1)  # the lower half of a key

_NO_KEY = np.int64(_NO_TOKEN << 32 | int(np.float32(-np.inf).view(np.uint32)))  # of no candidate: see `by_id`

_SAMPLER_APPLY = "llama_sampler_apply", llama_cpp._lib  # noqa: SLF001 - the bindings take objects, not addresses
_apply = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(_SAMPLER_APPLY)
# Some microseconds on dozens of candidates: letting other threads in for each would cost more than it takes.
_apply_to_few = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(_SAMPLER_APPLY)


class TruncationChain:
    """The native chain of one choice, empty if the settings truncate nothing; `close` frees it.

    Args:
        sampling: the settings.
        workspace: holds the candidates.

    Attributes:
        top_k: how many of a row's best are candidates; 0: all are.
        is_typical: it keeps what is locally typical.
    """

    def __init__(self, sampling: Sampling, workspace: Workspace) -> None:
        self._workspace = workspace
        self._num_sigmas = sampling.top_n_sigma
        self.top_k = max(0, sampling.top_k)
        self.is_typical = sampling.typical_p < 1.0
        samplers = _native_samplers(sampling)
        self._is_empty = not samplers
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        self._address = ctypes.cast(chain, ctypes.c_void_p).value or 0
        self._free = weakref.finalize(self, llama_cpp.llama_sampler_free, chain)
        for sampler in samplers:
            llama_cpp.llama_sampler_chain_add(chain, sampler)

    @property
    def needs_row(self) -> bool:
        """Whether the best of a row do not tell what it leaves."""
        return self.top_k == 0 or self._num_sigmas > 0.0

    @property
    def address(self) -> int:
        """Of the native chain."""
        assert self._address, "applied after close"
        return self._address

    def apply(self, row: Rows) -> tuple[TokenIds, Rows]:
        """The candidates left of `row`, float32 (n_vocab,): ids, ascending, and their logits."""
        if self.top_k:
            ids = largest(row, self.top_k).astype(np.int32)
            if self._num_sigmas > 0.0:
                ids = ids[row[ids] >= _sigma_floor(row, self._num_sigmas)]
            return self.cut(ids, row[ids])
        ids = self._workspace.ids
        if self._num_sigmas > 0.0:
            ids = np.flatnonzero(row >= _sigma_floor(row, self._num_sigmas)).astype(np.int32)
            row = row[ids]
        if self._is_empty:
            return ids, row
        if self.is_typical:
            near = row >= row.max() - np.float32(_TYPICAL_DEPTH)
            ids, row = ids[near], row[near]
        return self._workspace.truncate(self.address, ids, row)

    def cut(self, ids: TokenIds, logits: Rows) -> tuple[TokenIds, Rows]:
        """The candidates left of a row's best, which are in order: ids, ascending, and their logits."""
        ids, logits = ids[: self.top_k], logits[: self.top_k]
        if self.is_typical:
            near = logits >= logits[0] - np.float32(_TYPICAL_DEPTH)
            ids, logits = ids[near], logits[near]
        return self._workspace.truncate_best(self.address, ids, logits)

    def close(self) -> None:
        """Free the native chain; idempotent. Nothing may be applied afterwards."""
        self._address = 0
        self._free()


def largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest of `values`, best first, ties by lower index.

    A selection and a sort of the few that are left: the row itself is never sorted.

    Args:
        values: floats (n,), without NaN.
        count: 0 or more; more than n means all.
    """
    if count <= 0:
        return np.empty(0, np.intp)
    bound = _lower_bound(values, count)
    (reached,) = (values >= bound if bound > -np.inf else values > bound).nonzero()
    best: npt.NDArray[np.intp] = reached[(-values[reached]).argsort(kind="stable")[:count]]
    if len(best) == count or bound > -np.inf:
        return best
    return np.concatenate((best, np.flatnonzero(values == bound)[: count - len(best)]))


def _lower_bound(values: npt.NDArray[Any], count: int) -> Any:
    """A value that `count` of `values` reach, and few more: that so many blocks of them reach.

    A block's values are far apart, so that peaks of neighbours are taken at once.
    """
    width = min(len(values) // count, _MAX_BLOCK)
    if width < 1:
        return -np.inf
    num_blocks = len(values) // width
    peaks = np.maximum.reduce(values[: num_blocks * width].reshape(width, num_blocks), axis=0)
    cut = num_blocks - count
    peaks.partition(cut)
    return peaks[cut]


def _sigma_floor(row: Rows, num_sigmas: float) -> float:
    """The logit below which top_n_sigma leaves none; forbidden tokens do not count."""
    finite = row[np.isfinite(row)]
    return float(finite.max() - num_sigmas * finite.std(dtype=np.float64))


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


def in_order(found: Candidates) -> Candidates:
    """Candidates, which are best first, with ties by lower id, as `largest` orders a whole row."""
    is_tie = found.logits[:, 1:] == found.logits[:, :-1]
    return by_logit(found) if is_tie.any() else found


def by_logit(found: Candidates) -> Candidates:
    """Each row best first, a NaN before all, ties by lower id: sorted as one number of both, the quickest."""
    bits = (found.logits + np.float32(0.0)).view(np.int32)  # -0.0 is 0.0
    keys = np.bitwise_not(_ranked(bits)).astype(np.int64)
    keys <<= 32
    keys |= found.ids
    keys.sort(axis=1)
    ids, bits = (keys & _LOW).astype(np.int32), _ranked(np.bitwise_not((keys >> 32).astype(np.int32)))
    return Candidates(ids, bits.view(np.float32))


def _ranked(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The bits of floats as integers that compare as the floats do; and back."""
    return bits ^ ((bits >> 31) & np.int32(2**31 - 1))


def by_id(found: Candidates, sizes: npt.NDArray[np.intp]) -> Candidates:
    """The first `sizes` candidates of each row by ascending id; behind them logits of -inf."""
    width = int(sizes.max())
    is_left = np.arange(width) < sizes[:, np.newaxis]
    keys = found.ids[:, :width].astype(np.int64)
    keys <<= 32
    keys |= np.ascontiguousarray(found.logits[:, :width]).view(np.uint32)
    keys = np.where(is_left, keys, _NO_KEY)
    keys.sort(axis=1)
    logits = (keys & _LOW).astype(np.uint32).view(np.float32)
    return Candidates((keys >> 32).astype(np.int32), logits)


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
        candidates, array = np.zeros(num_vocab, _CANDIDATE), np.zeros(1, _ARRAY)
        array["data"] = candidates.ctypes.data
        self._candidate_ids, self._candidate_logits = candidates["id"], candidates["logit"]
        self._size, self._selected, self._sorted = array["size"], array["selected"], array["sorted"]
        self._array_address = array.ctypes.data
        self._few = np.zeros((0, 0), _CANDIDATE)
        self._arrays = np.zeros(0, _ARRAY)
        self._arrays_address = 0

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
        self._lay_out(ids, logits, is_in_order=False)
        _apply(chain, self._array_address)
        return self._left()

    def truncate_best(self, chain: int, ids: TokenIds, logits: Rows) -> tuple[TokenIds, Rows]:
        """As `truncate`, of candidates that are in order."""
        self._lay_out(ids, logits, is_in_order=True)
        _apply_to_few(chain, self._array_address)
        return self._left()

    def _lay_out(self, ids: TokenIds, logits: Rows, *, is_in_order: bool) -> None:
        count = len(ids)
        self._candidate_ids[:count], self._candidate_logits[:count] = ids, logits
        self._size[0], self._selected[0], self._sorted[0] = count, -1, is_in_order

    def _left(self) -> tuple[TokenIds, Rows]:
        # Samplers may move `data` forward; none of ours does, and `size` is what they shorten.
        size = self._size[0]
        ids, logits = self._candidate_ids[:size], self._candidate_logits[:size]
        order = ids.argsort()
        return ids[order], logits[order]

    def truncate_rows(
        self, chains: Sequence[int], found: Candidates, counts: Sequence[int]
    ) -> npt.NDArray[np.intp]:
        """Run a native chain over each row of candidates, which are in order; `kept` has what they left.

        Args:
            chains: address of a `llama_sampler` by row.
            found: (num_rows, n).
            counts: how many of a row's candidates take part.

        Returns:
            How many are left of each row, one at least.
        """
        num_rows, width = found.ids.shape
        if self._few.shape != (num_rows, width):
            self._make_room(num_rows, width)
        few, arrays = self._few, self._arrays
        few["id"], few["logit"] = found.ids, found.logits
        arrays["size"], arrays["selected"] = counts, -1
        address = self._arrays_address
        for chain in chains:
            _apply_to_few(chain, address)
            address += _ARRAY.itemsize
        return arrays["size"].astype(np.intp)

    def _make_room(self, num_rows: int, width: int) -> None:
        """Rows of the next steps: most are of as many as the last one's."""
        self._few, self._arrays = np.zeros((num_rows, width), _CANDIDATE), np.zeros(num_rows, _ARRAY)
        self._arrays["data"] = self._few.ctypes.data + self._few.strides[0] * np.arange(num_rows)
        self._arrays["sorted"] = True  # and so the samplers leave them
        self._arrays_address = self._arrays.ctypes.data

    @property
    def kept(self) -> Candidates:
        """What the last `truncate_rows` left, at the beginning of each row; valid until the next one."""
        return Candidates(self._few["id"], self._few["logit"])
