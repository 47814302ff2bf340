"""The tensors of safetensors files, by their headers alone; nothing native reads the file.

A header is checked as the format's own library does: every byte of the file belongs to exactly one tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.models.folders.json_file import broken, parse_object, regular_size

if TYPE_CHECKING:
    from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
"""As the format has it."""
MAX_DIMS = 8
MAX_TENSORS = 500_000
_MAX_ELEMENTS = 2**63 - 1
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64"), 64),
}


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """One tensor of a file.

    Attributes:
        dtype: as safetensors names it, such as "BF16".
        shape: elements along each dimension, slowest first.
        size_bytes: bytes it takes in the file.
        file: name of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str


def read_tensors(path: Path) -> dict[str, FolderTensor]:
    """The tensors of one safetensors file by name, in the order of their bytes.

    Raises:
        ModelFileError: missing, truncated, corrupt or something else than safetensors.
    """
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            room = size - _LENGTH_BYTES
            if room < 0 or not 0 < length <= min(room, MAX_HEADER_BYTES):
                text = f"no safetensors file: its header claims {length} bytes of a file of {size}"
                raise broken(path, text)
            data = file.read(length)
    except OSError as error:
        raise broken(path, f"cannot be read: {error.strerror or error}") from error
    return _checked(path, parse_object(path, data, "its header"), room - length)


def _checked(path: Path, header: dict[str, Any], num_bytes: int) -> dict[str, FolderTensor]:
    header.pop(_METADATA, None)
    if not header:
        raise broken(path, "it holds no tensors")
    if len(header) > MAX_TENSORS:
        raise broken(path, f"it claims {len(header)} tensors, at most {MAX_TENSORS} are taken")
    placed = [_tensor(path, name, entry) for name, entry in header.items()]
    placed.sort(key=lambda each: each[:2])
    end = 0
    for begin, next_end, name, _ in placed:
        if begin != end:
            raise broken(path, f"the tensor {name[:64]!r} begins at byte {begin} of the data, not at {end}")
        end = next_end
    if end != num_bytes:
        kind = "truncated" if end > num_bytes else "too long"
        raise broken(path, f"{kind}: its tensors have {end} bytes, the file holds {num_bytes} of them")
    return {name: tensor for _, _, name, tensor in placed}


def _tensor(path: Path, name: str, entry: Any) -> tuple[int, int, str, FolderTensor]:
    shown = repr(name[:64])
    if not isinstance(entry, dict):
        raise broken(path, f"the tensor {shown} has no description")
    dtype = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise broken(path, f"the tensor {shown} is of the unknown type {str(dtype)[:32]!r}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or math.prod(shape) > _MAX_ELEMENTS:
        raise broken(path, f"the tensor {shown} has the shape {str(shape)[:64]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:  # noqa: PLR2004 - two ends
        raise broken(path, f"the tensor {shown} lies at {str(offsets)[:64]}")
    begin, end = offsets
    size_bytes = math.prod(shape) * _BITS[dtype] // 8
    if end - begin != size_bytes:
        raise broken(path, f"the tensor {shown} is of {size_bytes} bytes, {end - begin} are its own")
    return begin, end, name, FolderTensor(dtype, tuple(shape), size_bytes, path.name)


def _are_sizes(values: Any) -> bool:
    """Whether it is a list of whole numbers from 0 on."""
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )
