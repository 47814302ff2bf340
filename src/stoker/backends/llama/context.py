"""Sequences of a model and the steps that grow them: the native context, its cells and its logits.

Knows sequence numbers and token ids; `model` has the weights, `state` the bytes of a saved sequence. Where
sums depend on it, the cells of each sequence stay in the order of its tokens (docs/adr/0019): before a step
tokens are taken out as bytes and put back into free cells before them, which changes no bit.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from stoker.backends.cell_map import CellMap
from stoker.backends.llama.batch import NONE, AdapterSet, EmbeddingBatch, Pass, TokenBatch, passes
from stoker.backends.llama.binding import buffer_bytes, capture_log, error_text, llama
from stoker.backends.protocol.backend import (
    NO_CANDIDATES,
    BatchPlan,
    Candidates,
    Computed,
    Lengths,
    PlanItem,
)
from stoker.backends.protocol.vision import embeddings_of
from stoker.errors import EngineError, ModelLoadError, PoolFullError, StepFailedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from stoker.backends.cell_map import Stretch
    from stoker.backends.llama.adapters import Adapters
    from stoker.backends.llama.binding import LogLine
    from stoker.backends.llama.model import LlamaModel
    from stoker.backends.protocol.backend import InFlight, Placed, Rows

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
        spare: a sequence number of the context that has no other use.
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


_NO_CELLS = 1  # llama_decode: could not find a KV slot for the batch
_TO_THE_END = -1
_FLASH_ATTENTION_AUTO = -1
_FLASH_ATTENTION_OFF = 0
_POOLING_NONE = 0  # a hidden state is one token's
_FLASH_ATTENTION = re.compile(r"Flash Attention (enabled|disabled|not supported)")  # its resolve_fused_ops


class KeyType(StrEnum):
    """Element type of the cached keys; values are f16, beside quantised keys of the same type as those.

    BF16 takes the bytes of F16. On a CPU, where it differs from the values' type, llama.cpp adds attention up
    in one fixed way: results do not depend on the shape of the batch, long prefills are slower
    (docs/adr/0006). So it does over quantised cells, which take about a half and a quarter of the bytes.
    """

    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"

    @property
    def is_quantised(self) -> bool:
        """Whether cells are stored in blocks with a common scale; only flash attention reads such."""
        return self in {KeyType.Q8_0, KeyType.Q4_0}

    @property
    def value_type(self) -> KeyType:
        """Element type of the cached values."""
        return self if self.is_quantised else KeyType.F16


_NATIVE_TYPES = {KeyType.F16: 1, KeyType.BF16: 30, KeyType.Q8_0: 8, KeyType.Q4_0: 2}  # enum ggml_type


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """The limits of a context.

    Attributes:
        num_cells: tokens all sequences may hold; llama.cpp rounds it up to a multiple of 256.
        n_batch: tokens one step may carry.
        num_sequences: sequences that may exist at once, at most 256, or 255 whose cells keep their order.
        num_threads: CPU threads of a step.
        key_type: element type of the cached keys; it decides that of the values.
        is_fused: attention may be one operation (flash attention), which rounds what it reads to f16.
        keeps_order: the cells of a sequence always lie in the order of its tokens.
        offloads_cells: cells lie on the devices of their layers, else in host memory.
    """

    num_cells: int
    n_batch: int
    num_sequences: int
    num_threads: int
    key_type: KeyType = KeyType.F16
    is_fused: bool = True
    keeps_order: bool = False
    offloads_cells: bool = True


class LlamaContext:
    """Sequences of `model`. One thread drives it; close it before the model.

    Attributes:
        adapters: what its sequences may be computed with; None: nothing.
        with_initial_state: sequences that began from a state put there, and not from the model's own.

    Raises:
        ModelLoadError: llama.cpp could not make it, e.g. for want of memory.
    """

    def __init__(self, model: LlamaModel, options: ContextOptions, adapters: Adapters | None = None) -> None:
        self._model = model
        self.adapters = adapters
        self._sets: dict[int, AdapterSet] = {}
        self._current = NONE
        self._pictures: dict[int, tuple[Placed, ...]] = {}
        self._embeddings: EmbeddingBatch | None = None
        self.num_sequences = options.num_sequences
        self.num_threads = options.num_threads
        self.key_type = options.key_type
        with capture_log() as lines:
            handle = llama.llama_init_from_model(model.handle, _native_params(options))
        if handle is None:
            raise ModelLoadError(
                f"llama.cpp could not make a context of {options.num_cells} cells for {model.path.name}: "
                f"{error_text(lines)}",
                num_cells=options.num_cells,
            )
        self.handle: int | None = handle
        self._memory = llama.llama_get_memory(handle)
        self.num_cells: int = llama.llama_n_ctx(handle)
        self.n_batch: int = min(options.n_batch, llama.llama_n_batch(handle))
        self.lengths = Lengths(options.num_sequences, model.vocabulary.n_vocab, self.n_batch)
        self.flash_attention = "on" if self.key_type.is_quantised else _flash_attention(lines)
        if not options.is_fused:
            self.flash_attention = "off"
        self._buffers = buffer_bytes(lines, model.devices)
        self._order: CellOrder | None = None
        if options.keeps_order:
            cell_bytes = -(-self.memory()["kv"] // self.num_cells)
            self._order = CellOrder(handle, self.num_cells, cell_bytes, spare=options.num_sequences)
        # A state that no token made needs a position of its own; recurrent models do not look at positions.
        self._first_position = 1 if model.is_recurrent else 0
        self.with_initial_state: set[int] = set()
        self._batch = TokenBatch(self.n_batch, self._first_position)
        self._n_vocab = model.vocabulary.n_vocab
        self._rows = np.empty((0, self._n_vocab), np.float32)
        self._rows_address = 0

    def __repr__(self) -> str:
        return f"<LlamaContext of {self._model!r}, {self.num_cells} cells, {self.lengths!r}>"

    @property
    def row_width(self) -> int:
        """Numbers that the library keeps of a token whose output is asked: logits and hidden state."""
        return self._n_vocab + self._model.n_embd

    def step(self, plan: BatchPlan) -> Rows:
        """One forward pass, waited for; see `Backend.launch`."""
        return self.launch(plan).rows()

    def launch(self, plan: BatchPlan) -> InFlight:
        """Begin one forward pass; see `Backend.launch`. Several native calls are waited for."""
        self.lengths.check(plan)
        self._check_pictures(plan)
        self.close_up([item.seq for item in plan.items])
        cut = passes(plan, self._sets, self._current)
        if len(cut) > 1:
            return Computed(self._step_in_passes(plan, cut))
        self._compute(cut[0])
        self.lengths.advance(plan)
        return _Decoding(partial(self._logits, plan.num_rows))

    def _check_pictures(self, plan: BatchPlan) -> None:
        """Before anything is computed: not every model can take a pass back."""
        for item in plan.items:
            if item.tokens[0] < 0:
                embeddings_of(item, self._pictures.get(item.seq, ()))

    def _step_in_passes(self, plan: BatchPlan, cut: list[Pass]) -> Rows:
        """One native call after the other; where one fails, those before it are taken back."""
        rows = np.empty((plan.num_rows, self._n_vocab), np.float32)
        for number, each in enumerate(cut):
            try:
                self._compute(each)
            except (PoolFullError, StepFailedError):
                for done in cut[:number]:
                    self._take_back(done.plan)
                raise
            rows[list(each.rows)] = self._logits(each.plan.num_rows)
        self.lengths.advance(plan)
        return rows

    def _compute(self, each: Pass) -> None:
        """One native call; one that fails has changed nothing."""
        if each.adapters != self._current and self.adapters:
            self.adapters.apply(self.handle, each.adapters)
            self._current = each.adapters
        code = llama.llama_decode(self.handle, self._laid_out(each))
        if code != 0:
            self._undo(each.plan, code)
        if self._order is not None:
            for item in each.plan.items:
                self._order.map.append(item.seq, len(item.tokens))

    def _laid_out(self, each: Pass) -> object:
        """The pass as the native library takes it."""
        if not each.is_pictured:
            self._batch.fill(each.plan)
            return self._batch.native
        if self._embeddings is None:  # most contexts never need one
            self._embeddings = EmbeddingBatch(self.n_batch, self._model.n_embd, self._first_position)
        rows = [embeddings_of(item, self._pictures.get(item.seq, ())) for item in each.plan.items]
        self._embeddings.fill(each.plan, rows)
        return self._embeddings.native

    def see(self, seq: int, pictures: tuple[Placed, ...]) -> None:
        """Where the sequence's tokens are numbers of these images, compute their embeddings."""
        if pictures:
            self._pictures[seq] = pictures
        else:
            self._pictures.pop(seq, None)

    def adapt(self, seq: int, adapters: AdapterSet) -> None:
        """Compute the sequence's next tokens with these adapters; UnsupportedError for unknown ones."""
        if not adapters:
            self._sets.pop(seq, None)
            return
        if self.adapters is None:
            raise UnsupportedError(f"{self._model.description} was loaded without adapters", param="lora")
        self.adapters.check(adapters)
        self._sets[seq] = adapters

    def is_adapted(self, seq: int) -> bool:
        """Whether the sequence's tokens are computed with adapters."""
        return seq in self._sets

    def step_hidden(self, seq: int, token: int) -> npt.NDArray[np.float32]:
        """Append a token; what the model made of it, float32 (width,), a copy.

        Raises:
            PoolFullError: no cell for it; nothing changed.
            StepFailedError: the native decode failed; nothing changed.
        """
        llama.llama_set_embeddings(self.handle, True)
        try:
            self.step(BatchPlan((PlanItem(seq, self.lengths[seq], (token,), 1),)))
            pointer = llama.llama_get_embeddings_ith(self.handle, 0)
        finally:
            llama.llama_set_embeddings(self.handle, False)
        if not pointer:
            raise UnsupportedError(f"{self._model.description} gives no hidden state")
        return np.ctypeslib.as_array(pointer, (self._model.n_embd,)).copy()

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty sequence `dst` share the first `length` tokens of `src`."""
        assert self.lengths[dst] == 0, f"sequence {dst} is not empty"
        assert 0 < length <= self.lengths[src], f"{length} of {self.lengths[src]} tokens to share"
        if not self._model.keeps_every_cell:
            raise UnsupportedError(f"{self._model.description} keeps a state that cannot be shared")
        llama.llama_memory_seq_cp(self._memory, src, dst, 0, length)
        if self._order is not None:
            self._order.map.fork(src, dst, length)
        self.lengths[dst] = length

    def trim(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens. Raises UnsupportedError where the model cannot go back."""
        held = self.lengths[seq]
        assert 0 <= length <= held, f"{length} of {held} tokens to keep"
        if length == 0:
            self.drop(seq)
        if length in {0, held}:
            return
        if not self._model.keeps_every_cell:
            raise UnsupportedError(
                f"{self._model.description} cannot go back from {held} to {length} tokens, only to none"
            )
        self._remove(seq, length)
        self.lengths[seq] = length

    def drop(self, seq: int) -> None:
        """Forget the sequence and free its cells, also such as a failed import may have left."""
        self._remove(seq, 0)
        self.with_initial_state.discard(seq)
        self.lengths[seq] = 0

    def received(self, seq: int, num_tokens: int) -> None:
        """The empty sequence was given the state of so many tokens."""
        if self._order is not None:
            self._order.map.append(seq, num_tokens)
        self.lengths[seq] = num_tokens

    def close_up(self, seqs: Sequence[int]) -> None:
        """Move the tokens of these sequences to free cells before them, if cells are to keep their order."""
        if self._order is not None:
            self._order.close_up(seqs)

    def set_threads(self, num_threads: int) -> None:
        """Use that many CPU threads from the next step on."""
        self.num_threads = num_threads
        llama.llama_set_n_threads(self.handle, num_threads, num_threads)

    def memory(self) -> dict[str, int]:
        """Bytes of `kv` and `compute` buffers, as the library reported them when it made the context."""
        return {line: sum(held.get(line, 0) for held in self._buffers.values()) for line in ("kv", "compute")}

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """Those that lie on accelerators, by their ids; see `OnDevices`."""
        return {owner: dict(held) for owner, held in self._buffers.items() if owner}

    def close(self) -> None:
        """Free cells and buffers; idempotent."""
        if self.handle is not None:
            llama.llama_free(self.handle)
            self.handle = None
            self._rows = np.empty((0, self._n_vocab), np.float32)

    def _logits(self, num_rows: int) -> Rows:
        """A view of the library's own rows, in the order of the batch; made anew only if it moved."""
        if num_rows == 0:
            return np.empty((0, self._n_vocab), np.float32)
        pointer = llama.llama_get_logits(self.handle)
        address = ctypes.addressof(pointer.contents)
        if address != self._rows_address or num_rows != len(self._rows):
            self._rows = np.ctypeslib.as_array(pointer, (num_rows, self._n_vocab))
            self._rows_address = address
        return self._rows

    def _undo(self, plan: BatchPlan, code: int) -> NoReturn:
        """Take every sequence back to where it was and raise what the return code means."""
        self._take_back(plan)
        if code == _NO_CELLS:
            raise PoolFullError(
                f"no cells for {plan.num_tokens} more tokens among {self.num_cells}",
                num_tokens=plan.num_tokens,
                num_cells=self.num_cells,
            )
        raise StepFailedError(
            f"llama_decode returned {code} for {plan.num_tokens} tokens of {len(plan.items)} sequences",
            native_code=code,
        )

    def _take_back(self, plan: BatchPlan) -> None:
        """Remove the plan's tokens from their sequences."""
        for item in plan.items:
            is_begun = item.start > 0 or item.seq in self.with_initial_state
            self._remove(item.seq, item.start + self._first_position if is_begun else 0)

    def _remove(self, seq: int, start: int) -> None:
        """Remove native positions `start` and up."""
        if not llama.llama_memory_seq_rm(self._memory, seq, start, _TO_THE_END):
            raise EngineError(f"the state of sequence {seq} before position {start} is lost", seq=seq)
        if self._order is not None:
            self._order.map.trim(seq, start)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """A native call whose rows were not asked for: asking waits for the device."""

    rows: Callable[[], Rows]
    candidates: Callable[[], Candidates] = lambda: NO_CANDIDATES


def _native_params(options: ContextOptions) -> object:
    params = llama.llama_context_default_params()
    # llama.cpp aborts the process where a batch cannot hold a token of every sequence, and it cuts a batch
    # to the context's size.
    params.n_batch = params.n_ubatch = max(options.n_batch, options.num_sequences + options.keeps_order)
    params.n_ctx = max(options.num_cells, options.num_sequences + options.keeps_order)
    params.n_seq_max = options.num_sequences + options.keeps_order  # one to move others through
    params.n_outputs_max_per_seq = 0  # prompt logprobs ask for a row a token
    params.n_threads = params.n_threads_batch = options.num_threads
    params.type_k = _NATIVE_TYPES[options.key_type]
    params.type_v = _NATIVE_TYPES[options.key_type.value_type]
    params.flash_attn_type = _FLASH_ATTENTION_AUTO if options.is_fused else _FLASH_ATTENTION_OFF
    params.offload_kqv = options.offloads_cells
    params.kv_unified = True  # one pool, cells shared between sequences
    params.pooling_type = _POOLING_NONE
    params.swa_full = False  # a windowed model cannot go back in either case: its old cells are reused
    return params


def _flash_attention(lines: list[LogLine]) -> str:
    for line in lines:
        if found := _FLASH_ATTENTION.search(line.text):
            return "on" if found[1] == "enabled" else "off"
    return "auto"
