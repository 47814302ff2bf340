"""T5 in numpy, from its paper and not from llama.cpp: what an encoder-decoder's logits are compared with."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np

MAX_DISTANCE = 128


class T5Reference:
    """The model of a GGUF file of F32 or F16, in double precision, from the first token each time."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._weights = {tensor.name: np.array(tensor.data, np.float64) for tensor in reader.tensors}
        self._num_layers = int(reader.fields["t5.block_count"].contents())
        self._num_heads = int(reader.fields["t5.attention.head_count"].contents())
        self._num_buckets = int(reader.fields["t5.attention.relative_buckets_count"].contents())
        self._epsilon = float(reader.fields["t5.attention.layer_norm_rms_epsilon"].contents())

    def logits(self, source: list[int], tokens: list[int]) -> np.ndarray:
        """Logits after each of `tokens`, which begin with the decoder's start token; float64 (n, n_vocab)."""
        read = self._stack("enc", source, None)
        hidden = self._stack("dec", tokens, read)
        if "output.weight" in self._weights:
            return hidden @ self._weights["output.weight"].T
        embeddings = self._weights["token_embd.weight"]
        return hidden / math.sqrt(hidden.shape[-1]) @ embeddings.T

    def greedy(self, source: list[int], start: int, end: int, most: int) -> list[int]:
        """The likeliest tokens one after the other, up to `most` of them or the one before `end`."""
        tokens = [start]
        while len(tokens) <= most:
            tokens.append(int(self.logits(source, tokens)[-1].argmax()))
            if tokens[-1] == end:
                return tokens[1:-1]
        return tokens[1:]

    def _stack(self, side: str, tokens: list[int], read: np.ndarray | None) -> np.ndarray:
        """All layers of one side; the decoder sees no later token, and in between what was `read`."""
        hidden = self._weights["token_embd.weight"][tokens]
        bias = self._bias(side, len(tokens))
        for layer in range(self._num_layers):
            name = f"{side}.blk.{layer}."
            inner = self._norm(name + "attn_norm", hidden)
            hidden = hidden + self._attention(name, inner, inner, bias)
            if read is not None:
                inner = self._norm(name + "cross_attn_norm", hidden)
                hidden = hidden + self._attention(name + "cross_", inner, read, np.zeros(1))
            hidden = hidden + self._feed_forward(name, self._norm(name + "ffn_norm", hidden))
        return self._norm(side + ".output_norm", hidden)

    def _bias(self, side: str, num_tokens: int) -> np.ndarray:
        """What is added to the scores for the distance of two tokens, (heads, queries, keys)."""
        bias = np.zeros((self._num_heads, num_tokens, num_tokens))
        table = self._weights[f"{side}.blk.0.attn_rel_b.weight"]
        for query in range(num_tokens):
            for key in range(num_tokens):
                if side == "dec" and key > query:
                    bias[:, query, key] = -np.inf
                else:
                    bias[:, query, key] = table[self._bucket(key - query, is_two_sided=side == "enc")]
        return bias

    def _bucket(self, distance: int, *, is_two_sided: bool) -> int:
        """Near distances have a bucket each, far ones share them by their logarithm."""
        first, count = 0, self._num_buckets
        if is_two_sided:
            count //= 2
            first = count if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(0, -distance)
        exact = count // 2
        if distance < exact:
            return first + distance
        share = math.log(distance / exact) / math.log(MAX_DISTANCE / exact)
        return first + min(count - 1, exact + int(share * (count - exact)))

    def _attention(self, name: str, asking: np.ndarray, asked: np.ndarray, bias: np.ndarray) -> np.ndarray:
        queries = self._heads(asking, f"{name}attn_q")
        keys, values = (self._heads(asked, f"{name}attn_{part}") for part in "kv")
        scores = queries @ keys.transpose(0, 2, 1) + bias  # T5 divides by no root
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = scores / scores.sum(axis=-1, keepdims=True) @ values
        return self._product(name + "attn_o", mixed.transpose(1, 0, 2).reshape(len(asking), -1))

    def _heads(self, hidden: np.ndarray, name: str) -> np.ndarray:
        return self._product(name, hidden).reshape(len(hidden), self._num_heads, -1).transpose(1, 0, 2)

    def _feed_forward(self, name: str, hidden: np.ndarray) -> np.ndarray:
        inner = self._product(name + "ffn_up", hidden)
        if name + "ffn_gate.weight" in self._weights:
            gate = self._product(name + "ffn_gate", hidden)
            inner = inner * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
        else:
            inner = np.maximum(inner, 0)
        return self._product(name + "ffn_down", inner)

    def _product(self, name: str, hidden: np.ndarray) -> np.ndarray:
        return hidden @ self._weights[name + ".weight"].T

    def _norm(self, name: str, hidden: np.ndarray) -> np.ndarray:
        scale = 1 / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + self._epsilon)
        return hidden * scale * self._weights[name + ".weight"]
