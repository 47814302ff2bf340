"""Whether the state sizes of a recurrent model make sense (SPEC R1).

The native graph divides by them and asserts on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.models.gguf.hyperparameters import MAX_WIDTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.models.gguf.header import TensorInfo
    from stoker.models.gguf.hyperparameters import Hyperparameters

_PURE_RWKV = frozenset({"rwkv6", "rwkv7"})
_QWEN_RWKV = frozenset({"rwkv6qwen2", "arwkv7"})
_MAMBA = frozenset({"mamba", "mamba2"})
_MAMBA_SIZES = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
_MAX_HEADS = 1 << 16


def check(values: Hyperparameters, embedding_length: int, tensors: Sequence[TensorInfo]) -> None:
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
    own = values.optional("attention.head_count", 0, _MAX_HEADS) or 0
    shared = values.optional("attention.head_count_kv", 0, _MAX_HEADS)
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
