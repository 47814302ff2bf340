"""The last matrix of a network: computed only for tokens that want logits, and watched for what goes in.

A network multiplies every token of a pass with it. Of a prompt's tokens one has a use for that at most, and
the matrix is as large as several layers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from stoker.backends.mlx.native import Array


class _Selecting(nn.Module):  # type: ignore[misc] # MLX has no types
    """An output matrix behind the choice of tokens."""

    def __init__(self, inner: Any, head: OutputHead) -> None:
        super().__init__()
        self.inner = inner
        object.__setattr__(self, "_head", head)

    def __call__(self, tokens: Array) -> Array:
        return self.inner(self._head.selected(tokens))


class OutputHead:
    """Takes the place of a network's output matrix, be it one of its own or that of its embeddings.

    Attributes:
        hidden: what went into the matrix at the last pass, (tokens, width); None: it was not reached.
    """

    def __init__(self, network: Any) -> None:
        self.hidden: Array | None = None
        self._rows: Array | None = None
        for name, module in network.named_modules():
            if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                self._watch_embedding(module)
            elif name.rpartition(".")[2] == "lm_head":
                network.update_modules(tree_unflatten([(name, _Selecting(module, self))]))

    def __repr__(self) -> str:
        return f"<OutputHead, {'never reached' if self.hidden is None else self.hidden.shape}>"

    def expect(self, rows: list[int]) -> None:
        """Of the next pass compute the logits of these tokens, counted over all of its sequences."""
        self._rows = mx.array(rows, dtype=mx.int32)
        self.hidden = None

    def logits(self, out: Array, rows: list[int]) -> Array:
        """float32 (rows, n_vocab) of what the network has returned, whether it met this head or not."""
        if self.hidden is None:
            out = out.reshape(-1, out.shape[-1])[mx.array(rows, dtype=mx.int32)]
        return out.reshape(-1, out.shape[-1]).astype(mx.float32)

    def selected(self, tokens: Array) -> Array:
        """Those that were asked for, (1, rows, width)."""
        self.hidden = tokens.reshape(-1, tokens.shape[-1])[self._rows]
        return self.hidden[None]

    def _watch_embedding(self, module: Any) -> None:
        as_linear = module.as_linear
        module.as_linear = lambda tokens: as_linear(self.selected(tokens))
