"""How wide the tensors of a step get, by the shapes of a model's weights (SPEC R1).

Owns the rules for what is alive at once inside a layer, fitted to the compute buffers that the bundled
llama.cpp reports.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.models.gguf.header import GgufHeader, TensorInfo

_BLOCK = re.compile(r"(?:blk|enc\.blk|dec\.blk)\.(\d+)\.([a-z0-9_]+)")
_FEED_FORWARD = frozenset({"ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp", "channel_mix_key"})
_EXPERTS = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"})
_QUERIES = frozenset({"attn_q", "attn_q_b", "attn_qkv", "attn_qkv_mqa", "attn_gate"})
_KEYS = frozenset({"attn_k", "attn_v"})
_TIME_MIX = "time_mix_key"
_RECURRENT_OUT = "ssm_out"
_HIDDEN = 4  # the residual stream, its norm, a sum and what comes next
_FEED_FORWARD_COPIES = 3  # gate, up and their product
_TIME_MIX_COPIES = 11  # RWKV-6
_LATER_TIME_MIX_COPIES = 16  # RWKV-7, told by the rates its state learns at
_LATER_TIME_MIX = "time_mix_a1"
_RECURRENT_COPIES = 8
_MATRIX_DIMS = 2


@dataclass(frozen=True, slots=True)
class Widths:
    """Elements a token.

    Attributes:
        layer: what is alive at once in the widest layer.
        product: what the widest product of a layer takes.
        vocabulary: logits of a row.
    """

    layer: int
    product: int
    vocabulary: int


def read_widths(header: GgufHeader) -> Widths:
    """The widths of a model."""
    blocks: dict[int, list[tuple[str, TensorInfo]]] = defaultdict(list)
    for tensor in header.tensors:
        if (match := _BLOCK.match(tensor.name)) and len(tensor.shape) >= _MATRIX_DIMS:
            blocks[int(match[1])].append((match[2], tensor))
    hidden = header.embedding_length
    used = _experts_used(header)
    layers = [_layer_width(tensors, hidden, used) for tensors in blocks.values()]
    products = [
        tensor.shape[0] * (used if "_exps" in name else 1)
        for tensors in blocks.values()
        for name, tensor in tensors
    ]
    rows = [
        tensor.shape[1] for tensor in header.tensors if tensor.name in {"output.weight", "token_embd.weight"}
    ]
    return Widths(
        layer=max(layers, default=_HIDDEN * hidden),
        product=max(products, default=hidden),
        vocabulary=max([header.n_vocab, *rows]),
    )


def _experts_used(header: GgufHeader) -> int:
    value = header.metadata.get(f"{header.architecture}.expert_used_count", 1)
    return max(1, value) if isinstance(value, int) else 8


def _layer_width(tensors: list[tuple[str, TensorInfo]], hidden: int, experts_used: int) -> int:
    outputs: dict[str, int] = {name: tensor.shape[1] for name, tensor in tensors}
    feed_forward = _FEED_FORWARD_COPIES * _widest(outputs, _FEED_FORWARD)
    experts = _FEED_FORWARD_COPIES * experts_used * _widest(outputs, _EXPERTS)
    if experts:
        experts += 2 * experts_used * hidden
    queries, keys = _widest(outputs, _QUERIES), _widest(outputs, _KEYS)
    attention = max(2 * queries, queries + 4 * keys)
    copies = _LATER_TIME_MIX_COPIES if _LATER_TIME_MIX in outputs else _TIME_MIX_COPIES
    time_mix = copies * outputs.get(_TIME_MIX, 0)
    inner = max((tensor.shape[0] for name, tensor in tensors if name == _RECURRENT_OUT), default=0)
    recurrent = _RECURRENT_COPIES * inner
    return _HIDDEN * hidden + max(feed_forward + experts, attention, time_mix, recurrent)


def _widest(outputs: dict[str, int], names: frozenset[str]) -> int:
    return max((outputs.get(name, 0) for name in names), default=0)
