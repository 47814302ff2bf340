"""What a native context is opened with: its limits, and the type of its cells."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stoker.backends.llama.binding import llama
from stoker.ipc.model import FlashAttention
from stoker.models.placement import QUANTISED

CELL_ROUNDING = 256
"""The library rounds the cells of a pool, and of each stream, up to a multiple of this."""
_NATIVE_FLASH_ATTENTION = {FlashAttention.AUTO: -1, FlashAttention.OFF: 0}
_POOLING_NONE = 0  # a hidden state is one token's


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
        return self in QUANTISED

    @property
    def value_type(self) -> KeyType:
        """Element type of the cached values."""
        return self if self.is_quantised else KeyType.F16


_NATIVE_TYPES = {KeyType.F16: 1, KeyType.BF16: 30, KeyType.Q8_0: 8, KeyType.Q4_0: 2}  # enum ggml_type


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """The limits of a context.

    Attributes:
        num_cells: tokens all sequences may hold, or in streams each of them; rounded up to a multiple of 256.
        n_batch: tokens one step may carry.
        n_ubatch: tokens of it that are computed at once, which the compute buffers are made for; 0: all.
        num_sequences: sequences that may exist at once, at most 256; 255 in streams or in order.
        num_threads: CPU threads of a step.
        key_type: element type of the cached keys; it decides that of the values.
        flash_attention: whether attention may be one operation, which rounds what it reads to f16.
        keeps_order: the cells of a sequence always lie in the order of its tokens; in streams they do.
        has_streams: each sequence has cells of its own, instead of one pool for all.
        pads_prompts: steps are padded where a CPU computes more rows in less time, see `row_tiles`.
        is_off_host: cells lie in a device's memory: how long an export takes is found out before, and streams
            of a step are brought to equal lengths.
        offloads_cells: cells lie on the devices of their layers, else in host memory.
        draws: the largest logits of rows are found in the graph, see `draws`.
        is_marked: with `draws`, all that devices compute of the model is in graphs that they mark.
    """

    num_cells: int
    n_batch: int
    num_sequences: int
    num_threads: int
    n_ubatch: int = 0
    key_type: KeyType = KeyType.F16
    flash_attention: FlashAttention = FlashAttention.AUTO
    keeps_order: bool = False
    draws: bool = False
    has_streams: bool = False
    pads_prompts: bool = False
    offloads_cells: bool = True
    is_off_host: bool = False
    is_marked: bool = False

    @property
    def num_natives(self) -> int:
        """Sequences of the native context: one more to move others through, where any are moved."""
        return self.num_sequences + (self.keeps_order or self.has_streams or self.is_off_host)

    @property
    def num_native_cells(self) -> int:
        """Cells of the native context, at least one a sequence."""
        if not self.has_streams:
            return max(self.num_cells, self.num_natives)
        return -(-self.num_cells // CELL_ROUNDING) * CELL_ROUNDING * self.num_natives

    def native_params(self) -> Any:
        """What llama_init_from_model takes."""
        params = llama.llama_context_default_params()
        # llama.cpp aborts the process where a batch cannot hold a token of every sequence, and it cuts a
        # batch to the context's size.
        params.n_batch = max(self.n_batch, self.num_natives)
        params.n_ubatch = max(self.n_ubatch or self.n_batch, self.num_natives)
        params.n_ctx = self.num_native_cells
        params.n_seq_max = self.num_natives
        params.n_outputs_max_per_seq = 0  # prompt logprobs ask for a row a token
        params.n_threads = params.n_threads_batch = self.num_threads
        params.type_k = _NATIVE_TYPES[self.key_type]
        params.type_v = _NATIVE_TYPES[self.key_type.value_type]
        params.flash_attn_type = _NATIVE_FLASH_ATTENTION[self.flash_attention]
        params.offload_kqv = self.offloads_cells
        params.kv_unified = not self.has_streams  # one pool, cells shared between sequences
        params.pooling_type = _POOLING_NONE
        params.swa_full = False  # a windowed model cannot go back in either case: its old cells are reused
        return params
