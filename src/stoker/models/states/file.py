"""A recurrent model's state as a safetensors file: what is written and what is believed (SPEC K5).

Owns the format; `store` knows where such files lie. The client writes and checks them without numpy; only
`parse_state`, which the engine calls, computes.

The file is that of the safetensors library, which reads and checks it here: eight bytes of length, a JSON
header, the tensors' bytes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from stoker.errors import InvalidRequestError
from stoker.ipc.usage import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Layout: TypeAlias = "Sequence[tuple[str, tuple[int, ...]]]"

MAX_STATE_BYTES = 128 * 1024**2
"""Half of what one message to the engine may be; a model of 14 billion parameters needs 70 MB."""
MAX_HEADER_BYTES = 1024**2
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_PARAM = "state"
_FLOAT_TYPES = ("F32", "F16", "BF16")


def dump_state(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """The tensors as a safetensors file of float32 with `metadata` in its header."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for tensor in tensors:
        begin, end = end, end + len(tensor.data)
        header[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (begin, end)}
    return b"".join((_framed(header), *(tensor.data for tensor in tensors)))


def with_metadata(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """The same file with other metadata. Raises InvalidRequestError."""
    header, begin = read_header(data)
    header[METADATA] = dict(metadata)
    return _framed(header) + data[begin:]


def read_header(data: bytes) -> tuple[dict[str, Any], int]:
    """The JSON header, unchecked but for its form, and where the tensors' bytes begin.

    `data` may end with the header. Raises InvalidRequestError.
    """
    if len(data) < _LENGTH.size:
        raise _bad(f"{len(data)} bytes are no safetensors file")
    (size,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + size
    if size > MAX_HEADER_BYTES or end > len(data):
        raise _bad(f"{len(data)} bytes are no safetensors file: its header would have {size}")
    try:
        return msgspec.json.decode(data[_LENGTH.size : end], type=dict[str, Any]), end
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the header of the safetensors file is no JSON object: {error}") from None


def check_state(data: bytes) -> None:
    """Whether this is a sound safetensors file that may hold a state.

    Raises:
        InvalidRequestError: it is damaged, too large, empty or holds other numbers than floats.
    """
    _tensors(data)


def parse_state(data: bytes, layout: Layout) -> list[Tensor]:
    """The state in `data` as float32, in the order of `layout` (`Capabilities.state_layout`).

    Raises:
        InvalidRequestError: it is damaged, a tensor is missing, foreign or of another shape or type, or a
            number is not finite; `param` is `state`.
    """
    found = _tensors(data)
    wanted = dict(layout)
    for kind, names in (
        ("lacks the", wanted.keys() - found.keys()),
        ("has the foreign", found.keys() - wanted.keys()),
    ):
        if names:
            raise _bad(
                f"the state {kind} tensor {min(names)[:80]!r}: it has {len(found)} tensors,"
                f" the model's state {len(wanted)}"
            )
    return [_converted(name, shape, found[name]) for name, shape in layout]


def _tensors(data: bytes) -> dict[str, dict[str, Any]]:
    if len(data) > MAX_STATE_BYTES:
        raise _bad(f"a state of {len(data)} bytes is over the limit of {MAX_STATE_BYTES}")
    import safetensors  # noqa: PLC0415 - most programs have no states

    read_header(data)  # a bounded one
    try:
        pairs = safetensors.deserialize(bytes(data))  # type: ignore[no-untyped-call] # it has no annotations
    except safetensors.SafetensorError as error:
        raise _bad(f"the {len(data)} bytes of the state are no sound safetensors file: {error}") from None
    found: dict[str, dict[str, Any]] = dict(pairs)
    if not found:
        raise _bad("the state holds no tensor")
    for name, tensor in found.items():
        if tensor["dtype"] not in _FLOAT_TYPES:
            raise _bad(
                f"the tensor {name[:80]!r} of the state is {tensor['dtype']};"
                f" {', '.join(_FLOAT_TYPES)} are taken"
            )
    return found


def _converted(name: str, shape: tuple[int, ...], tensor: dict[str, Any]) -> Tensor:
    import numpy as np  # noqa: PLC0415 - the client checks states and converts none

    if tuple(tensor["shape"]) != tuple(shape):
        raise _bad(
            f"the tensor {name!r} of the state has the shape {list(tensor['shape'])}, not {list(shape)}"
        )
    match tensor["dtype"]:
        case "F32":
            values = np.frombuffer(tensor["data"], "<f4")
        case "F16":
            values = np.frombuffer(tensor["data"], "<f2").astype("<f4")
        case _:  # the upper half of a float32
            values = (np.frombuffer(tensor["data"], "<u2").astype("<u4") << 16).view("<f4")
    if not np.isfinite(values).all():
        raise _bad(f"the tensor {name!r} of the state holds a number that is not finite")
    return Tensor(name, tuple(shape), values.tobytes())


def _framed(header: dict[str, Any]) -> bytes:
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=_PARAM)
