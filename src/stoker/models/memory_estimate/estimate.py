"""How much memory a model will take, told from its header alone (SPEC R1).

Owns the estimate by line: weights, what the CPU lays out anew of them, cells and states, compute buffers,
and what no buffer shows. What a layer keeps, and how wide a step's tensors get, is in `layers`; whether there
is room in `fit`. Nothing native is loaded.
Constants were fitted to the bundled llama.cpp; tests/real/test_estimates.py measures them again.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stoker.errors import UnsupportedError
from stoker.ipc.model import FlashAttention, KVLayout, ModelClass
from stoker.models.gguf.bounded_file import GgufArray
from stoker.models.gguf.header import read_header
from stoker.models.gguf.tensor_types import TENSOR_TYPES
from stoker.models.memory_estimate.fit import Estimate, Estimator, HostExperts
from stoker.models.memory_estimate.layers import Layer, Layers, Widths, read_layers, read_widths
from stoker.models.memory_estimate.shares import (
    HOST,
    ModelParts,
    host_expert_bytes,
    is_expert,
    places,
    read_parts,
    weights_by_device,
)
from stoker.models.placement import check_attention
from stoker.models.seq2seq import num_cells

if TYPE_CHECKING:
    from stoker.ipc.model import AdapterSpec, ModelSpec
    from stoker.models.gguf.header import GgufHeader, TensorInfo

MAX_SEQUENCES = 255  # llama_max_parallel_sequences(), less the one that others are moved through
SPARE_SEQUENCES = 32
SLOTS_A_SPARE_STREAM = 8
MAX_TEXTS = 64

_CELL_ROUNDING = 256  # llama_context rounds n_ctx, the cache for windows its own size
_FLOAT_BYTES = 4
_MASK_BYTES = 2  # masks of flash attention are f16
_SCORES_MASK_BYTES = 4  # others are f32, as the scores
_TYPE_SIZES = {each.name.lower(): each.block_bytes / each.block_elements for each in TENSOR_TYPES.values()}
_DEFAULT_KV_TYPE = "f16"  # bf16 takes the same
_QUANTISED_BLOCK = 32
_SMALLER_KV_TYPES = ("q8_0",)
_WITHOUT_FLASH = frozenset({"grok"})
_COPIES_WITHOUT_FLASH = 2  # of the scores of all heads, in the graph of these
_BIASED_COPIES = 3  # of the scores of all heads, where attention adds a number for each distance
_SOURCE_COPIES = 1  # of what a layer makes of the source, beside the tokens that ask

# repack.cpp: what some CPU lays out anew, where rows come in eights. The file stays mapped beside it.
_REPACKED_TYPES = frozenset({"Q2_K", "Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
_REPACKED_ROWS = 8
_MATRIX_DIMS = 2

_FRAGMENTS = 1.06  # of a compute buffer, lost between tensors
_FILLED_TO = 32  # a device fills rows up to a multiple of this many logits: `backends.llama.graph.draws`
_DRAWN_OUTPUTS = 4  # beside each logit the library then has room for a probability and two ids
_STATE_COPIES = 2.5  # of all recurrent states of one layer, in a step
_LIBRARY_BYTES = 8 * 2**20  # code, tables and threads
_BYTES_A_TENSOR = 10 * 2**10  # in the graphs that are kept
_BYTES_A_TOKEN = 112  # of the vocabulary, in maps and lists; the same for a merge
_BYTES_A_THREAD = 256 * 2**10
_WORK_BYTES = {
    "F32": 0.0,
    "F16": 2.0,
    "BF16": 2.0,
}  # an element that a product takes, in the weights' own kind
_QUANTISED_WORK_BYTES = 1.15


def num_sequences(num_slots: int, layout: KVLayout = KVLayout.POOL) -> int:
    """Sequences of a context for that many slots: some to spare, for prefixes that no slot runs.

    In streams a spare one takes as much memory as a slot, so there are fewer.
    """
    num_spare = SPARE_SEQUENCES
    if layout is KVLayout.STREAMS:
        num_spare = max(1, num_slots // SLOTS_A_SPARE_STREAM)
    return min(num_slots + num_spare, MAX_SEQUENCES)


def stream_cells(spec: ModelSpec, n_ctx_train: int) -> int:
    """Tokens that each sequence has cells for in streams: those of a request, or a slot's share of those set.

    Spare sequences come on top of that.
    """
    n_ctx = min(filter(None, (spec.n_ctx, n_ctx_train)))
    if not spec.num_cells:
        return n_ctx
    return min(n_ctx, max(1, spec.num_cells // spec.num_slots))


def estimator(header: GgufHeader) -> Estimator:
    """What the model of `header` takes, for any way to load it."""
    return _Model(header, read_layers(header), read_widths(header), read_parts(header)).estimate


def estimator_of(path: str | Path) -> Estimator:
    """Likewise, of a file.

    Raises:
        ModelFileError, UnsupportedError: as `read_header`.

    An estimate raises UnsupportedError for a `kv_type` that is not known, or not without flash attention.
    """
    return estimator(read_header(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What a context is made for; `cells` are those of one stream."""

    cells: int
    window_cells: int
    num_sequences: int
    num_streams: int = 1
    num_tokens: int
    num_rows: int
    num_threads: int
    is_fused: bool = True

    @property
    def num_rounded(self) -> int:
        """Tokens of the step that buffers are reserved for: as many of each sequence."""
        return math.ceil(self.num_tokens / self.num_sequences) * self.num_sequences


@dataclass(frozen=True, slots=True)
class _Model:
    header: GgufHeader
    layers: Layers
    widths: Widths
    parts: ModelParts

    def estimate(self, spec: ModelSpec) -> Estimate:
        check_attention(spec)
        shape = self._shape_of(spec)
        where = places(spec.placement, self.parts.num_layers)
        generates = not (self._is_encoder or self._reads_sources)
        expert_bytes = host_expert_bytes(self.parts, spec.placement) if generates else 0
        streamed = expert_bytes if spec.placement.streams_experts else 0
        lines = {
            "weights": sum(tensor.size_bytes for tensor in self.header.tensors) - streamed,
            "experts": min(streamed, spec.placement.expert_budget or 0),
            "repacked": _repacked_bytes(self.header, with_experts=not streamed),
            "kv": self._cell_bytes(shape, spec.kv_type) + self._state_bytes(shape),
            "compute": self._compute_bytes(shape) + self._output_bytes(shape),
            "other": self._other_bytes(shape),
            "adapters": sum(_adapter_bytes(adapter, shape) for adapter in spec.adapters),
            "projector": self._projector_bytes(spec, shape),
        }
        on_devices: dict[str, dict[str, int]] = {}
        if any(where):
            lines, on_devices = self._dealt_out(spec, shape, where, lines, streamed)
        return Estimate(
            lines={name: size for name, size in lines.items() if size},
            n_ctx=self._text_tokens(spec) if self._is_encoder else shape.cells,
            kv_layout=KVLayout.STREAMS if shape.num_streams > 1 else KVLayout.POOL,
            smaller_kv_types=self._smaller_kv_types(spec),
            on_devices=on_devices,
            num_layers=self.parts.num_layers,
            has_experts=self.parts.has_experts,
            experts=HostExperts(
                size_bytes=expert_bytes,
                active_bytes=math.ceil(expert_bytes * self.parts.active_part),
                is_streamed=lines["experts"] < streamed,
            ),
        )

    def _dealt_out(
        self, spec: ModelSpec, shape: _Shape, where: tuple[str, ...], lines: dict[str, int], streamed: int
    ) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
        """The lines in all, and what of them lies on devices, by id; `streamed` bytes are no weights."""
        held = {device: dict.fromkeys(("weights", "kv", "compute"), 0) for device in (HOST, *where)}
        for device, size in weights_by_device(self.parts, spec.placement).items():
            held[device]["weights"] = size - (streamed if device == HOST else 0)
        cells = [self._layer_bytes(layer, shape, spec.kv_type) for layer in self.layers.each]
        for device, size in zip(where, cells, strict=False):
            held[device if spec.placement.kv_offload else HOST]["kv"] += size
        for device, part in held.items():
            part["compute"] = self._layer_compute(shape) if device in where[:-1] else 0
        last_bytes, output_bytes = self._logits_compute(shape), self._output_bytes(shape)
        if where[-1] != HOST and not self._is_encoder and not self._reads_sources:
            last_bytes, output_bytes = self._draws_compute(shape), _DRAWN_OUTPUTS * output_bytes
        held[where[-1]]["compute"] = max(held[where[-1]]["compute"], last_bytes)
        held[HOST]["compute"] = max(held[HOST]["compute"], self._inputs(shape)) + output_bytes
        extra = next(device for device in where if device)
        for line in ("adapters", "projector"):
            held[extra][line] = lines[line]
        held[HOST]["repacked"] = min(lines["repacked"], held[HOST]["weights"]) if HOST in where else 0
        held[HOST] |= {line: lines[line] for line in ("other", "experts")}
        names = dict.fromkeys((*lines, *held[HOST]))
        total = {name: sum(part.get(name, 0) for part in held.values()) for name in names}
        return total, {device: part for device, part in held.items() if device}

    @property
    def _is_encoder(self) -> bool:
        return self.header.model_class is ModelClass.ENCODER

    @property
    def _reads_sources(self) -> bool:
        return self.header.model_class is ModelClass.ENCODER_DECODER

    def _shape_of(self, spec: ModelSpec) -> _Shape:
        if self._is_encoder:
            return self._encoder_shape(spec)
        return self._source_shape(spec) if self._reads_sources else self._shape(spec)

    def _source_shape(self, spec: ModelSpec) -> _Shape:
        """One sequence, and batches of a whole source of which every row is kept."""
        cells = _rounded(num_cells(self.header, spec))
        return _Shape(
            cells=cells,
            window_cells=0,
            num_sequences=1,
            num_tokens=cells,
            num_rows=cells,
            num_threads=spec.num_threads or os.cpu_count() or 1,
        )

    def _shape(self, spec: ModelSpec) -> _Shape:
        has_streams = spec.kv_layout is KVLayout.STREAMS and self.layers.keeps_every_cell
        if has_streams:
            sequences = num_sequences(spec.num_slots, KVLayout.STREAMS)
            cells = _rounded(stream_cells(spec, self.header.n_ctx_train))
        else:
            sequences = num_sequences(spec.num_slots)
            cells = _rounded(max(spec.pool_cells or self.header.n_ctx_train, sequences))
            spec = replace(spec, kv_layout=KVLayout.POOL)
        tokens = min(cells, max(spec.call_tokens, sequences))
        return _Shape(
            cells=cells,
            num_streams=sequences + 1 if has_streams else 1,
            window_cells=_rounded(min(cells, self.layers.window * sequences + tokens)),
            num_sequences=sequences,
            num_tokens=tokens,
            num_rows=tokens,
            num_threads=spec.num_threads or os.cpu_count() or 1,
            is_fused=spec.flash_attention is not FlashAttention.OFF,
        )

    def _encoder_shape(self, spec: ModelSpec) -> _Shape:
        """One context for whole texts: no cells, and a mask of every token by every other."""
        tokens = max(self._text_tokens(spec), spec.call_tokens)
        return _Shape(
            cells=_rounded(tokens),
            window_cells=_rounded(tokens) if self.layers.window else 0,
            num_sequences=min(MAX_TEXTS, spec.call_tokens),
            num_tokens=tokens,
            num_rows=0,
            num_threads=spec.num_threads or os.cpu_count() or 1,
        )

    def _text_tokens(self, spec: ModelSpec) -> int:
        """The most tokens that a text for an encoder may have."""
        return min(spec.n_ctx or self.header.n_ctx_train, self.header.n_ctx_train)

    def _layer_bytes(self, layer: Layer, shape: _Shape, kv_type: str) -> int:
        """Cells and states of one layer."""
        cells = shape.window_cells if layer.is_windowed else shape.cells * shape.num_streams
        elements = (layer.key_width + layer.value_width) * cells
        state = layer.state_width * shape.num_sequences * _FLOAT_BYTES
        return math.ceil(elements * _element_bytes(kv_type)) + state

    def _cell_bytes(self, shape: _Shape, kv_type: str) -> int:
        cells = shape.cells * shape.num_streams
        elements = sum(
            (layer.key_width + layer.value_width) * (shape.window_cells if layer.is_windowed else cells)
            for layer in self.layers.each
        )
        return math.ceil(elements * _element_bytes(kv_type))

    def _state_bytes(self, shape: _Shape) -> int:
        return sum(layer.state_width for layer in self.layers.each) * shape.num_sequences * _FLOAT_BYTES

    def _compute_bytes(self, shape: _Shape) -> int:
        """The most that is alive at once: a layer under its masks, or the last rows of logits."""
        return max(self._layer_compute(shape), self._logits_compute(shape))

    def _masks(self, shape: _Shape) -> int:
        if not self._has_attention or self._reads_sources:
            return 0
        cells = shape.cells + shape.window_cells * bool(self.layers.window)
        return shape.num_rounded * cells * (_MASK_BYTES if shape.is_fused else _SCORES_MASK_BYTES)

    def _inputs(self, shape: _Shape) -> int:
        """What the host hands to devices: masks and embeddings of a step."""
        return self._masks(shape) + 2 * shape.num_rounded * self.header.embedding_length * _FLOAT_BYTES

    def _layer_compute(self, shape: _Shape) -> int:
        tokens, masks = shape.num_rounded, self._masks(shape)
        state = max((layer.state_width for layer in self.layers.each), default=0)
        layer = tokens * self.widths.layer * _FLOAT_BYTES
        layer += int(_STATE_COPIES * state * shape.num_sequences * _FLOAT_BYTES)
        if self._reads_sources:
            source = max(shape.cells, self.header.n_ctx_train)
            layer += tokens * (source + 2 * shape.cells) * _FLOAT_BYTES  # masks, and numbers of distances
            scores = max(_BIASED_COPIES * shape.cells, source)
            layer += tokens * scores * self.layers.num_heads * _FLOAT_BYTES
            layer += _SOURCE_COPIES * source * self.widths.layer * _FLOAT_BYTES
        if self._has_attention and not self._reads_sources:
            layer += self._score_copies(shape) * tokens * shape.cells * self.layers.num_heads * _FLOAT_BYTES
        return int(_FRAGMENTS * (masks + layer))

    def _score_copies(self, shape: _Shape) -> int:
        """How often every token's scores of every cell are there at once; flash attention keeps none."""
        if self.header.architecture in _WITHOUT_FLASH:
            return _COPIES_WITHOUT_FLASH
        return 0 if shape.is_fused else 1

    def _logits_compute(self, shape: _Shape) -> int:
        logits = shape.num_rows * self.widths.vocabulary * _FLOAT_BYTES
        return int(
            _FRAGMENTS * (logits + 2 * shape.num_rounded * self.header.embedding_length * _FLOAT_BYTES)
        )

    def _draws_compute(self, shape: _Shape) -> int:
        """The last rows of logits where a device finds the largest: one a sequence, and a copy."""
        vocabulary = self.widths.vocabulary
        copies = 2 + (vocabulary % _FILLED_TO > 0)  # one more where rows are filled up
        rows = copies * vocabulary * (shape.num_sequences + 1)
        embeddings = 2 * shape.num_rounded * self.header.embedding_length
        return int(_FRAGMENTS * (rows + embeddings) * _FLOAT_BYTES)

    @property
    def _has_attention(self) -> bool:
        return self._is_encoder or any(layer.key_width for layer in self.layers.each)

    def _output_bytes(self, shape: _Shape) -> int:
        """Where rows of logits are kept for the caller: one a sequence; of an encoder one a token."""
        if self._is_encoder or self._reads_sources:
            return shape.num_tokens * (self.widths.vocabulary + self.header.embedding_length) * _FLOAT_BYTES
        return shape.num_sequences * self.widths.vocabulary * _FLOAT_BYTES

    def _other_bytes(self, shape: _Shape) -> int:
        merges = self.header.metadata.get("tokenizer.ggml.merges")
        num_entries = self.header.n_vocab + (merges.length if isinstance(merges, GgufArray) else 0)
        kinds = self.header.tensor_types
        work_bytes = max(_WORK_BYTES.get(kind, _QUANTISED_WORK_BYTES) for kind in kinds)
        return (
            _LIBRARY_BYTES
            + len(self.header.tensors) * _BYTES_A_TENSOR
            + num_entries * _BYTES_A_TOKEN
            + shape.num_threads * _BYTES_A_THREAD
            + int(shape.num_tokens * self.widths.product * work_bytes)
        )

    def _projector_bytes(self, spec: ModelSpec, shape: _Shape) -> int:
        """What looks at images, and their embeddings in a step: laid out, and in the graph."""
        if spec.projector is None:
            return 0
        embeddings = 2 * shape.num_tokens * self.header.embedding_length * _FLOAT_BYTES
        return spec.projector.size_bytes + spec.projector.compute_bytes + embeddings

    def _smaller_kv_types(self, spec: ModelSpec) -> tuple[str, ...]:
        """Quantised cells: only by flash attention, in whole blocks, of models that keep every cell."""
        is_possible = (
            not (self._is_encoder or self._reads_sources)
            and self.layers.keeps_every_cell
            and self.header.architecture not in _WITHOUT_FLASH
            and spec.flash_attention is not FlashAttention.OFF
            and all(width and width % _QUANTISED_BLOCK == 0 for width in self.layers.head_widths)
        )
        now = _element_bytes(spec.kv_type)
        return tuple(name for name in _SMALLER_KV_TYPES if is_possible and _element_bytes(name) < now)


def _adapter_bytes(adapter: AdapterSpec, shape: _Shape) -> int:
    """Its factors, and what they add to the widest product of a step."""
    return adapter.size_bytes + shape.num_tokens * adapter.num_wide * _FLOAT_BYTES


def _element_bytes(kv_type: str) -> float:
    size = _TYPE_SIZES.get(kv_type or _DEFAULT_KV_TYPE)
    if size is None:
        raise UnsupportedError(f"cells of type {kv_type!r} are not known")
    return size


def _rounded(cells: int) -> int:
    return math.ceil(cells / _CELL_ROUNDING) * _CELL_ROUNDING


def _repacked_bytes(header: GgufHeader, *, with_experts: bool) -> int:
    has_output = any(tensor.name == "output.weight" for tensor in header.tensors)
    laid_out = (tensor for tensor in header.tensors if with_experts or not is_expert(tensor.name))
    return sum(tensor.size_bytes for tensor in laid_out if _is_repacked(tensor, has_output))


def _is_repacked(tensor: TensorInfo, has_output: bool) -> bool:  # noqa: FBT001 - a fact about the file
    if tensor.name == "token_embd.weight" and has_output:
        return False  # rows of it are looked up; without an output matrix it is that as well
    is_matrix = len(tensor.shape) >= _MATRIX_DIMS and tensor.shape[1] % _REPACKED_ROWS == 0
    return is_matrix and tensor.name.endswith(".weight") and tensor.type_name in _REPACKED_TYPES
