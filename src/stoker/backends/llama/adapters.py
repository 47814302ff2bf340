"""LoRA adapters in a loaded model, and which of them a context computes with (SPEC K6).

Owns the native handles, which llama.cpp frees with the model. Files were checked by `stoker.models.adapters`
before they get here; how a plan is cut by adapters is `batch`'s.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.backends.llama.binding import buffer_bytes, capture_log, llama, sum_by_device
from stoker.backends.llama.shortage import load_error
from stoker.errors import StepFailedError, UnsupportedError
from stoker.models.adapters import check_fits, read_adapter
from stoker.models.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.llama.batch import AdapterSet
    from stoker.backends.llama.model import LlamaModel
    from stoker.ipc.model import AdapterSpec
    from stoker.models.gguf.header import GgufHeader


class Adapters:
    """The adapters of one model; make it before the model's contexts, which reserve room for them.

    Attributes:
        fingerprints: of each adapter's file, by name.
        size_bytes: what all of them take.
        on_devices: as far as they lie on accelerators, by id; see `OnDevices`.

    Raises:
        ModelFileError: a file is broken or made for another model.
        UnsupportedError: the model cannot be adapted.
        ModelLoadError: llama.cpp refused a file.
    """

    def __init__(self, model: LlamaModel, header: GgufHeader, specs: Sequence[AdapterSpec]) -> None:
        self.fingerprints: dict[str, str] = {}
        self.size_bytes = 0
        self.on_devices: dict[str, dict[str, int]] = {}
        self._handles: dict[str, int] = {}
        for spec in specs:
            found = read_adapter(spec.path)
            check_fits(found, header)
            self.fingerprints[spec.name] = fingerprint(found.path)
            self.size_bytes += found.size_bytes
            self._handles[spec.name], taken = _load(model, found.path)
            self.on_devices = sum_by_device(self.on_devices, taken)

    def __repr__(self) -> str:
        return f"<Adapters {', '.join(self._handles) or 'none'}>"

    def check(self, adapters: AdapterSet) -> None:
        """Raise UnsupportedError for one that the model does not have."""
        for name, _ in adapters:
            if name not in self._handles:
                known = ", ".join(self._handles) or "none"
                raise UnsupportedError(f"there is no adapter {name!r}; there are: {known}", param="lora")

    def apply(self, context: int | None, adapters: AdapterSet) -> None:
        """Let the next calls of a context compute with these alone.

        Raises:
            StepFailedError: llama.cpp refused them.
        """
        handles = (ctypes.c_void_p * len(adapters))(*(self._handles[name] for name, _ in adapters))
        scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
        pointer = ctypes.cast(handles, llama.llama_set_adapters_lora.argtypes[1])
        code = llama.llama_set_adapters_lora(context, pointer, len(adapters), scales)
        if code != 0:
            raise StepFailedError(f"llama_set_adapters_lora returned {code}", native_code=code)


def _load(model: LlamaModel, path: Path) -> tuple[int, dict[str, dict[str, int]]]:
    """The native handle, and what it takes of accelerators."""
    with capture_log() as lines:
        handle = llama.llama_adapter_lora_init(model.handle, str(path).encode())
    if not handle:
        what = f"the adapter {path.name} for {model.path.name}"
        raise load_error(what, lines, model.devices, path=str(path))
    taken = buffer_bytes(lines, model.devices)
    taken.pop("", None)
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0), taken
