"""LoRA adapters as mlx-lm writes them: a folder of adapter_config.json and adapters.safetensors (SPEC K6).

Read by their headers and compared with the model's tensors before anything native sees them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.errors import ModelFileError, UnsupportedError
from stoker.models.folders.json_file import broken, read_object
from stoker.models.folders.tensors import read_tensors
from stoker.models.folders.weights import refuse_unfinished

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stoker.models.folders.folder import ModelFolder

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapters.safetensors"
_OTHER_WEIGHTS = "adapter_model.safetensors"
_PARTS = ("lora_a", "lora_b")
_MATRIX_DIMS = 2


@dataclass(frozen=True, slots=True)
class FolderFactors:
    """The two factors of what is added to one matrix: scale times inputs times `down` times `up`.

    Attributes:
        down: (inputs, rank).
        up: (rank, outputs).
    """

    down: tuple[int, ...]
    up: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderAdapter:
    """What an adapter's folder says of itself.

    Attributes:
        path: the folder.
        scale: what its products are multiplied by.
        factors: by the name of the matrix that they change.
        size_bytes: of all its tensors.
    """

    path: Path
    scale: float
    factors: Mapping[str, FolderFactors] = field(repr=False)
    size_bytes: int

    @property
    def num_wide(self) -> int:
        """Numbers a token of the widest product that it adds to."""
        return max(each.up[1] for each in self.factors.values())


def read_folder_adapter(path: Path) -> FolderAdapter:
    """Read and check the folder of an adapter.

    Raises:
        ModelFileError: missing, unfinished, truncated, corrupt, or something else than an adapter.
        UnsupportedError: an adapter of a kind that is not served.
    """
    if not path.is_dir():
        raise broken(path, "no such folder of an adapter")
    refuse_unfinished(path)
    if not (path / ADAPTER_WEIGHTS).exists() and (path / _OTHER_WEIGHTS).exists():
        text = f"{path}: {_OTHER_WEIGHTS} is an adapter of PEFT's; mlx-lm's are taken ({ADAPTER_WEIGHTS})"
        raise UnsupportedError(text, param="lora")
    scale = _scale(path / ADAPTER_CONFIG)
    tensors = read_tensors(path / ADAPTER_WEIGHTS)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        matrix, _, part = name.rpartition(".")
        if part not in _PARTS:
            raise UnsupportedError(f"{path}: it changes {matrix[:64]} by {part[:64]}; only LoRA is added")
        shapes.setdefault(matrix, {})[part] = tensor.shape
    return FolderAdapter(
        path=path,
        scale=scale,
        factors={name: _factors(path, name, parts) for name, parts in shapes.items()},
        size_bytes=sum(tensor.size_bytes for tensor in tensors.values()),
    )


def check_fits_folder(adapter: FolderAdapter, model: ModelFolder) -> None:
    """Raise ModelFileError where the adapter was made for another model.

    mlx-lm calls some matrices otherwise than their files do: of those the load decides, unless it is all.
    """
    both = f"the adapter {adapter.path.name} does not fit {model.path.name}"
    bits = model.quantisation.bits if model.quantisation else 0
    num_known = 0
    for name, factors in adapter.factors.items():
        tensor = model.tensors.get(f"{name}.weight")
        if tensor is None:
            continue
        num_known += 1
        out, into = tensor.shape[0], tensor.shape[-1]
        if bits and tensor.dtype == "U32":
            into = into * 32 // bits
        if (factors.down[0], factors.up[1]) != (into, out):
            text = f"{both}: its factors for {name[:64]!r} are {factors.down} and {factors.up}"
            raise ModelFileError(f"{text}, the matrix is ({out}, {into})", path=str(adapter.path))
    if not num_known:
        name = next(iter(adapter.factors))
        raise ModelFileError(f"{both}: the model has no matrix {name[:64]!r}", path=str(adapter.path))


def _scale(path: Path) -> float:
    config = read_object(path)
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        text = f"{path}: it is an adapter of the kind {str(kind)[:64]!r}; only lora is added"
        raise UnsupportedError(text, param="lora")
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise broken(path, f"the scale of lora_parameters is {str(scale)[:64]}, a number is possible")
    return float(scale)


def _factors(path: Path, name: str, parts: Mapping[str, tuple[int, ...]]) -> FolderFactors:
    down, up = (parts.get(part, ()) for part in _PARTS)
    if len(down) != _MATRIX_DIMS or len(up) != _MATRIX_DIMS or down[1] != up[0] or not min(*down, *up):
        raise broken(path, f"its factors for {name[:64]!r} are {down} and {up}")
    return FolderFactors(down, up)
