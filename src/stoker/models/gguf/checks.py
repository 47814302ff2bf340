"""Whether the hyperparameters of a GGUF header make sense, also with the tensor shapes (SPEC R1).

The native loader asserts (and so ends the process) on much of this, and the graph of a recurrent model
divides by its state sizes; what passes here must not make it abort. Errors name the key.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.ipc.model import ModelClass
from stoker.models.gguf.bounded_file import GgufArray
from stoker.models.gguf.tensor_types import NOT_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker.models.gguf.bounded_file import BoundedFile, Scalar
    from stoker.models.gguf.header import TensorInfo


MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The keys `ARCHITECTURE.*` of a file."""

    file: BoundedFile
    architecture: str
    metadata: Mapping[str, Scalar | GgufArray]

    def key(self, name: str) -> str:
        """The full name of a key of this architecture."""
        return f"{self.architecture}.{name}"

    def get(self, name: str) -> Scalar | GgufArray | None:
        """The value as it stands in the file, None if the key is missing."""
        return self.metadata.get(self.key(name))

    def whole(self, name: str, low: int, high: int) -> int:
        """A required integer within bounds."""
        value = self.get(name)
        if value is None:
            raise self.file.broken(f"the required key {self.key(name)} is missing")
        return self._within(name, value, low, high)

    def optional(self, name: str, low: int, high: int) -> int | None:
        """An integer within bounds, if the key is there."""
        value = self.get(name)
        return None if value is None else self._within(name, value, low, high)

    def per_layer(self, name: str, block_count: int, high: int) -> list[int]:
        """One integer a layer (or one for all, in a list of one); empty if the key is missing."""
        value = self.get(name)
        if not isinstance(value, GgufArray):
            return [] if value is None else [self._within(name, value, 0, high)]
        if value.length != block_count or value.values is None:
            raise self.file.broken(f"{self.key(name)} has {value.length} values for {block_count} layers")
        return [self._within(name, each, 0, high) for each in value.values]

    def _within(self, name: str, value: Scalar | GgufArray, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.file.broken(f"{self.key(name)} is not an integer")
        if not low <= value <= high:
            raise self.file.broken(f"{self.key(name)} is {value}, {low} to {high} is possible")
        return value


# llama-hparams.h: LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
_MAX_LAYERS = 512
_MAX_EXPERTS = 1024
_MAX_CONTEXT = 2**31 - 1
_MAX_HEADS = 1 << 16
_MAX_POOLING = 4
_ROPE_SCALINGS = frozenset({"none", "linear", "yarn", "longrope"})
_POSITIVE_IF_PRESENT = (
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
    "wkv.head_size",
    "shortconv.l_cache",
    "attention.key_length",
    "attention.value_length",
)
_POSITIVE_FLOATS = (
    "rope.freq_base",
    "rope.freq_base_swa",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.group_norm_epsilon",
)
_BLOCK = re.compile(r"blk\.(\d+)\.")
_PRODUCT = re.compile(r"(token_embd|output|blk\.\d+\.(attn|ffn)_[a-z_]+)\.weight")


@dataclass(frozen=True, slots=True)
class Limits:
    """The three numbers every model has."""

    context_length: int
    embedding_length: int
    block_count: int


def architecture(file: BoundedFile, metadata: Mapping[str, Scalar | GgufArray]) -> str:
    """The file's `general.architecture`."""
    value = metadata.get("general.architecture")
    if not isinstance(value, str) or not value:
        raise file.broken("the required key general.architecture is missing")
    return value


def check(
    file: BoundedFile,
    architecture: str,
    model_class: ModelClass,
    metadata: Mapping[str, Scalar | GgufArray],
    tensors: Sequence[TensorInfo],
) -> Limits:
    """Check everything but the vocabulary.

    Raises:
        ModelFileError: names the file, the key or tensor, and both numbers.
    """
    values = Hyperparameters(file, architecture, metadata)
    _check_finite(values)
    limits = Limits(
        context_length=values.whole("context_length", 1, _MAX_CONTEXT),
        embedding_length=values.whole("embedding_length", 1, MAX_WIDTH),
        block_count=values.whole("block_count", 1, _MAX_LAYERS),
    )
    for name in _POSITIVE_IF_PRESENT:
        values.optional(name, 1, MAX_WIDTH)
    values.optional("pooling_type", 0, _MAX_POOLING)
    _check_heads(values, model_class, limits)
    _check_feed_forward(values, model_class, limits)
    _check_experts(values, limits)
    _check_rope(values, limits)
    _check_tensors(values, limits, tensors)
    check_recurrent(values, limits.embedding_length, tensors)
    return limits


def _check_finite(values: Hyperparameters) -> None:
    for key, value in values.metadata.items():
        numbers = value.values or () if isinstance(value, GgufArray) else (value,)
        if key.startswith(values.key("")) and not all(
            math.isfinite(number) for number in numbers if isinstance(number, float)
        ):
            raise values.file.broken(f"{key[:64]} is not a finite number")
    for name in _POSITIVE_FLOATS:
        found = values.get(name)
        if found is not None and not (isinstance(found, float) and found > 0):
            raise values.file.broken(f"{values.key(name)} is {found!r}, a number above 0 is possible")


def _check_heads(values: Hyperparameters, model_class: ModelClass, limits: Limits) -> None:
    heads = values.per_layer("attention.head_count", limits.block_count, _MAX_HEADS)
    shared = values.per_layer("attention.head_count_kv", limits.block_count, _MAX_HEADS)
    if model_class in {ModelClass.RECURRENT, ModelClass.HYBRID}:
        return
    if not heads or not any(heads):
        raise values.file.broken(f"{values.key('attention.head_count')} is missing or 0")
    if len(heads) == 1 and values.get("attention.key_length") is None and limits.embedding_length % heads[0]:
        raise values.file.broken(
            f"{values.key('attention.head_count')} is {heads[0]},"
            f" which does not divide the embedding length {limits.embedding_length}"
        )
    for own, common in zip(_spread(heads, limits), _spread(shared or heads, limits), strict=True):
        if own and (common == 0 or own % common) and len(shared) <= 1:
            raise values.file.broken(
                f"{values.key('attention.head_count_kv')} is {common}, which does not divide {own} heads"
            )


def _spread(values: list[int], limits: Limits) -> list[int]:
    return values * limits.block_count if len(values) == 1 else values


def _check_feed_forward(values: Hyperparameters, model_class: ModelClass, limits: Limits) -> None:
    widths = values.per_layer("feed_forward_length", limits.block_count, MAX_WIDTH * 4)
    if model_class is ModelClass.DECODER and not values.get("expert_count") and widths and not any(widths):
        raise values.file.broken(f"{values.key('feed_forward_length')} is 0")


def _check_experts(values: Hyperparameters, limits: Limits) -> None:
    count = values.optional("expert_count", 0, _MAX_EXPERTS) or 0
    used = max(values.per_layer("expert_used_count", limits.block_count, _MAX_EXPERTS), default=0)
    groups = values.optional("expert_group_count", 0, _MAX_EXPERTS) or 0
    groups_used = values.optional("expert_group_used_count", 0, _MAX_EXPERTS) or 0
    if count == 0 and (used or groups):
        raise values.file.broken(
            f"{used} experts in {groups} groups are used, {values.key('expert_count')} is 0"
        )
    if count and (not 1 <= used <= count or groups >= max(count, 2)):
        raise values.file.broken(
            f"{used} of {count} experts in {groups} groups are used, which is impossible"
        )
    if groups > 1 and (count % groups or not 1 <= groups_used < groups):
        raise values.file.broken(
            f"{groups_used} of {groups} groups of {count} experts are used, which is impossible"
        )
    values.optional("nextn_predict_layers", 0, limits.block_count)


def _check_rope(values: Hyperparameters, limits: Limits) -> None:
    for name in ("rope.dimension_count", "rope.dimension_count_swa"):
        dimensions = values.optional(name, 0, limits.embedding_length * 4)
        if dimensions is not None and dimensions % 2:
            raise values.file.broken(f"{values.key(name)} is {dimensions}, an even number is possible")
    scaling = values.get("rope.scaling.type")
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        raise values.file.broken(f"{values.key('rope.scaling.type')} is {str(scaling)[:64]!r}")


def _check_tensors(values: Hyperparameters, limits: Limits, tensors: Sequence[TensorInfo]) -> None:
    blocks: set[int] = set()
    for tensor in tensors:
        match = _BLOCK.match(tensor.name)
        if match:
            blocks.add(int(match[1]))
        if tensor.type_name in NOT_WEIGHTS and _PRODUCT.fullmatch(tensor.name):
            raise values.file.broken(f"the weights {tensor.name!r} are of type {tensor.type_name}")
        if (
            len(tensor.shape) == 1
            and tensor.type_name != "F32"
            and tensor.name.endswith((".weight", ".bias"))
        ):
            raise values.file.broken(f"the vector {tensor.name!r} is of type {tensor.type_name}, not F32")
        if tensor.name == "token_embd.weight" and tensor.shape[0] != limits.embedding_length:
            raise values.file.broken(
                f"token_embd.weight has rows of {tensor.shape[0]}, not of {limits.embedding_length}"
            )
    # The last layers may be draft heads that a converter left out.
    needed = limits.block_count - (values.optional("nextn_predict_layers", 0, limits.block_count) or 0)
    expected = set(range(limits.block_count))
    if blocks and (not set(range(needed)) <= blocks or not blocks <= expected):
        raise values.file.broken(
            f"{values.key('block_count')} is {limits.block_count}, the tensors are of {len(blocks)} layers"
            f" up to {max(blocks)}"
        )


_PURE_RWKV = frozenset({"rwkv6", "rwkv7"})
_QWEN_RWKV = frozenset({"rwkv6qwen2", "arwkv7"})
_MAMBA = frozenset({"mamba", "mamba2"})
_MAMBA_SIZES = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
_MAX_RECURRENT_HEADS = 1 << 16


def check_recurrent(values: Hyperparameters, embedding_length: int, tensors: Sequence[TensorInfo]) -> None:
    """Check RWKV's and Mamba's keys; other architectures pass.

    Raises:
        ModelFileError: names the key and the numbers.
    """
    if values.architecture in _MAMBA:
        for name in _MAMBA_SIZES:
            values.whole(name, 1, MAX_WIDTH)
    if values.architecture == "mamba2":
        _check_mamba_heads(values)
    if values.architecture in _PURE_RWKV | _QWEN_RWKV:
        _check_rwkv_heads(values, embedding_length)
        _check_token_shift(values)
    if values.architecture == "rwkv6":
        _check_mixing(values, tensors)


def _check_mamba_heads(values: Hyperparameters) -> None:
    inner = values.whole("ssm.inner_size", 1, MAX_WIDTH)
    for name in ("ssm.time_step_rank", "ssm.group_count"):
        if inner % values.whole(name, 1, MAX_WIDTH):
            raise values.file.broken(f"{values.key(name)} does not divide the inner size {inner}")


def _check_rwkv_heads(values: Hyperparameters, embedding_length: int) -> None:
    head_size = values.whole("wkv.head_size", 1, embedding_length)
    heads, rest = divmod(embedding_length, head_size)
    if rest:
        raise values.file.broken(
            f"{values.key('wkv.head_size')} is {head_size},"
            f" which does not divide the embedding length {embedding_length}"
        )
    own = values.optional("attention.head_count", 0, _MAX_RECURRENT_HEADS) or 0
    shared = values.optional("attention.head_count_kv", 0, _MAX_RECURRENT_HEADS)
    shared = own if shared is None else shared
    is_possible = (
        shared in {0, heads} if values.architecture in _PURE_RWKV else not shared or heads % shared == 0
    )
    if not is_possible:
        raise values.file.broken(
            f"{values.key('attention.head_count')} is {shared}, the state has {heads} heads"
        )


def _check_token_shift(values: Hyperparameters) -> None:
    default, needed = 2, 2 if values.architecture in _PURE_RWKV else 1
    found = values.optional("token_shift_count", 0, MAX_WIDTH)
    found = default if found is None else found
    if found != needed:
        raise values.file.broken(f"{values.key('token_shift_count')} is {found}, it has to be {needed}")


def _check_mixing(values: Hyperparameters, tensors: Sequence[TensorInfo]) -> None:
    names = {tensor.name for tensor in tensors}
    for layer in range(values.whole("block_count", 1, MAX_WIDTH)):
        stem = f"blk.{layer}.time_mix_lerp_"
        if f"{stem}fused.weight" not in names and f"{stem}w.weight" not in names:
            raise values.file.broken(f"the tensor {stem}fused.weight is missing")
