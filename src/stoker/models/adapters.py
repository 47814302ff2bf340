"""LoRA adapters: the header of an adapter's file, and whether it fits a model (SPEC K6).

Read with bounds and compared with the model's own tensor table before any native code sees the file. The
backend puts an adapter into a loaded model, the client chooses one for a request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import ModelFileError, UnsupportedError
from stoker.ipc.model import ModelClass
from stoker.models.gguf.header import read_tables
from stoker.models.gguf.tensor_types import NOT_WEIGHTS
from stoker.models.memory_estimate.layers import read_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.models.gguf.bounded_file import GgufArray, Scalar
    from stoker.models.gguf.header import GgufHeader, TensorInfo

_A, _B = ".lora_a", ".lora_b"
_IGNORED = "_norm.weight"  # llama.cpp passes over what some converters store of norms
_LOOKED_UP = "token_embd.weight"
"""Rows of it are looked up, so its factors are stored the other way round."""
_INVOCATION = "adapter.alora.invocation_tokens"


@dataclass(frozen=True, slots=True)
class Factors:
    """The two factors of what is added to one weight: W + scale * alpha / rank * B A."""

    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterHeader:
    """What an adapter's file says of itself.

    Attributes:
        path: the file.
        architecture: of the models it is made for.
        base_name: what it calls the model it was made from; may be empty.
        factors: by the name of the weight that they change.
        size_bytes: of all its tensors.
    """

    path: Path
    architecture: str
    base_name: str
    factors: Mapping[str, Factors] = field(repr=False)
    size_bytes: int

    @property
    def num_wide(self) -> int:
        """Numbers a token of the widest product that it adds to."""
        return max(each.b.shape[1] for each in self.factors.values())


def read_adapter(path: str | Path) -> AdapterHeader:
    """Read and check the header of a LoRA adapter.

    Raises:
        ModelFileError: missing, truncated, corrupt, or something else than an adapter.
        UnsupportedError: an adapter of a kind that is not served.
    """
    path = Path(path)
    metadata, tensors = read_tables(path)
    _check_kind(path, metadata)
    architecture, base_name = metadata.get("general.architecture"), metadata.get("general.basename", "")
    if not isinstance(architecture, str) or not architecture:
        raise _broken(path, "it does not say of what architecture its model is")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _broken(path, f"adapter.lora.alpha is {alpha!r}")
    return AdapterHeader(
        path=path,
        architecture=architecture,
        base_name=base_name if isinstance(base_name, str) else "",
        factors=_factors(path, tensors),
        size_bytes=sum(tensor.size_bytes for tensor in tensors),
    )


def check_fits(adapter: AdapterHeader, model: GgufHeader) -> None:
    """Raise where the adapter was made for another model, or the model cannot be adapted.

    Raises:
        ModelFileError: architecture, a name or a shape differs; names both files.
        UnsupportedError: the model cannot be adapted a request.
    """
    both = f"the adapter {adapter.path.name} does not fit {model.path.name}"
    if adapter.architecture != model.architecture:
        text = f"{both}: it was made for {adapter.architecture}, the model is {model.architecture}"
        raise ModelFileError(text, path=str(adapter.path))
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    for name, factors in adapter.factors.items():
        shape = shapes.get(name)
        if shape is None:
            raise ModelFileError(f"{both}: the model has no tensor {name!r}", path=str(adapter.path))
        needed = _needed_shapes(name, shape, factors)
        if needed != (factors.a.shape, factors.b.shape):
            text = f"{both}: its factors for {name!r} are {factors.a.shape} and {factors.b.shape}"
            raise ModelFileError(f"{text}, the weight is {shape}", path=str(adapter.path))
    if _LOOKED_UP in adapter.factors and "output.weight" not in shapes:
        # llama.cpp multiplies by the factors the wrong way round there, which ends the process
        raise UnsupportedError(
            f"{both}: it changes {_LOOKED_UP}, which is the model's output matrix as well", param="lora"
        )
    if model.model_class is not ModelClass.DECODER:
        kind = f"{model.path.name} is a model of class {model.model_class}"
        raise UnsupportedError(f"{kind} ({model.architecture}): only decoders are adapted", param="lora")
    if not read_layers(model).keeps_every_cell:
        text = "cannot go back to a shorter text, so a step of several adapters could not be taken back"
        raise UnsupportedError(f"{model.path.name} ({model.architecture}) {text}", param="lora")


def _needed_shapes(
    name: str, shape: tuple[int, ...], factors: Factors
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B, fastest dimension first, for a weight of that shape; experts one after the other."""
    rank, (inputs, outputs, *experts) = factors.b.shape[0], (*shape, 1)[: max(len(shape), 2)]
    if name == _LOOKED_UP:
        return (rank, outputs, *experts), (rank, inputs, *experts)
    return (inputs, rank, *experts), (rank, outputs, *experts)


def _check_kind(path: Path, metadata: Mapping[str, Scalar | GgufArray]) -> None:
    kind, adapter_type = metadata.get("general.type"), metadata.get("adapter.type")
    if kind != "adapter":
        raise _broken(path, f"it is no adapter but {str(kind or 'a model')[:40]!r}")
    if adapter_type != "lora":
        raise UnsupportedError(
            f"{path.name} is an adapter of type {str(adapter_type)[:40]!r}: only lora is served", param="lora"
        )
    if _INVOCATION in metadata:
        raise UnsupportedError(
            f"{path.name} is an adapter that works from certain tokens on (aLoRA), which is not served",
            param="lora",
        )


def _factors(path: Path, tensors: tuple[TensorInfo, ...]) -> dict[str, Factors]:
    sides: dict[str, dict[str, TensorInfo]] = {}
    for tensor in tensors:
        name, side = tensor.name[: -len(_A)], tensor.name[-len(_A) :]
        if side in {_A, _B}:
            sides.setdefault(name, {})[side] = tensor
        elif not tensor.name.endswith(_IGNORED):
            raise _broken(path, f"the tensor {tensor.name!r} is no factor of a LoRA")
        if tensor.type_name in NOT_WEIGHTS:
            raise _broken(path, f"the tensor {tensor.name!r} is of type {tensor.type_name}")
    found = {}
    for name, pair in sides.items():
        if len(pair) != len((_A, _B)):
            raise _broken(path, f"{name!r} has one factor, not two")
        a, b = pair[_A], pair[_B]
        if min(len(a.shape), len(b.shape)) < 2:  # noqa: PLR2004 - a matrix
            raise _broken(path, f"the factors of {name!r} are {a.shape} and {b.shape}, not matrices")
        found[name] = Factors(a, b)
    if not found:
        raise _broken(path, "it holds no factors")
    return found


def _broken(path: Path, reason: str) -> ModelFileError:
    return ModelFileError(f"{path}: not a LoRA adapter: {reason}", path=str(path))
