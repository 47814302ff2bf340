"""What the caches of mlx-lm's models can: be cut back, shared, computed in rows, written out.

A cache is one layer's; a sequence has a list of them. Arrays of MLX never change: what looks like an
assignment puts another array in the object's place, and does it where the old one lay if nobody else has it.
So a copy of the object costs nothing, and the two part where one of them is written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from stoker.backends.mlx.native import Array
from stoker.errors import UnsupportedError
from stoker.ipc.model import ModelClass

Cache: TypeAlias = Any
"""A layer's cache, of one of the classes of `mlx_lm.models.cache`."""

GROUP_SIZES = (64, 32)
"""Numbers of a key or value that share a scale where they are quantised: the first that divides them."""
_GROWING = (KVCache, QuantizedKVCache)


def new_caches(network: Any) -> list[Cache]:
    """Those of a sequence without tokens, as the model has them."""
    return list(make_prompt_cache(network))


def quantised(caches: Sequence[Cache], bits: int, widths: Iterable[int]) -> list[Cache]:
    """The same with keys and values of `bits` bits wherever they are kept for good.

    Args:
        caches: of a sequence without tokens.
        bits: 4 or 8.
        widths: of all keys and values of a head.

    Raises:
        UnsupportedError: no layer has such, or a width that no group divides.
    """
    if not any(type(cache) is KVCache for cache in caches):
        kinds = ", ".join(sorted({type(cache).__name__ for cache in caches}))
        raise UnsupportedError(f"cells of {bits} bits are not known for a model whose layers have {kinds}")
    group = next((size for size in GROUP_SIZES if all(width % size == 0 for width in widths)), None)
    if group is None:
        raise UnsupportedError(
            f"cells of {bits} bits need heads whose width is a multiple of {GROUP_SIZES[-1]}, those of this"
            f" model have {', '.join(map(str, sorted(set(widths))))}"
        )
    return [
        QuantizedKVCache(group_size=group, bits=bits) if type(cache) is KVCache else cache for cache in caches
    ]


def keeps_every_token(caches: Iterable[Cache]) -> bool:
    """Whether any prefix of a sequence can be had back."""
    return all(type(leaf) in _GROWING for leaf in _leaves(caches))


def model_class(caches: Sequence[Cache]) -> ModelClass:
    """Of a model that has these."""
    states = [isinstance(cache, ArraysCache) for cache in _leaves(caches)]
    if all(states):
        return ModelClass.RECURRENT
    return ModelClass.HYBRID if any(states) else ModelClass.DECODER


def can_be_rows(caches: Sequence[Cache]) -> bool:
    """Whether several sequences can be computed in one pass."""
    kinds = {KVCache, QuantizedKVCache, RotatingKVCache, ArraysCache}
    return all(type(cache) in kinds and not getattr(cache, "keep", 0) for cache in caches)


def arrays(caches: Iterable[Cache]) -> list[Array]:
    """All arrays that they hold."""
    return [array for cache in caches for _, array in named(cache.state) if is_array(array)]


def size_bytes(caches: Iterable[Cache]) -> int:
    """Bytes that they hold."""
    return sum(int(array.nbytes) for array in arrays(caches))


def forked(caches: Sequence[Cache], length: int) -> list[Cache]:
    """Caches that share the first `length` tokens; only where every token is kept."""
    found = shared(caches)
    cut(found, length)
    return found


def shared(caches: Sequence[Cache]) -> list[Cache]:
    """Caches that hold the same."""
    return [type(cache).from_state(_mapped(cache.state, copy.copy)) for cache in caches]


def trimmed(caches: Sequence[Cache]) -> list[Cache]:
    """The same without the room that keys and values have for tokens to come."""
    return [
        _without_room(cache) if type(cache) in _GROWING and cache.keys is not None else cache
        for cache in caches
    ]


def _without_room(cache: Cache) -> Cache:
    def cut_off(part: Array) -> Array:
        return part[..., : cache.offset, :]

    return type(cache).from_state(_mapped(cache.state, cut_off))


def compacted(caches: Sequence[Cache]) -> list[Cache]:
    """The same in arrays that hold nothing beside."""
    return [type(cache).from_state(_mapped(cache.state, mx.contiguous)) for cache in caches]


def cut(caches: Sequence[Cache], length: int) -> None:
    """Keep the first `length` tokens."""
    for cache in caches:
        if type(cache) is CacheList:
            cut(cache.caches, length)
        else:
            cache.trim(cache.offset - length)


def _leaves(caches: Iterable[Cache]) -> list[Cache]:
    return [
        leaf for cache in caches for leaf in (_leaves(cache.caches) if type(cache) is CacheList else [cache])
    ]


def _mapped(state: Any, change: Callable[[Array], Array]) -> Any:
    """A state with other arrays in their places."""
    if isinstance(state, list | tuple):
        return type(state)(_mapped(part, change) for part in state)
    return change(state) if is_array(state) else state


def named(state: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """All that a state holds, by where it stands in it: "1.0"."""
    if isinstance(state, list | tuple):
        for number, part in enumerate(state):
            yield from named(part, f"{name}.{number}" if name else str(number))
    else:
        yield name, state


def is_array(value: Any) -> bool:
    """Whether a part of a state is one."""
    return hasattr(value, "nbytes") and hasattr(value, "dtype")
