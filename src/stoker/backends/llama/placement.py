"""Where llama.cpp puts a model: a placement as its parameters (SPEC R11).

Owns what those parameters point to, which has to live as long as the load. What fits where is
`models.memory_estimate`'s.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from stoker.backends.llama.binding import llama, native_device
from stoker.ipc.model import SplitMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stoker.backends.device import Device
    from stoker.ipc.model import PlacementSpec

_ALL_LAYERS = -1
_SPLIT_MODES = {SplitMode.NONE: 0, SplitMode.LAYER: 1, SplitMode.ROW: 2}  # enum llama_split_mode
_MAPPED_WHERE_IT_CAN, _READ_WHOLE = -1, 0  # enum llama_load_mode
_EXPERTS = r"blk\.({})\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_TIED = rb"^token_embd\.weight$"


class _BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class NativePlacement:
    """A placement on devices as fields of `llama_model_params`.

    Args:
        placement: concrete, or "auto" for all layers.
        devices: those it names, in its order; none: everything lies in host memory.
        device_of_tied: id of the one that has tied embeddings too; empty: none has.
    """

    def __init__(self, placement: PlacementSpec, devices: Sequence[Device], device_of_tied: str = "") -> None:
        self._placement = placement
        self._devices = tuple(devices)
        handles = [native_device(device) for device in self._devices]
        self._handles = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        self._parts = (ctypes.c_float * max(llama.llama_max_devices(), len(handles)))(*self._shares())
        self._overrides = (_BufferOverride * 2)(*self._moved(device_of_tied))

    def __repr__(self) -> str:
        return f"<NativePlacement {self._placement} on {[device.id for device in self._devices]}>"

    def apply(self, params: Any) -> None:
        """Fill them in; this object has to live until the model is loaded."""
        placement = self._placement
        count = placement.gpu_layers if isinstance(placement.gpu_layers, int) else _ALL_LAYERS
        params.devices = ctypes.cast(self._handles, ctypes.c_void_p)
        params.n_gpu_layers = count if self._devices else 0
        params.split_mode = _SPLIT_MODES[placement.split_mode or SplitMode.LAYER]
        params.main_gpu = placement.main_gpu or 0
        params.load_mode = _MAPPED_WHERE_IT_CAN if placement.mmap else _READ_WHOLE
        if placement.tensor_split:
            params.tensor_split = self._parts
        if self._overrides[0].pattern:
            params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)

    def _moved(self, device_of_tied: str) -> Iterator[_BufferOverride]:
        """Tensors that do not lie where the library's own rule has them."""
        placement = self._placement
        if self._maps_experts or (placement.cpu_moe and self._devices):
            layers = r"\d+" if self._maps_experts else "|".join(map(str, range(placement.cpu_moe or 0)))
            yield _BufferOverride(_EXPERTS.format(layers).encode(), _cpu_buffer_type())
            return
        for device in self._devices:
            if device.id == device_of_tied:
                yield _BufferOverride(_TIED, _buffer_type_of(device))

    @property
    def _maps_experts(self) -> bool:
        """Whether all experts stay as they are in the file: what the CPU lays out anew is in memory whole."""
        return self._placement.streams_experts and not self._devices

    def _shares(self) -> tuple[float, ...]:
        """Small numbers: bytes would not be exact as floats."""
        total = sum(self._placement.tensor_split)
        return tuple(part / total for part in self._placement.tensor_split[: len(self._devices)])


def _buffer_type_of(device: Device) -> int:
    function = llama._lib.ggml_backend_dev_buffer_type  # noqa: SLF001 - as below
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return int(function(native_device(device)))


def _cpu_buffer_type() -> int:
    function = llama._lib.ggml_backend_cpu_buffer_type  # noqa: SLF001 - the bindings declare nothing for buffers
    function.restype = ctypes.c_void_p
    return int(function())
