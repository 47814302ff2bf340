"""The weights of a model and the passes over them: a folder as one of mlx-lm's networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import get_total_parameters, load_model

from stoker.backends.mlx.adapted import Adapted
from stoker.backends.mlx.caches import kinds
from stoker.backends.mlx.head import OutputHead
from stoker.backends.mlx.native import Array
from stoker.backends.mlx.vision.networks import network_classes
from stoker.errors import InsufficientMemoryError, ModelLoadError, UnsupportedError
from stoker.ipc.model import ModelClass
from stoker.ipc.usage import Tensor
from stoker.models.folders.folder import ModelFolder

if TYPE_CHECKING:
    from stoker.backends.mlx.caches.kinds import Cache
    from stoker.backends.mlx.sequences import Adapters
    from stoker.ipc.model import AdapterSpec

_KEY_BITS = {"q8_0": 8, "q4_0": 4}
"""Names of `ModelSpec.kv_type` that MLX has quantised keys for; it counts in groups of its own."""
_FLOATS = np.dtype("<f4")
_TRIED_TOKENS = 8
_MAX_REASON_CHARS = 300
_REFUSALS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)
"""What MLX and the classes of models raise where a config makes no sense to them."""


class Network:
    """One network with its adapters.

    Attributes:
        kv_type: of its keys and values, for people.
        layout: names and shapes of a recurrent model's state; empty: it has none.
        cell_bytes: that a token takes in caches.
        sequence_bytes: that a sequence takes beside that, however long it is.
        work_bytes: that a pass takes for each token beside what stays.
    """

    def __init__(self, module: Any, kv_type: str, adapters: Sequence[AdapterSpec]) -> None:
        self.num_params = int(get_total_parameters(module))
        self.weight_bytes = sum(int(array.nbytes) for array in _parameters(module))
        self._adapted = Adapted(module, adapters)
        self._head = OutputHead(module)
        self._module = module
        self._bits = _KEY_BITS.get(kv_type, 0)
        self._group_widths: tuple[int, ...] = ()
        self._measure()
        self._choose_keys(kv_type)

    def __repr__(self) -> str:
        return f"<Network of {self.num_params} parameters, keys in {self.kv_type}>"

    @property
    def adapted(self) -> Adapted:
        """Its adapters."""
        return self._adapted

    @property
    def model_class(self) -> ModelClass:
        """By its caches."""
        return kinds.model_class(self.new_caches())

    def new_caches(self) -> list[Cache]:
        """Those of a sequence without tokens."""
        caches = kinds.new_caches(self._module)
        return kinds.quantised(caches, self._bits, self._group_widths) if self._bits else caches

    def caches_of(self, tensors: Sequence[Tensor]) -> list[Cache]:
        """Caches of a sequence that begins from a recurrent state of `layout`."""
        assert tuple((tensor.name, tensor.shape) for tensor in tensors) == self.layout, "another layout"
        values = iter(tensors)
        caches = self.new_caches()
        for cache, types in zip(caches, self._types, strict=True):
            for number, dtype in enumerate(types):
                tensor = next(values)
                found = np.frombuffer(tensor.data, _FLOATS).reshape(1, *tensor.shape)
                cache[number] = mx.array(found).astype(dtype)
        mx.eval(kinds.arrays(caches))
        return caches

    def tensors_of(self, caches: Sequence[Cache]) -> list[Tensor]:
        """The recurrent state of caches; zeros where a sequence has not begun."""
        arrays = [array for cache in caches for array in cache.cache]
        return [
            Tensor(name, shape, np.zeros(shape, _FLOATS).tobytes() if array is None else _floats(array))
            for (name, shape), array in zip(self.layout, arrays, strict=True)
        ]

    def forward(
        self,
        tokens: Array,
        caches: list[Cache],
        rows: list[int],
        adapters: Adapters,
        embeddings: Array | None = None,
    ) -> Array | None:
        """The graph of a pass.

        Args:
            tokens: (sequences, count).
            caches: a layer's each, of those sequences.
            rows: tokens, counted over all of them, whose logits are wanted.
            adapters: of all of them.
            embeddings: (sequences, count, width), in place of those of the tokens.

        Returns:
            float32 (rows, n_vocab); None: no rows are wanted.
        """
        self._adapted.use(adapters)
        self._head.expect(rows)
        if embeddings is None:
            out = self._module(tokens, cache=caches)
        else:
            out = self._module(tokens, cache=caches, input_embeddings=embeddings.astype(self.dtype))
        return self._head.logits(out, rows) if rows else None

    def hidden(self) -> Tensor:
        """What went into the output matrix for the one row of the last pass. Raises UnsupportedError."""
        found = self._head.hidden
        if found is None:
            raise UnsupportedError("no hidden states are known of a network of this kind", param="hidden")
        return Tensor("hidden", (found.shape[1],), _floats(found))

    def close(self) -> None:
        """Free the weights; idempotent."""
        self._module = None

    def _measure(self) -> None:
        """Try a pass of a few tokens; finds what tokens and sequences take in memory."""
        caches = kinds.new_caches(self._module)
        tokens = mx.zeros((1, _TRIED_TOKENS), dtype=mx.int32)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        logits: Array = self.forward(tokens, caches, [_TRIED_TOKENS - 1], ())
        mx.eval(logits, kinds.arrays(caches))
        self.n_vocab = int(logits.shape[1])
        stays = before + kinds.size_bytes(caches)  # caches have room for many more tokens than these
        self.work_bytes = max(0, mx.get_peak_memory() - stays) // _TRIED_TOKENS
        held = kinds.trimmed(caches)
        self.dtype = kinds.arrays(held)[0].dtype
        growing = [cache for cache in held if kinds.keeps_every_token([cache])]
        self.cell_bytes = kinds.size_bytes(growing) // _TRIED_TOKENS
        self.sequence_bytes = sum(
            kinds.size_bytes([cache]) * getattr(cache, "max_size", _TRIED_TOKENS) // _TRIED_TOKENS
            if hasattr(cache, "max_size")
            else kinds.size_bytes([cache])
            for cache in held
            if not kinds.keeps_every_token([cache])
        )
        self._group_widths = tuple({array.shape[-1] for array in kinds.arrays(growing)})
        is_recurrent = kinds.model_class(caches) is ModelClass.RECURRENT
        self._types = [[part.dtype for part in cache.cache] for cache in caches] if is_recurrent else []
        self.layout = (
            tuple(
                (f"layers.{layer}.{name}", tuple(part.shape[1:]))
                for layer, cache in enumerate(caches)
                for name, part in zip(_names_of(cache.cache), cache.cache, strict=True)
            )
            if is_recurrent
            else ()
        )

    def _choose_keys(self, kv_type: str) -> None:
        own = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}.get(self.dtype, str(self.dtype))
        if kv_type and kv_type != own and not self._bits:
            known = ", ".join((own, *_KEY_BITS))
            raise UnsupportedError(
                f"cells of type {kv_type!r} are not known for this model on MLX; {known} are"
            )
        self.kv_type = kv_type or own
        if self._bits:
            quantised = kinds.quantised(kinds.new_caches(self._module), self._bits, self._group_widths)
            group, size = quantised[0].group_size, self.dtype.size
            per_number = self._bits / 8 + 2 * size / group
            self.cell_bytes = int(self.cell_bytes // size * per_number)


def _names_of(parts: Sequence[Array]) -> list[str]:
    """Names of what a recurrent layer keeps: "state", its largest array; the others hold its last inputs."""
    largest = max(range(len(parts)), key=lambda number: parts[number].size)
    return ["state" if number == largest else f"input{number}" for number in range(len(parts))]


def open_network(
    folder: ModelFolder, kv_type: str, adapters: Sequence[AdapterSpec], on_progress: Callable[[float], None]
) -> Network:
    """Load a folder's weights.

    Args:
        folder: sound.
        kv_type: as in `ModelSpec`.
        adapters: as in `ModelSpec`.
        on_progress: told the fraction loaded; what it raises ends the load.

    Raises:
        ModelLoadError: mlx-lm does not know the architecture, or the weights do not fit it.
        UnsupportedError: the folder brings code of its own, or is asked for what this network has not.
        InsufficientMemoryError: there is too little memory.
    """
    if "model_file" in folder.config:
        raise UnsupportedError(
            f"{folder.path.name} wants a Python file of its own to be run: no code of models is run"
        )
    name = folder.path.name
    on_progress(0.0)
    try:
        module, _ = load_model(folder.path, lazy=True, get_model_classes=network_classes)
        arrays = _parameters(module)
        total, done = sum(int(array.nbytes) for array in arrays) or 1, 0
        for array in arrays:
            mx.eval(array)
            done += int(array.nbytes)
            on_progress(done / total)
        return Network(module, kv_type, adapters)
    except MemoryError as error:
        raise InsufficientMemoryError(f"there is too little memory for {name}: {error}") from error
    except _REFUSALS as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        reason = reason[:_MAX_REASON_CHARS]
        raise ModelLoadError(f"MLX does not load {name} ({folder.architecture}): {reason}") from error


def _parameters(module: Any) -> list[Array]:
    from mlx.utils import tree_flatten  # noqa: PLC0415

    return [array for _, array in tree_flatten(module.parameters())]


def _floats(array: Array) -> bytes:
    return np.asarray(array.astype(mx.float32)).astype(_FLOATS).tobytes()
