"""Graphs of ggml that tests make and compute by themselves, on the CPU."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.backends.llama.binding import llama
from stoker.backends.llama.graph.ggml import F32, InitParams, ggml

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.protocol.backend import Rows


def function(name: str, returns: object, *takes: object) -> Callable[..., Any]:
    """One of ggml's."""
    native = getattr(llama._lib, name)
    native.restype, native.argtypes = returns, takes
    return native


def begun(address: int, size: int, *, no_alloc: bool) -> int:
    """A ggml_context in so many bytes there."""
    init = function("ggml_init", ctypes.c_void_p, InitParams)
    context: int = init(InitParams(size, address, no_alloc))
    return context


def computed(rows: Rows, build: Callable[[int, int], int]) -> Rows:
    """What a graph makes of rows; `build` adds to a context what is made of a tensor, and gives its end."""
    memory = ctypes.create_string_buffer(64 * rows.nbytes + 2**22)
    context = begun(ctypes.addressof(memory), len(memory), no_alloc=False)
    given = ggml().new_tensor_2d(context, F32, *reversed(rows.shape))
    data = function("ggml_get_data", ctypes.c_void_p, ctypes.c_void_p)
    ctypes.memmove(data(given), rows.ctypes.data, rows.nbytes)
    found = build(context, given)
    graph = function("ggml_new_graph", ctypes.c_void_p, ctypes.c_void_p)(context)
    ggml().add_to_graph(graph, found)
    compute = function("ggml_graph_compute_with_ctx", ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int)
    assert compute(context, graph, 1) == 0
    size = function("ggml_nelements", ctypes.c_int64, ctypes.c_void_p)(found)
    result = np.ctypeslib.as_array((ctypes.c_float * size).from_address(data(found))).copy()
    function("ggml_free", None, ctypes.c_void_p)(context)
    return result
