"""Whether the config of a plain transformer and its tensors say the same (SPEC R1).

Plain is what projects queries, keys and values by one matrix each, with heads of one width: there the numbers
of the config give every shape, so that what a load would refuse is refused by the headers. Of other families
only what holds of all is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.models.folders.config import FolderConfig
    from stoker.models.folders.folder import ModelFolder
    from stoker.models.folders.tensors import FolderTensor

_OWN_WIDTH = frozenset({"gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen3"})
"""Plain families whose heads are as wide as `head_dim` says, where it does."""
_SHARED_WIDTH = frozenset({"qwen2"})
"""Plain families whose heads share `hidden_size`, whatever `head_dim` says."""
_ALWAYS_TIED = frozenset({"gemma", "gemma2", "gemma3_text"})
"""They compute with `lm_head` where there is one and with the embeddings where not."""
_MOST_HEADS = 1 << 16


def check_quantisation(folder: ModelFolder) -> None:
    """Raises ModelFileError where MLX's own `quantization` is said of weights that are numbers."""
    has_scales = any(name.endswith(".scales") for name in folder.tensors)
    if folder.settings.document.get("quantization") and folder.quantisation is not None and not has_scales:
        text = f"quantization says {folder.quantisation.label}, and no tensor has scales"
        raise folder.settings.broken(f"{text}: its weights are not quantised")


def check_plain(folder: ModelFolder, layers: Mapping[int, Mapping[str, FolderTensor]]) -> None:
    """Raises ModelFileError where the shapes of a plain family are not those of its config.

    Args:
        folder: of any family.
        layers: its tensors by the numbers of their layers and their names there.
    """
    config = folder.settings
    if config.model_type not in _OWN_WIDTH | _SHARED_WIDTH:
        return
    if len(layers) != config.num_layers:
        raise config.broken(
            f"num_hidden_layers is {config.num_layers}, the tensors are of {len(layers)} layers"
        )
    is_tied = config.model_type in _ALWAYS_TIED or config.text.get("tie_word_embeddings", True)
    if not is_tied and not any(name.endswith("lm_head.weight") for name in folder.tensors):
        raise config.broken("tie_word_embeddings is not true, and there is no lm_head.weight")
    expected = _rows(config)
    for number, tensors in layers.items():
        for name, rows in expected.items():
            tensor = tensors.get(name)
            if tensor is not None and tensor.shape and tensor.shape[0] != rows:
                text = f"{name} of layer {number} has {tensor.shape[0]} rows"
                raise config.broken(f"{text}; by {_NAMED[name]} they are {rows}")


_HEADS = "num_attention_heads, head_dim and hidden_size"
_NAMED = {
    "self_attn.q_proj.weight": _HEADS,
    "self_attn.k_proj.weight": f"num_key_value_heads, {_HEADS}",
    "self_attn.v_proj.weight": f"num_key_value_heads, {_HEADS}",
    "mlp.gate_proj.weight": "intermediate_size",
}


def _rows(config: FolderConfig) -> dict[str, int]:
    """Rows of the matrices of every layer."""
    heads = config.whole("num_attention_heads", high=_MOST_HEADS)
    shared = config.optional("num_key_value_heads", low=1, high=_MOST_HEADS) or heads
    own = config.optional("head_dim", low=1) if config.model_type in _OWN_WIDTH else None
    if own is None and config.width % heads:
        raise config.broken(f"num_attention_heads is {heads}, which does not divide {config.width} columns")
    width = own or config.width // heads
    sizes = (heads * width, shared * width, shared * width, config.whole("intermediate_size"))
    return dict(zip(_NAMED, sizes, strict=True))
