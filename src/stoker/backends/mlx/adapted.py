"""LoRA adapters in MLX's format beside a network's weights: which of them a pass is computed with (SPEC K6).

An adapter is a folder of adapter_config.json and adapters.safetensors, as mlx-lm writes them. The matrices
that any adapter adds to are replaced once; a pass then adds what it is told to, so sequences with different
adapters share the weights and are computed in passes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from stoker.backends.mlx.native import Array
from stoker.errors import ModelFileError, UnsupportedError
from stoker.models.fingerprint import fingerprint_of
from stoker.models.folders.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_folder_adapter

if TYPE_CHECKING:
    from stoker.backends.mlx.sequences import Adapters
    from stoker.ipc.model import AdapterSpec


@dataclass(frozen=True, slots=True)
class _Product:
    """What an adapter adds to a matrix: `scale` times inputs times `down` times `up`."""

    down: Array
    up: Array
    scale: float


class _AdaptedLinear(nn.Module):  # type: ignore[misc] # MLX has no types
    """A matrix with what adapters add to it."""

    def __init__(self, inner: Any, adapted: Adapted) -> None:
        super().__init__()
        self.inner = inner
        object.__setattr__(self, "_adapted", adapted)
        object.__setattr__(self, "products", _Products())

    def __call__(self, inputs: Array) -> Array:
        out = self.inner(inputs)
        for name, strength in self._adapted.in_use:
            product = self.products.by_adapter.get(name)
            if product is not None:
                added = (inputs @ product.down) @ product.up
                out = out + (strength * product.scale * added).astype(inputs.dtype)
        return out


class _Products:
    """Those of one matrix, by the adapter's name; apart from the parameters that MLX counts."""

    def __init__(self) -> None:
        self.by_adapter: dict[str, _Product] = {}


class Adapted:
    """The adapters of one network.

    Raises:
        ModelFileError: an adapter's folder is missing, damaged, or of another network.
        UnsupportedError: it is of a kind other than LoRA of matrices.
    """

    def __init__(self, module: Any, specs: Sequence[AdapterSpec]) -> None:
        self.in_use: Adapters = ()
        self.size_bytes = 0
        self.fingerprints: dict[str, str] = {}
        modules = dict(module.named_modules()) if specs else {}
        replaced: dict[str, _AdaptedLinear] = {}
        for spec in specs:
            for name, product in _products(spec, modules).items():
                if name not in replaced:
                    replaced[name] = _AdaptedLinear(modules[name], self)
                replaced[name].products.by_adapter[spec.name] = product
                self.size_bytes += int(product.down.nbytes + product.up.nbytes)
            self.fingerprints[spec.name] = fingerprint_of(
                [Path(spec.path) / ADAPTER_CONFIG, Path(spec.path) / ADAPTER_WEIGHTS]
            )
        if replaced:
            module.update_modules(tree_unflatten(list(replaced.items())))

    def __repr__(self) -> str:
        return f"<Adapted by {', '.join(self.fingerprints) or 'none'}>"

    def check(self, adapters: Adapters) -> None:
        """Raise UnsupportedError where one of these was not loaded."""
        unknown = sorted({name for name, _ in adapters} - self.fingerprints.keys())
        if unknown:
            raise UnsupportedError(f"the model has no adapter {', '.join(unknown)}", param="adapters")

    def use(self, adapters: Adapters) -> None:
        """Compute the next passes with these."""
        self.in_use = adapters


def _products(spec: AdapterSpec, modules: Mapping[str, Any]) -> dict[str, _Product]:
    """What an adapter adds, by the name of the matrix."""
    folder = Path(spec.path)
    scale = read_folder_adapter(folder).scale  # nothing native sees one that is damaged
    try:
        tensors = dict(mx.load(str(folder / ADAPTER_WEIGHTS)))
        mx.eval(list(tensors.values()))
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelFileError(
            f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}", path=str(folder)
        ) from error
    found = {}
    for name in sorted({name.rpartition(".")[0] for name in tensors}):
        inner = modules.get(name)
        if inner is None:
            raise ModelFileError(f"{folder.name} is of another model: there is no {name}", path=str(folder))
        if not isinstance(inner, nn.Linear | nn.QuantizedLinear):
            raise UnsupportedError(
                f"{folder.name} adapts {name}, a {type(inner).__name__}: matrices alone can be"
            )
        product = _Product(tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"], scale)
        _check_shapes(folder, name, inner, product)
        found[name] = product
    return found


def _check_shapes(folder: Path, name: str, inner: Any, product: _Product) -> None:
    out, into = inner.weight.shape
    if isinstance(inner, nn.QuantizedLinear):
        into = into * 32 // inner.bits
    shapes = (*product.down.shape, *product.up.shape)
    if len(shapes) != 4 or shapes[0] != into or shapes[3] != out or shapes[1] != shapes[2]:  # noqa: PLR2004
        raise ModelFileError(
            f"{folder.name} is of another model: {name} takes {into} numbers and gives {out}, the adapter"
            f" has {product.down.shape} and {product.up.shape}",
            path=str(folder),
        )
