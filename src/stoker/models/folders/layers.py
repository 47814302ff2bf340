"""What each layer of a folder's model keeps of the tokens it has seen, by tensors and config (SPEC R1).

Owns the numbers of MLX's caches: keys and values by layer (shared heads, latent attention, windows that
rotate) and the states of recurrent layers. Where a folder leaves room for doubt the larger number is taken.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.models.folders.agreement import check_plain, check_quantisation
from stoker.models.folders.config import MAX_LAYERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.models.folders.config import FolderConfig
    from stoker.models.folders.folder import ModelFolder
    from stoker.models.folders.tensors import FolderTensor

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.+)")
_OTHER_MODELS = re.compile(
    r"(^|\.)(vision|visual|audio|mtp|multi_modal|connector|image_newline|embed_vision)"
)
_EXPERTS = re.compile(r"\.(experts|switch_mlp|switch_glu)\.")
_FUSED = re.compile(r"(qkv_proj|query_key_value|Wqkv|wqkv|c_attn|qkv|query_key_value_proj)\.weight$")
_KEYS, _VALUES = re.compile(r"(^|\.)(k_proj|key)\.weight$"), re.compile(r"(^|\.)(v_proj|value)\.weight$")
_RECURRENT = re.compile(r"(A_log|a_lora|w_lora|conv1d|conv_1d|k_conv|q_conv|conv)\b")
_WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size")
_ROTATING = frozenset(
    {
        *("afmoe", "exaone_moe", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss", "laguna"),
        *("llama", "mellum", "ministral3", "mistral", "muse_glimmer", "muse_spark", "olmo3", "spark2_5"),
        "step3p5",
    }
)
"""Models whose `layer_types` decide which layers rotate; others keep every token whatever these say."""
_PATTERNS = {"gemma3": 6, "gemma3_text": 6, "cohere2": 4, "plamo3": 8, "llama4": 4, "llama4_text": 4}
"""One layer in so many sees everything, the last of them."""
_LATENT = frozenset(
    {"deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "kimi_linear", "longcat_flash", "mistral4"}
)
"""Models whose caches hold the compressed keys and values; others hold them for each head."""
_HEAD_STATES = ("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "head_dim")
_STATES = ("mamba_d_state", "ssm_state_size", "state_size", "linear_value_head_dim")
_DEFAULT_STATE = 128
_CONV_DIMS = 3
_EMBEDDINGS = ("embed_tokens.weight", "backbone.embeddings.weight", "wte.weight", "tok_embeddings.weight")
_MATRIX_DIMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLayer:
    """What one layer keeps.

    Attributes:
        width: numbers of keys and values that it holds of a token; 0: none.
        is_windowed: of the last tokens only.
        state_width: numbers of its recurrent state, a sequence; 0: it has none.
    """

    width: int = 0
    is_windowed: bool = False
    state_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLayers:
    """All layers of a model.

    Attributes:
        window: tokens that a windowed layer sees; 0: there is none.
        widest: numbers a token of the widest tensor inside of a layer.
        text_bytes: bytes of the tensors that are of the language model.
        has_experts: whether layers have experts.
    """

    each: tuple[FolderLayer, ...]
    window: int
    widest: int
    text_bytes: int
    has_experts: bool

    @property
    def keeps_every_token(self) -> bool:
        """Whether a sequence can go back to any shorter text."""
        return not any(layer.is_windowed or layer.state_width for layer in self.each)


def read_layers(folder: ModelFolder) -> FolderLayers:
    """Those of a folder. Raises ModelFileError where config and tensors say different things."""
    config, parts = folder.settings, _by_layer(folder)
    _check_embeddings(folder)
    count = config.num_layers
    if not parts:
        raise config.broken("the files of weights hold no layers of a language model")
    if not set(range(count)) <= set(parts):
        text = f"num_hidden_layers is {count}, the tensors are of {len(parts)} layers up to {max(parts)}"
        raise config.broken(text)
    check_quantisation(folder)
    check_plain(folder, parts)
    window = config.optional(*_WINDOWS, low=0, high=2**31 - 1) or 0
    windowed = _windowed(config, count) if window else frozenset()
    shared = count - (config.optional("num_kv_shared_layers", high=MAX_LAYERS) or 0)
    each = tuple(
        FolderLayer() if number >= shared else _layer(config, parts[number], is_windowed=number in windowed)
        for number in range(count)
    )
    texts = {name: each for name, each in folder.tensors.items() if not _OTHER_MODELS.search(name)}
    return FolderLayers(
        each=each,
        window=window if windowed else 0,
        widest=max((each.shape[-2] for each in texts.values() if len(each.shape) == _MATRIX_DIMS), default=0),
        text_bytes=sum(tensor.size_bytes for tensor in texts.values()),
        has_experts=any(_EXPERTS.search(name) for name in texts),
    )


def _check_embeddings(folder: ModelFolder) -> None:
    """Ids of tokens are looked up in them without a look at their number."""
    for name, tensor in folder.tensors.items():
        if name.endswith(_EMBEDDINGS) and not _OTHER_MODELS.search(name):
            rows, config = tensor.shape[0] if tensor.shape else 0, folder.settings
            is_plain = folder.quantisation is None and len(tensor.shape) == _MATRIX_DIMS
            if rows != config.n_vocab or (is_plain and tensor.shape[1] != config.width):
                text = f"{name} is {tensor.shape}, not ({config.n_vocab}, {config.width})"
                raise config.broken(f"{text} as vocab_size and hidden_size say")


def _by_layer(folder: ModelFolder) -> dict[int, dict[str, FolderTensor]]:
    found: dict[int, dict[str, FolderTensor]] = {}
    for name, tensor in folder.tensors.items():
        match = _LAYER.search(name)
        if match and not _OTHER_MODELS.search(name) and len(match[1]) <= len(str(MAX_LAYERS)):
            found.setdefault(int(match[1]), {})[match[2]] = tensor
    return found


def _windowed(config: FolderConfig, count: int) -> frozenset[int]:
    """Numbers of the layers whose caches rotate."""
    kind = config.model_type
    if kind in _ROTATING:
        named = config.texts("layer_types", count)
        return frozenset(number for number, each in enumerate(named) if each != "full_attention")
    if kind in _PATTERNS:
        pattern = config.optional("sliding_window_pattern", low=1, high=MAX_LAYERS) or _PATTERNS[kind]
        return frozenset(number for number in range(count) if (number + 1) % pattern)
    return frozenset()


def _layer(config: FolderConfig, tensors: Mapping[str, FolderTensor], *, is_windowed: bool) -> FolderLayer:
    if config.optional("kv_lora_rank"):
        if any("kv_a_proj" in name or "kv_b_proj" in name for name in tensors):
            return FolderLayer(width=_latent_width(config))
        return FolderLayer(state_width=_state_width(config, tensors))
    keys = next((name for name in tensors if _KEYS.search(name)), None)
    if keys is not None and not _is_linear(tensors, keys):
        values = next((tensor for name, tensor in tensors.items() if _VALUES.search(name)), tensors[keys])
        width = tensors[keys].shape[0] + values.shape[0]
        return FolderLayer(width=width, is_windowed=is_windowed, state_width=_state_width(config, tensors))
    if any(_FUSED.search(name) for name in tensors):
        heads = config.whole("num_attention_heads", "n_head", "num_heads")
        shared = config.optional("num_key_value_heads", "num_kv_heads", "n_head_kv", low=1) or heads
        width = 2 * shared * (config.optional("head_dim", low=1) or config.width // heads)
        return FolderLayer(width=width, is_windowed=is_windowed, state_width=_state_width(config, tensors))
    return FolderLayer(state_width=_state_width(config, tensors))


def _is_linear(tensors: Mapping[str, FolderTensor], keys: str) -> bool:
    """Whether the keys are those of linear attention, which keeps a state in place of them."""
    room = keys.rpartition(".")[0].rpartition(".")[0]
    return any(name.startswith(room) and _RECURRENT.search(name.removeprefix(room)) for name in tensors)


def _latent_width(config: FolderConfig) -> int:
    rank, rope = config.whole("kv_lora_rank"), config.optional("qk_rope_head_dim") or 0
    if config.model_type in _LATENT:
        index = config.optional("index_head_dim") or 0
        return rank + rope + 2 * index
    heads = config.whole("num_attention_heads")
    return heads * ((config.optional("qk_nope_head_dim") or 0) + rope + (config.optional("v_head_dim") or 0))


def _state_width(config: FolderConfig, tensors: Mapping[str, FolderTensor]) -> int:
    """Numbers of a layer's state, a sequence: what its convolution still looks at, and what it sums up."""
    found = 0
    for name, tensor in tensors.items():
        shape = tensor.shape
        if "conv" in name and len(shape) == _CONV_DIMS and name.endswith("weight"):
            found += shape[0] * max(1, max(shape[1:]) - 1)
        elif name.endswith("A_log") and len(shape) == _MATRIX_DIMS and min(shape) > 1:
            found += math.prod(shape)
        elif name.endswith("A_log"):
            heads = math.prod(shape)
            head = config.optional(*_HEAD_STATES, low=1) or _DEFAULT_STATE
            found += heads * head * (config.optional(*_STATES, low=1) or _DEFAULT_STATE)
        elif name.endswith("a_lora.lora.0.weight"):
            found += config.width * ((config.optional("head_dim", low=1) or _DEFAULT_STATE) + 2)
    if found and any("rg_lru" in name for name in tensors):
        found += config.optional("lru_width", low=1) or config.width
    return found
