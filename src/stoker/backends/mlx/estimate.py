"""How much memory a folder's model takes on MLX, told from its headers alone (SPEC R1).

Owns the lines: weights, cells and states, what a step computes in, and what MLX adds. What a layer keeps is
in `models.folders.layers`. Nothing native is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.backends.mlx.vision.families import projector_bytes
from stoker.errors import UnsupportedError
from stoker.ipc.model import KVLayout
from stoker.models.folders.folder import TOKENIZER
from stoker.models.folders.layers import FolderLayers, read_layers
from stoker.models.memory_estimate.estimate import num_sequences
from stoker.models.memory_estimate.fit import Estimate, Estimator

if TYPE_CHECKING:
    from stoker.ipc.model import ModelSpec
    from stoker.models.folders.folder import ModelFolder

STEP_CELLS = 256
"""By so many tokens MLX's caches grow."""
DEFAULT_CELLS = 16384
KV_BITS = {"q8_0": 8, "q4_0": 4}
"""How keys and values may be stored but as the model computes."""
KV_GROUP = 32
"""Quantised keys and values that share a scale and a bias; a head has to be so wide, or a multiple of it."""
_FLOAT_BYTES = 4
_NUMBER_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LIBRARY_BYTES = 96 * 2**20  # MLX, its models and what these import
_CACHED_BYTES = 50 * 2**20  # buffers that MLX keeps to use again, at the most
_TOKENIZER_COPIES = 28  # of the file, as two tokenizers with their tables hold it
_LIVE_COPIES = 3  # of the widest tensor of a layer, in a step


def estimator(folder: ModelFolder) -> Estimator:
    """What the model of `folder` takes, for any way to load it.

    Raises:
        ModelFileError: config and tensors say different things.
    """
    return _FolderModel(folder, read_layers(folder)).estimate


@dataclass(frozen=True, slots=True)
class _FolderModel:
    folder: ModelFolder
    layers: FolderLayers

    def estimate(self, spec: ModelSpec) -> Estimate:
        cells = spec.pool_cells or self.folder.settings.context_length or DEFAULT_CELLS
        lines = {
            "weights": self.layers.text_bytes,
            "kv": self._kv_bytes(spec, cells),
            "compute": self._compute_bytes(spec, cells),
            "projector": projector_bytes(self.folder),
            "other": self._other_bytes(),
            "adapters": sum(each.size_bytes for each in spec.adapters),
        }
        return Estimate(
            lines={name: size for name, size in lines.items() if size},
            n_ctx=cells,
            kv_layout=KVLayout.POOL,
            smaller_kv_types=self._smaller_kv_types(spec.kv_type),
            num_layers=0,
            has_experts=self.layers.has_experts,
        )

    @property
    def _dtype(self) -> str:
        """Of the numbers that it computes with: of its weights, or of the scales of quantised ones."""
        dtypes = [each.dtype for each in self.folder.tensors.values() if each.dtype in _NUMBER_BYTES]
        return max(set(dtypes), key=dtypes.count, default="F32")

    @property
    def _number_bytes(self) -> int:
        return _NUMBER_BYTES[self._dtype]

    def _kv_bytes(self, spec: ModelSpec, cells: int) -> int:
        """Each sequence has steps of its own, the last one begun."""
        bits = self._kv_bits(spec.kv_type)
        number = float(self._number_bytes)
        stored = bits / 8 + 2 * number / KV_GROUP if bits else number
        whole = cells + spec.num_slots * STEP_CELLS
        sequences = num_sequences(spec.num_slots)
        window = min(self.layers.window, cells) * sequences + STEP_CELLS * spec.num_slots
        found = 0.0
        for layer in self.layers.each:
            found += layer.width * (window * number if layer.is_windowed else whole * stored)
            found += layer.state_width * sequences * _FLOAT_BYTES
        return math.ceil(found)

    def _compute_bytes(self, spec: ModelSpec, cells: int) -> int:
        """A layer of a step, the rows of logits, and a cache that is copied as it grows or is batched."""
        config, tokens = self.folder.settings, min(spec.call_tokens, cells)
        layer = tokens * max(self.layers.widest if self.layers.widest < config.n_vocab else 0, config.width)
        heads = config.optional("num_attention_heads", "n_head", low=1, high=1 << 16) or 1
        scores = min(tokens, STEP_CELLS) * heads * min(cells, _longest(cells, config.context_length))
        logits = 2 * spec.num_slots * config.n_vocab
        largest = max((each.width for each in self.layers.each), default=0)
        copied = 2 * largest * cells * self._number_bytes
        return (_LIVE_COPIES * layer + scores + logits) * _FLOAT_BYTES + copied

    def _other_bytes(self) -> int:
        size = (self.folder.path / TOKENIZER).stat().st_size
        return _LIBRARY_BYTES + _CACHED_BYTES + _TOKENIZER_COPIES * size

    def _smaller_kv_types(self, kv_type: str) -> tuple[str, ...]:
        """Caches that rotate and states stay as they are, so only where there are others."""
        bits = self._kv_bits(kv_type)
        keeps = any(layer.width and not layer.is_windowed for layer in self.layers.each)
        if not keeps or self._head_width() % KV_GROUP:
            return ()
        return tuple(each for each, size in KV_BITS.items() if not bits or size < bits)

    def _head_width(self) -> int:
        config = self.folder.settings
        heads = config.optional("num_attention_heads", "n_head", low=1) or 1
        return config.optional("head_dim", "kv_lora_rank", low=1) or config.width // heads

    def _kv_bits(self, kv_type: str) -> int:
        """0: they are stored as the model computes."""
        own = self._dtype.lower()
        if kv_type in {"", own}:
            return 0
        if kv_type not in KV_BITS:
            known = ", ".join((own, *KV_BITS))
            raise UnsupportedError(
                f"kv_type is {kv_type!r}; for this model on MLX it is one of {known}", param="kv_type"
            )
        return KV_BITS[kv_type]


def _longest(cells: int, trained: int) -> int:
    """Tokens that one sequence may have."""
    return min(cells, trained) if trained else cells
