"""Writes tiny, valid GGUF files of every class, and lets a test bend one thing about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, FEED_FORWARD, HEADS, SHARED_HEADS = 32, 48, 4, 2
SPECIAL = ["<unk>", "<s>", "</s>"]
TOKENS = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "hello"]
BYTE, CONTROL, NORMAL, UNKNOWN = 6, 3, 1, 2
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@dataclass(kw_only=True)
class TinyModel:
    """A llama of random weights: 32 wide, a vocabulary of bytes.

    `changes` replaces or adds metadata (value None leaves the key out), `shapes` replaces tensor shapes
    (in numpy's order, None leaves the tensor out).
    """

    architecture: str = "llama"
    num_layers: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=lambda: list(TOKENS))
    alignment: int | None = None
    shard_tensors: int = 0

    def metadata(self) -> dict[str, Any]:
        """All keys but the architecture, before they are written."""
        types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 64][: len(self.tokens)]
        types += [NORMAL] * (len(self.tokens) - len(types))
        keys: dict[str, Any] = {
            "general.name": "tiny",
            "general.file_type": np.uint32(0),
            f"{self.architecture}.context_length": np.uint32(256),
            f"{self.architecture}.embedding_length": np.uint32(WIDTH),
            f"{self.architecture}.block_count": np.uint32(self.num_layers),
            f"{self.architecture}.feed_forward_length": np.uint32(FEED_FORWARD),
            f"{self.architecture}.attention.head_count": np.uint32(HEADS),
            f"{self.architecture}.attention.head_count_kv": np.uint32(SHARED_HEADS),
            f"{self.architecture}.rope.dimension_count": np.uint32(WIDTH // HEADS),
            f"{self.architecture}.rope.freq_base": np.float32(10_000.0),
            f"{self.architecture}.attention.layer_norm_rms_epsilon": np.float32(1e-5),
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.scores": [np.float32(-index).item() for index in range(len(self.tokens))],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": np.uint32(1),
            "tokenizer.ggml.eos_token_id": np.uint32(2),
            "tokenizer.ggml.unknown_token_id": np.uint32(0),
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": CHAT_TEMPLATE,
        }
        keys.update(self.changes)
        return {key: value for key, value in keys.items() if value is not None}

    def tensors(self) -> dict[str, np.ndarray]:
        """Random weights by name."""
        narrow = WIDTH // HEADS * SHARED_HEADS
        shapes: dict[str, tuple[int, ...] | None] = {
            "token_embd.weight": (len(self.tokens), WIDTH),
            "output_norm.weight": (WIDTH,),
        }
        for layer in range(self.num_layers):
            for name, shape in {
                "attn_norm": (WIDTH,),
                "attn_q": (WIDTH, WIDTH),
                "attn_k": (narrow, WIDTH),
                "attn_v": (narrow, WIDTH),
                "attn_output": (WIDTH, WIDTH),
                "ffn_norm": (WIDTH,),
                "ffn_gate": (FEED_FORWARD, WIDTH),
                "ffn_up": (FEED_FORWARD, WIDTH),
                "ffn_down": (WIDTH, FEED_FORWARD),
            }.items():
                shapes[f"blk.{layer}.{name}.weight"] = shape
        shapes.update(self.shapes)
        random = np.random.default_rng(7)
        return {
            name: random.normal(size=shape).astype(np.float32) / 4
            for name, shape in shapes.items()
            if shape is not None
        }

    def write(self, path: Path) -> Path:
        """Write the file (or the shards, `path` being the name of the first); returns `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(
            path, self.architecture, split_max_tensors=self.shard_tensors, small_first_shard=False
        )
        if self.alignment is not None:
            writer.add_custom_alignment(self.alignment)
        for key, value in self.metadata().items():
            _add(writer, key, value)
        for name, data in self.tensors().items():
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        add = {
            "uint16": writer.add_uint16,
            "uint32": writer.add_uint32,
            "int32": writer.add_int32,
            "float32": writer.add_float32,
        }[value.dtype.name]
        add(key, value.item())


def write_tiny(path: Path, **fields: Any) -> Path:
    """A `TinyModel(**fields)` written to `path`."""
    return TinyModel(**fields).write(path)
