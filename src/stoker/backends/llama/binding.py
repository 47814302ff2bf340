"""The backend's door to the native library; `sampling.sampler` calls its samplers on arrays of its own.

Owns what is global in that library: its start, its log (turned into Python logging) and its devices.
The bindings are imported before numpy where this module comes first, as one CUDA image asked for.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import llama_cpp
from llama_cpp import llama_cpp as llama

from stoker.backends.device import CPU, Device

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "LIBRARY_DIR",
    "LIBRARY_VERSION",
    "LogLine",
    "capture_log",
    "device_names",
    "devices",
    "error_text",
    "label",
    "llama",
    "start",
    "vision_library",
]

LIBRARY_DIR = Path(llama_cpp.__file__).parent / "lib"
LIBRARY_VERSION = version("llama-cpp-python")
MAX_ERROR_CHARS = 500

_logger = logging.getLogger(__name__)

_DEBUG, _INFO, _WARNING, _ERROR, _CONTINUED = 1, 2, 3, 4, 5  # enum ggml_log_level
_GPU, _INTEGRATED_GPU = 1, 2  # enum ggml_backend_dev_type
_CPU_FEATURES = ("AVX512", "AVX2", "AVX", "SVE", "NEON", "RISCV_V", "VSX", "WASM_SIMD")
_REGISTRY_NAMES = {"MTL": "Metal"}


class LogLine(NamedTuple):
    """One line of the native log; `is_error` is the library's own judgement."""

    is_error: bool
    text: str


class _ThreadLog(threading.local):
    """What the native library has said on this thread: the unfinished line and who listens."""

    def __init__(self) -> None:
        self.level = _INFO
        self.text = ""
        self.listeners: list[list[LogLine]] = []


_log = _ThreadLog()


def _receive(level: int, text: bytes, _user_data: object) -> None:
    """Collect pieces of text into lines. Debug lines go nowhere: there are thousands of them in a load."""
    if level == _DEBUG:
        _log.level = _DEBUG
        return
    if level != _CONTINUED:
        _log.level, _log.text = level, ""
    elif _log.level == _DEBUG:
        return
    _log.text += text.decode(errors="replace")
    if not _log.text.endswith("\n"):
        return
    line = LogLine(is_error=_log.level == _ERROR, text=_log.text.strip())
    _log.text = ""
    for listener in _log.listeners:
        listener.append(line)
    _logger.log(logging.WARNING if line.is_error else logging.DEBUG, "%s", line.text)


_receive_native = llama.llama_log_callback(_receive)  # referenced here for as long as the library may call it


@contextmanager
def capture_log() -> Iterator[list[LogLine]]:
    """The lines that native calls of this thread log inside the block (info and above)."""
    lines: list[LogLine] = []
    _log.listeners.append(lines)
    try:
        yield lines
    finally:
        _log.listeners = [other for other in _log.listeners if other is not lines]  # equal ones stay


def error_text(lines: list[LogLine]) -> str:
    """The errors among `lines`, joined; the last line said if none is an error."""
    errors = [line.text for line in lines if line.is_error]
    if not errors:
        errors = [line.text for line in lines[-1:]] or ["it gave no reason"]
    return "; ".join(errors)[-MAX_ERROR_CHARS:]


@cache
def start() -> None:
    """Start the native library; the second call does nothing."""
    llama.llama_log_set(_receive_native, None)
    llama.llama_backend_init()


@cache
def vision_library() -> Any:
    """The library's part that looks at images (mtmd), its log joined to the other; loaded on demand."""
    start()
    from llama_cpp import mtmd_cpp  # noqa: PLC0415 - most models see nothing

    mtmd_cpp.mtmd_log_set(_receive_native, None)
    return mtmd_cpp


class _DeviceProps(ctypes.Structure):
    """ggml_backend_dev_props; the flags at its end with room to spare."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", ctypes.c_bool * 64),
    )


@cache
def device_names() -> tuple[tuple[str, str], ...]:
    """(kind, name) of each accelerator the library can use, e.g. ("CUDA", "NVIDIA H200")."""
    return tuple((kind, name) for _, kind, name in _accelerators())


@cache
def devices() -> tuple[Device, ...]:
    """What the library computes on: its accelerators, or the CPU."""
    found = []
    for handle, kind, name in _accelerators():
        props = device_props(handle)
        lock = (props.device_id or props.name or name.encode()).decode(errors="replace")
        found.append(Device(f"{kind} {name}", f"{kind}-{lock}", partial(_device_memory, handle)))
    return tuple(found) or (CPU,)


def device_props(handle: int) -> _DeviceProps:
    """What the library says of a device now."""
    props = _DeviceProps()
    get_props = llama._lib.ggml_backend_dev_get_props  # noqa: SLF001 - see above
    get_props.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DeviceProps)]
    get_props(handle, ctypes.byref(props))
    return props


def _device_memory(handle: int) -> tuple[int, int]:
    props = device_props(handle)
    return props.memory_free, props.memory_total


@cache
def _accelerators() -> tuple[tuple[int, str, str], ...]:
    """Native handle, kind and name of each."""
    start()
    if not llama.llama_supports_gpu_offload():
        return ()
    library = llama._lib  # noqa: SLF001 - the bindings declare nothing for devices
    library.ggml_backend_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_dev_get.restype = ctypes.c_void_p
    library.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    library.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
    library.ggml_backend_dev_backend_reg.argtypes = [ctypes.c_void_p]
    library.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    for function in (library.ggml_backend_reg_name, library.ggml_backend_dev_description):
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_void_p]
    found = []
    for index in range(library.ggml_backend_dev_count()):
        device = library.ggml_backend_dev_get(index)
        if library.ggml_backend_dev_type(device) in (_GPU, _INTEGRATED_GPU):
            kind = library.ggml_backend_reg_name(library.ggml_backend_dev_backend_reg(device)).decode()
            name = library.ggml_backend_dev_description(device).decode(errors="replace")
            found.append((device, _REGISTRY_NAMES.get(kind, kind), name))
    return tuple(found)


@cache
def label(devices: tuple[tuple[str, str], ...]) -> str:
    """What computes, for people: "llama.cpp · CPU AVX512", "llama.cpp · CUDA NVIDIA H200" (SPEC R9).

    Args:
        devices: those of `device_names` that are used.
    """
    if devices:
        return f"llama.cpp · {devices[0][0]} {devices[0][1]}"
    info = llama.llama_print_system_info().decode(errors="replace")
    enabled = set(re.findall(r"(\w+) = 1", info))
    feature = next((name for name in _CPU_FEATURES if name in enabled), "")
    return f"llama.cpp · CPU {feature}".rstrip()
