"""BERT in numpy, from its paper and not from llama.cpp: what the vectors of an encoder are compared with."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np

_ERF = np.vectorize(math.erf, otypes=[np.float64])


class BertReference:
    """The encoder of a GGUF file of F32 or F16, computed in double precision, a text at a time."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._weights = {tensor.name: np.array(tensor.data, np.float64) for tensor in reader.tensors}
        self._num_layers = int(reader.fields["bert.block_count"].contents())
        self._num_heads = int(reader.fields["bert.attention.head_count"].contents())
        self._epsilon = float(reader.fields["bert.attention.layer_norm_epsilon"].contents())

    def vector(self, tokens: list[int], pooling: str = "mean") -> np.ndarray:
        """The pooled vector of a text, float64 (width,)."""
        hidden = self._hidden(tokens)
        match pooling:
            case "mean":
                return hidden.mean(axis=0)
            case "cls":
                return hidden[0]
            case "last":
                return hidden[-1]
        raise ValueError(pooling)

    def score(self, tokens: list[int]) -> float:
        """What the classifier makes of the first token, as BERT's pooler and head do."""
        hidden = np.tanh(self._linear("cls", self._hidden(tokens)[:1]))
        return float(self._linear("cls.output", hidden)[0, 0])

    def _hidden(self, tokens: list[int]) -> np.ndarray:
        weights = self._weights
        hidden = weights["token_embd.weight"][tokens] + weights["position_embd.weight"][: len(tokens)]
        hidden = self._norm("token_embd_norm", hidden + weights["token_types.weight"][0])
        for layer in range(self._num_layers):
            name = f"blk.{layer}."
            hidden = self._norm(name + "attn_output_norm", hidden + self._attention(name, hidden))
            inner = self._linear(name + "ffn_up", hidden)
            inner = inner * (1 + _ERF(inner / math.sqrt(2))) / 2
            hidden = self._norm(name + "layer_output_norm", hidden + self._linear(name + "ffn_down", inner))
        return hidden

    def _attention(self, name: str, hidden: np.ndarray) -> np.ndarray:
        parts = [self._heads(self._linear(f"{name}attn_{part}", hidden)) for part in "qkv"]
        queries, keys, values = parts
        scores = queries @ keys.transpose(0, 2, 1) / math.sqrt(queries.shape[-1])
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = scores / scores.sum(axis=-1, keepdims=True) @ values
        return self._linear(name + "attn_output", mixed.transpose(1, 0, 2).reshape(hidden.shape))

    def _heads(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(len(rows), self._num_heads, -1).transpose(1, 0, 2)

    def _linear(self, name: str, rows: np.ndarray) -> np.ndarray:
        return rows @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, name: str, rows: np.ndarray) -> np.ndarray:
        centred = rows - rows.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self._epsilon)
        return scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine of the angle between two vectors."""
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
