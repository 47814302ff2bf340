"""Writes random LoRA adapters for tiny models, and models into whose weights an adapter is merged.

The merged model is the independent reference: W + scale * alpha / rank * B A, computed here in numpy.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from tiny_models import FEED_FORWARD, HEAD_WIDTH, HEADS, SHARED_HEADS, TOKENS, WIDTH

RANK = 4
LOOKED_UP = "token_embd.weight"
EMBEDDINGS = {LOOKED_UP: (len(TOKENS), WIDTH)}
# Of the model that `write_llama` writes: rows (outputs) and columns (inputs) of what adapters change.
TARGETS: dict[str, tuple[int, int]] = {
    "blk.0.attn_q.weight": (HEADS * HEAD_WIDTH, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, FEED_FORWARD),
    "blk.1.attn_v.weight": (SHARED_HEADS * HEAD_WIDTH, WIDTH),
    "blk.1.attn_output.weight": (WIDTH, HEADS * HEAD_WIDTH),
    "output.weight": (len(TOKENS), WIDTH),
}


@dataclass(frozen=True)
class TinyAdapter:
    """An adapter file and the factors in it: A is (rank, inputs), B is (outputs, rank).

    Of the embeddings, whose rows are looked up, A is (tokens, rank) and B is (width, rank).
    """

    path: Path
    alpha: float
    factors: dict[str, tuple[np.ndarray, np.ndarray]]

    def deltas(self, scale: float = 1.0) -> dict[str, np.ndarray]:
        """What it adds to each weight at that scale, float32 (outputs, inputs)."""
        factor = np.float32(scale * (self.alpha or RANK) / RANK)
        return {
            name: factor * (a @ b.T if name == LOOKED_UP else b @ a) for name, (a, b) in self.factors.items()
        }


def write_adapter(
    path: Path,
    seed: int = 1,
    *,
    alpha: float = 8.0,
    architecture: str = "llama",
    targets: dict[str, tuple[int, int]] | None = None,
) -> TinyAdapter:
    """An adapter of rank 4 with random factors, large enough to change every text."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    factors = {}
    for name, (rows, columns) in (targets or TARGETS).items():
        shapes = ((rows, RANK), (columns, RANK)) if name == LOOKED_UP else ((RANK, columns), (rows, RANK))
        a, b = (random.normal(size=shape).astype(np.float32) / 4 for shape in shapes)
        factors[name] = (a, b)
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyAdapter(path, alpha, factors)


def write_merged(path: Path, base: Path, *parts: tuple[TinyAdapter, float]) -> Path:
    """A copy of the model `base` (f32) with each adapter added at its scale."""
    shutil.copy(base, path)
    reader = gguf.GGUFReader(path, "r+")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for adapter, scale in parts:
        for name, delta in adapter.deltas(scale).items():
            tensors[name].data[:] += delta
    reader.data.flush()
    return path
