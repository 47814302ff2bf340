"""Too little memory for native code: what llama.cpp says becomes an error with numbers."""

from __future__ import annotations

import pytest

from stoker.backends.device import Device, DeviceMemory
from stoker.backends.llama.binding import LogLine
from stoker.backends.llama.shortage import load_error
from stoker.errors import InsufficientMemoryError, ModelLoadError

MIB = 2**20
CARDS = tuple(
    Device("NVIDIA A", "CUDA", id=f"CUDA{at}", index=at, read=lambda: DeviceMemory(300 * MIB, 2**30))
    for at in range(2)
)
CELLS = [
    "buffer_type_alloc_buffer: allocating 1024.00 MiB on device 1: cudaMalloc failed: out of memory",
    "alloc_tensor_range: failed to allocate CUDA1 buffer of size 1073741824",
    "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
]
COMPUTE = [
    "buffer_type_alloc_buffer: allocating 512.50 MiB on device 0: cudaMalloc failed: out of memory",
    "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 537395200",
    "graph_reserve: failed to allocate compute buffers",
    "llama_init_from_model: failed to initialize the context: failed to allocate compute pp buffers",
]


def lines(*texts: str) -> list[LogLine]:
    """As errors of the library."""
    return [LogLine(is_error=True, text=text) for text in texts]


@pytest.mark.parametrize(
    ("texts", "device", "needed"),
    [(CELLS, "CUDA1", 2**30), (COMPUTE, "CUDA0", 537395200), (CELLS[:1], "CUDA1", 2**30)],
)
def test_a_device_without_memory_is_named_with_what_it_has_and_what_was_asked(
    texts: list[str], device: str, needed: int
) -> None:
    """SPEC R12: for cells, and where compute buffers are laid out; the native text is a detail."""
    error = load_error("a context of 8192 cells for m.gguf", lines(*texts), CARDS, num_cells=8192)
    assert isinstance(error, InsufficientMemoryError)
    assert "cudaMalloc" not in error.message
    assert f"{device}, of which 300 MiB are free" in error.message
    details = {name: error.details[name] for name in ("device", "needed", "free")}
    assert details == {"device": device, "needed": needed, "free": 300 * MIB}
    assert texts[-1] in error.details["native"]


def test_another_refusal_says_what_the_library_said() -> None:
    """SPEC R12: only memory is memory."""
    error = load_error("m.gguf", lines("load: unknown model architecture: 'new'"), CARDS, path="m.gguf")
    assert isinstance(error, ModelLoadError)
    assert error.message == "llama.cpp refused m.gguf: load: unknown model architecture: 'new'"
