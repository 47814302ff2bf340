"""What each layer of a model keeps of the tokens it has seen, and how wide a step gets in it (SPEC R1).

Owns the numbers of llama.cpp's caches, keys and values by layer (shared heads, latent attention, sliding
windows) and the fixed-size states of recurrent layers, and the rules for what is alive at once inside a
layer, fitted to the compute buffers that the bundled llama.cpp reports. `estimate` says how many cells and
states there are. Where a header leaves room for doubt the larger number is taken.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.ipc.model import ModelClass
from stoker.models.gguf.bounded_file import GgufArray

if TYPE_CHECKING:
    from stoker.models.gguf.header import GgufHeader, TensorInfo

# src/models/*.cpp: architectures that look at windows, with one layer in so many that sees everything.
_PATTERNS = {
    "afmoe": 4,
    "cohere2": 4,
    "cohere2moe": 4,
    "exaone-moe": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "laguna": 4,
    "llama4": 4,
    "mellum": 4,
    "muse-glimmer": 4,
    "olmo2": 4,
    "plamo3": 8,
    "smallthinker": 4,
}
_DENSE_FIRST = frozenset({"cohere2moe", "laguna", "smallthinker"})  # the first of them, not the last
# Others name their windowed layers one by one.
_NAMED_ONLY = frozenset({"gemma4", "granite_swa", "maple", "mimo2", "spark2_5", "step35"})
_FIXED_WINDOWS = {"gemma2": 4096, "llama4": 8192, "smallthinker": 4096, "exaone-moe": 128}
_ALL_OWN_CELLS = 20  # gemma3n: layers from here on look at the cells of earlier ones
_RWKV = ("rwkv", "arwkv")
_DEFAULT_CONV = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer keeps.

    Attributes:
        key_width, value_width: elements a cell holds; 0: it has no cells.
        is_windowed: its cells are of the last tokens only.
        state_width: float32 numbers of its recurrent state, a sequence; 0: it has none.
    """

    key_width: int = 0
    value_width: int = 0
    is_windowed: bool = False
    state_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """All layers of a model.

    Attributes:
        window: tokens that a windowed layer sees; 0: there is none.
        head_widths: elements of one key and one value head, as they occur.
        num_heads: query heads of the layer that has most.
    """

    each: tuple[Layer, ...]
    window: int
    head_widths: frozenset[int]
    num_heads: int

    @property
    def keeps_every_cell(self) -> bool:
        """Whether any prefix of a sequence can be had back: no recurrent state, no window."""
        return not any(layer.state_width or layer.is_windowed for layer in self.each)


def read_layers(header: GgufHeader) -> Layers:
    """What each layer of the model keeps."""
    keys = _Keys(header)
    window = _window(keys)
    num_heads = keys.per_layer("attention.head_count", 0)
    each = tuple(_layer(keys, index, window) for index in range(header.block_count))
    widths = {
        keys.head_width(part, is_windowed=layer.is_windowed) for layer in each for part in ("key", "value")
    }
    return Layers(each=each, window=window, head_widths=frozenset(widths), num_heads=max(num_heads))


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of the model's architecture, as numbers."""

    header: GgufHeader

    @property
    def architecture(self) -> str:
        return self.header.architecture

    def number(self, name: str, default: int = 0) -> int:
        """A number; of a list the largest."""
        return max(self.per_layer(name, default))

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.header.metadata

    def per_layer(self, name: str, default: int) -> list[int]:
        """A number for each layer."""
        value = self.header.metadata.get(f"{self.architecture}.{name}", default)
        count = self.header.block_count
        if isinstance(value, GgufArray):
            found = [int(each) for each in value.values or ()]
            return (found + [max(found, default=default)] * count)[:count]
        return [int(value) if isinstance(value, int) else default] * count

    def head_width(self, part: str, *, is_windowed: bool = False) -> int:
        """Elements of one key or value head."""
        heads = self.number("attention.head_count")
        width = self.number(f"attention.{part}_length", self.header.embedding_length // heads if heads else 0)
        return self.number(f"attention.{part}_length_swa", width) if is_windowed else width


def _window(keys: _Keys) -> int:
    architecture = keys.architecture
    if architecture not in _PATTERNS and architecture not in _NAMED_ONLY:
        return 0
    default = _FIXED_WINDOWS.get(architecture, 0)
    return default if architecture == "llama4" else keys.number("attention.sliding_window", default)


def _is_windowed(keys: _Keys, index: int, window: int) -> bool:
    if not window:
        return False
    pattern = keys.header.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, GgufArray):
        named = pattern.values or ()
        return index < len(named) and bool(named[index])
    if keys.architecture in _NAMED_ONLY:
        return False
    period = int(pattern) if isinstance(pattern, int) else _PATTERNS[keys.architecture]
    if period == 0:
        return True
    place = index % period
    return place != 0 if keys.architecture in _DENSE_FIRST else place < period - 1


def _layer(keys: _Keys, index: int, window: int) -> Layer:
    model_class = keys.header.model_class
    if model_class is ModelClass.ENCODER:
        return Layer()
    if model_class is ModelClass.RECURRENT:
        return Layer(state_width=_state_width(keys, index))
    is_windowed = _is_windowed(keys, index, window)
    heads = keys.per_layer("attention.head_count", 0)[index]
    shared = keys.per_layer("attention.head_count_kv", heads)[index]
    if not _has_own_cells(keys, index):
        shared = 0
    is_latent = keys.number("attention.key_length_mla") > 0  # its values are part of its keys
    state_width = _state_width(keys, index) if model_class is ModelClass.HYBRID else 0
    if state_width and keys.architecture != "falcon-h1":  # which has both in every layer
        is_recurrent = _is_recurrent(keys, index, shared)
        state_width = state_width if is_recurrent is not False else 0
        shared = 0 if is_recurrent else shared
    return Layer(
        key_width=shared * keys.head_width("key", is_windowed=is_windowed) + _indexer_width(keys, shared),
        value_width=0 if is_latent else shared * keys.head_width("value", is_windowed=is_windowed),
        is_windowed=is_windowed,
        state_width=state_width,
    )


def _has_own_cells(keys: _Keys, index: int) -> bool:
    if keys.architecture == "gemma3n":
        return index < _ALL_OWN_CELLS
    return index < keys.header.block_count - keys.number("attention.shared_kv_layers")


def _is_recurrent(keys: _Keys, index: int, shared_heads: int) -> bool | None:
    """Whether a hybrid's layer is recurrent; None: the header does not tell."""
    if keys.has("attention.recurrent_layers"):
        return bool(keys.per_layer("attention.recurrent_layers", 0)[index])
    if isinstance(keys.header.metadata.get(f"{keys.architecture}.attention.head_count_kv"), GgufArray):
        return shared_heads == 0
    interval = keys.number("full_attention_interval")
    return (index + 1) % interval != 0 if interval else None


def _indexer_width(keys: _Keys, shared_heads: int) -> int:
    """Keys that sparse attention keeps beside its own to choose by."""
    return keys.number("attention.indexer.key_length") if shared_heads else 0


def _state_width(keys: _Keys, index: int) -> int:
    """n_embd_r and n_embd_s of llama-hparams.cpp."""
    width = keys.header.embedding_length
    if keys.architecture.startswith(_RWKV):
        return keys.number("token_shift_count", 2) * width + width * keys.number("wkv.head_size", 1)
    if keys.has("shortconv.l_cache"):
        return width * (keys.number("shortconv.l_cache") - 1)
    heads = keys.number("attention.head_count")
    taps = keys.number("ssm.conv_kernel", _DEFAULT_CONV) - 1
    if delta := keys.number("kda.head_dim"):
        return 3 * taps * heads * delta + delta * delta * heads
    inner, state = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    if not inner:  # linear attention: a square a head
        return heads * keys.head_width("key") ** 2
    convolved = inner + 2 * keys.per_layer("ssm.group_count", 0)[index] * state
    return taps * convolved + state * inner


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
