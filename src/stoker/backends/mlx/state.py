"""A sequence's state as bytes: a header that tells foreign or damaged ones apart, then safetensors.

The tensors are the sequence's tokens, the arrays of its caches and of those it began from, each as it lies in
memory, so what is imported goes on bit-exactly. Numbers that caches keep beside arrays are in the metadata.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from stoker.backends.mlx.caches import kinds
from stoker.backends.mlx.caches.kinds import Cache
from stoker.backends.mlx.native import Array
from stoker.backends.protocol.backend import Buffer, Placed
from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy.typing as npt

_MAGIC = b"STM1"
_HEADER = struct.Struct("<4s16sQI")
"""Magic, fingerprint, bytes and checksum of the payload."""
_RAW = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
_TYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "uint32": mx.uint32,
    "int32": mx.int32,
    "bfloat16": mx.bfloat16,
    "uint8": mx.uint8,
    "bool": mx.bool_,
}
"""Types of arrays by the names in the metadata: their bits stand in the tensors, as numpy lacks bfloat16."""
_PICTURE = re.compile(r"pictures\.\d+")
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """What was exported of a sequence.

    Attributes:
        tokens: that it held.
        caches: of them; none where it held none.
        start: from which it began; empty: as the model does.
        pictures: that it holds a part of: what is lost of it is computed again with their embeddings.
    """

    tokens: list[int]
    caches: list[Cache]
    start: list[Cache]
    pictures: list[Placed] = field(default_factory=list)


class StateFormat:
    """States of the sequences of one model.

    Args:
        fingerprint: sixteen bytes that differ wherever a state would not fit.
        make: caches of a sequence without tokens.
    """

    def __init__(self, fingerprint: bytes, make: Callable[[], list[Cache]]) -> None:
        self._fingerprint = fingerprint
        self._make = make

    def __repr__(self) -> str:
        return f"<StateFormat {self._fingerprint.hex()}>"

    def packed(self, state: HeldSequence) -> bytes:
        """The bytes of a state."""
        arrays = {"tokens": mx.array(state.tokens, dtype=mx.int32)}
        numbers: dict[str, int | float | str | None] = {}
        for part, caches in (("held", kinds.trimmed(state.caches)), ("start", state.start)):
            for number, cache in enumerate(caches):
                for name, value in kinds.named(cache.state, f"{part}.{number}"):
                    into: dict[str, Any] = arrays if kinds.is_array(value) else numbers
                    into[name] = value
        for number, placed in enumerate(state.pictures):
            arrays[f"pictures.{number}"] = mx.array(placed.embeddings)
            numbers[f"pictures.{number}"] = placed.start
        types = {name: _NAMES[array.dtype] for name, array in arrays.items()}
        described = {"numbers": numbers, "types": types}
        metadata = {name: msgspec.json.encode(value).decode() for name, value in described.items()}
        payload = save({name: _bits(array) for name, array in arrays.items()}, metadata=metadata)
        return _HEADER.pack(_MAGIC, self._fingerprint, len(payload), zlib.crc32(payload)) + payload

    def unpacked(self, data: Buffer) -> HeldSequence:
        """The state of bytes that this model, or one like it, has exported. Raises InvalidRequestError."""
        payload = self._checked(data)
        try:
            head = msgspec.json.decode(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
            numbers, types = (
                msgspec.json.decode(head["__metadata__"][each]) for each in ("numbers", "types")
            )
            tensors = {name: mx.array(bits).view(_TYPES[types[name]]) for name, bits in load(payload).items()}
            tokens = tensors.pop("tokens").tolist()
            pictures = [
                Placed(int(numbers[name]), np.array(tensors.pop(name)))
                for name in sorted((each for each in tensors if _PICTURE.match(each)), key=_number)
            ]
            held, start = self._caches("held", tensors, numbers), self._caches("start", tensors, numbers)
        except (
            SafetensorError,
            msgspec.DecodeError,
            KeyError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:
            raise InvalidRequestError(f"the state cannot be read: {error}", param="state") from error
        mx.eval(kinds.arrays(held), kinds.arrays(start))
        return HeldSequence(tokens, held, start, pictures)

    def _checked(self, data: Buffer) -> bytes:
        if len(data) < _HEADER.size or bytes(data[:4]) != _MAGIC:
            raise InvalidRequestError(f"{len(data)} bytes are not an exported state", param="state")
        _, fingerprint, size, checksum = _HEADER.unpack_from(data)
        if fingerprint != self._fingerprint:
            raise InvalidRequestError("the state was made by another model or build", param="state")
        payload = bytes(memoryview(data)[_HEADER.size :])
        if len(payload) != size or zlib.crc32(payload) != checksum:
            raise InvalidRequestError(
                f"the state is damaged: {len(payload)} of {size} bytes, or its checksum differs",
                param="state",
            )
        return payload

    def _caches(self, part: str, tensors: dict[str, Array], numbers: dict[str, Any]) -> list[Cache]:
        """A cache a layer, of the classes that this model has; none where the state has none."""
        leaves = {**tensors, **numbers}
        if not any(name.startswith(f"{part}.") for name in leaves):
            return []
        return [
            type(like).from_state(_nested(leaves, f"{part}.{number}"))
            for number, like in enumerate(self._make())
        ]


def _bits(array: Array) -> npt.NDArray[Any]:
    """An array's bits as whole numbers."""
    return np.asarray(mx.contiguous(array).view(_RAW[array.dtype.size]))


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


def _nested(leaves: dict[str, Any], name: str) -> Any:
    """What stands under a name: a leaf, or a list of what stands below."""
    if name in leaves:
        return leaves[name]
    found: list[Any] = []
    while any(each == f"{name}.{len(found)}" or each.startswith(f"{name}.{len(found)}.") for each in leaves):
        found.append(_nested(leaves, f"{name}.{len(found)}"))
    if not found:
        raise KeyError(name)
    return found
