"""The backend's door to the native library; `sampling.sampler` calls its samplers on arrays of its own.

Owns what is global in that library: its start, its log (turned into Python logging) and its devices.
The bindings are imported before numpy where this module comes first, as one CUDA image asked for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections import Counter
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import llama_cpp
from llama_cpp import llama_cpp as llama

from stoker.backends.device import CPU, Device, DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "LIBRARY_DIR",
    "LIBRARY_VERSION",
    "LogLine",
    "accelerators",
    "buffer_bytes",
    "capture_log",
    "devices",
    "error_text",
    "keeping_lock",
    "label",
    "llama",
    "native_device",
    "start",
    "sum_by_device",
    "vision_library",
]

LIBRARY_DIR = Path(llama_cpp.__file__).parent / "lib"
LIBRARY_VERSION = version("llama-cpp-python")
MAX_ERROR_CHARS = 500

_logger = logging.getLogger(__name__)

_DEBUG, _INFO, _WARNING, _ERROR, _CONTINUED = 1, 2, 3, 4, 5  # enum ggml_log_level
_GPU, _INTEGRATED_GPU = 1, 2  # enum ggml_backend_dev_type
_BUFFER = re.compile(r"(\S+) +(model|KV|RS|compute|output|LoRA) buffer size = +([\d.]+) MiB")
_BUFFER_LINES = {
    "model": "weights",
    "KV": "kv",
    "RS": "kv",
    "compute": "compute",
    "output": "compute",
    "LoRA": "adapters",
}
_CPU_FEATURES = ("AVX512", "AVX2", "AVX", "SVE", "NEON", "RISCV_V", "VSX", "WASM_SIMD")
_REGISTRY_NAMES = {"MTL": "Metal"}
_UNIFIED = {"Metal"}  # which calls its device a GPU; on Apple silicon its memory is the machine's


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
_ENDED = re.compile(r"(compute status: 1|compute_async failed with error 1|failed to decode, ret = 2)$")
"""What the library calls errors of a step that its abort callback has ended."""


def _receive(level: int, piece: bytes, _user_data: object) -> None:
    """Collect pieces of text into lines. Debug lines go nowhere: there are thousands of them in a load."""
    if level == _DEBUG:
        _log.level = _DEBUG
        return
    if level != _CONTINUED:
        _log.level, _log.text = level, ""
    elif _log.level == _DEBUG:
        return
    _log.text += piece.decode(errors="replace")
    if not _log.text.endswith("\n"):
        return
    text = _log.text.strip()
    line = LogLine(is_error=_log.level == _ERROR and not _ENDED.search(text), text=text)
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


NO_GRAPHS = "GGML_CUDA_DISABLE_GRAPHS"
"""Variable of the library that keeps it from capturing CUDA graphs; read when a device first computes."""
_ASKED_GRAPHS = "STOKER_CUDA_GRAPHS"


_starting = threading.RLock()
"""Held while the library and the devices' drivers start: a thread begins that before they are asked for."""


@cache
def start() -> None:
    """Start the native library; the second call does nothing."""
    with _starting:
        llama.llama_log_set(_receive_native, None)
        llama.llama_backend_init()


@cache
def captures_graphs() -> bool:
    """Whether this process captures steps as CUDA graphs; the first model on a device has decided it."""
    return NO_GRAPHS not in os.environ


def settle_graphs(what: str, *, is_marked: bool) -> None:
    """Before a model computes on devices: the first one decides whether CUDA graphs are captured (adr 28).

    The library asks once in a process. What it captures of graphs without `GraphMarks` may be NaN.

    Args:
        what: the model, for the log.
        is_marked: all that it computes on devices is in graphs that are marked.
    """
    if captures_graphs.cache_info().currsize == 0:
        asked = os.environ.get(_ASKED_GRAPHS)
        if asked == "0" or (asked != "1" and not is_marked):
            os.environ.setdefault(NO_GRAPHS, "1")
    if captures_graphs() and not is_marked:
        _warn_of_graphs(what)


@cache
def _warn_of_graphs(what: str) -> None:
    """Once for each model."""
    text = "%s computes beside captured CUDA graphs, unmarked: STOKER_CUDA_GRAPHS=0 captures none"
    _logger.warning(text, what)


def keeping_lock(native: Any) -> Callable[..., Any]:
    """The same native function, called without giving up the interpreter's lock.

    For calls that are short and many: while another thread wants the lock, to give it up takes many times as
    long as the call. A loop in Python around them gives it up now and then, one in C (`map`) never does.
    """
    address = ctypes.cast(native, ctypes.c_void_p).value
    assert address is not None, f"{native!r} is nowhere"
    return ctypes.PYFUNCTYPE(native.restype, *native.argtypes)(address)


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


def buffer_bytes(lines: Iterable[LogLine], found: Iterable[Device]) -> dict[str, dict[str, int]]:
    """What the library said that it took, in bytes by `Device.id` and line of the ledger.

    Args:
        lines: what it logged while it loaded a model or made a context.
        found: the devices that its buffers are named after; all other buffers, and those of devices without
            memory of their own, are under the empty id.
    """
    own = [device for device in found if not device.is_integrated]
    sizes: dict[str, dict[str, int]] = {}
    for line in lines:
        if buffer := _BUFFER.search(line.text):
            owners, name = _owners(buffer[1], own) or [""], _BUFFER_LINES[buffer[2]]
            size_bytes = int(float(buffer[3]) * 2**20)
            for owner in owners:
                held = sizes.setdefault(owner, {})
                held[name] = held.get(name, 0) + size_bytes // len(owners)
    return sizes


def _owners(buffer: str, devices: Sequence[Device]) -> list[str]:
    """Ids of the devices that hold a buffer of that name; rows of a matrix lie on all of a kind."""
    for device in devices:
        if buffer == device.id or buffer.startswith(f"{device.id}_"):
            return [device.id]
    return [device.id for device in devices if buffer == f"{device.kind}_Split"]


def sum_by_device(*parts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Bytes by id and line of several parts together."""
    sums: dict[str, dict[str, int]] = {}
    for part in parts:
        for owner, held in part.items():
            lines = sums.setdefault(owner, {})
            for name, size_bytes in held.items():
                lines[name] = lines.get(name, 0) + size_bytes
    return sums


@cache
def accelerators() -> tuple[Device, ...]:
    """What the library can compute on beside the CPU; the first call starts the devices' drivers."""
    with _starting:
        return tuple(_device(index, *found) for index, found in enumerate(_native_devices()))


def devices() -> tuple[Device, ...]:
    """What the library computes on: its accelerators, or the CPU."""
    return accelerators() or (CPU,)


def native_device(device: Device) -> int:
    """The library's own pointer to one of `accelerators`."""
    return _native_devices()[device.index][0]


def _device(index: int, handle: int, kind: str, name: str) -> Device:
    props = device_props(handle)
    native_id = (props.name or b"").decode(errors="replace")
    bus_id = (props.device_id or b"").decode(errors="replace")
    return Device(
        name,
        kind,
        id=native_id or f"{kind}{index}",
        index=index,
        lock=f"{kind}-{bus_id or native_id or name}",
        bus_id=bus_id,
        is_integrated=props.type == _INTEGRATED_GPU or kind in _UNIFIED,
        read=partial(_device_memory, handle),
    )


def device_props(handle: int) -> _DeviceProps:
    """What the library says of a device now."""
    props = _DeviceProps()
    get_props = llama._lib.ggml_backend_dev_get_props  # noqa: SLF001 - see above
    get_props.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DeviceProps)]
    get_props(handle, ctypes.byref(props))
    return props


def _device_memory(handle: int) -> DeviceMemory:
    props = device_props(handle)
    return DeviceMemory(props.memory_free, props.memory_total)


@cache
def _native_devices() -> tuple[tuple[int, str, str], ...]:
    """Native handle, kind and name of each accelerator."""
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
def label(used: tuple[Device, ...]) -> str:
    """What computes, for people: "llama.cpp · CPU AVX512", "llama.cpp · CUDA NVIDIA H200" (SPEC R9).

    Args:
        used: those of `accelerators` that are used.
    """
    if used:
        counts = Counter(device.label for device in used)
        names = (f"{count} x {name}" if count > 1 else name for name, count in counts.items())
        return f"llama.cpp · {' + '.join(names)}"
    info = llama.llama_print_system_info().decode(errors="replace")
    enabled = set(re.findall(r"(\w+) = 1", info))
    feature = next((name for name in _CPU_FEATURES if name in enabled), "")
    return f"llama.cpp · CPU {feature}".rstrip()
