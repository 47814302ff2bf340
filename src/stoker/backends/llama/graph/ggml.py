"""ggml's operations by address, for what is added to the graphs of llama.cpp; the bindings declare none."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from stoker.backends.llama.binding import keeping_lock, llama

if TYPE_CHECKING:
    from collections.abc import Callable

F32, I32 = 0, 26  # enum ggml_type
_NUM_SOURCES = 10


class GraphTensor(ctypes.Structure):
    """The head of ggml_tensor, as far as it is read here; `is_layout_known` checks it."""


GraphTensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(GraphTensor) * _NUM_SOURCES),
    ("view_src", ctypes.POINTER(GraphTensor)),
    ("view_offs", ctypes.c_size_t),
]


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The functions of ggml that put operations into a graph: tensors are addresses."""

    def __init__(self) -> None:
        tensor, count, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float
        self.reshape_2d = self._function("ggml_reshape_2d", tensor, count, count)
        self.reshape_3d = self._function("ggml_reshape_3d", tensor, *[count] * 3)
        self.view_1d = self._function("ggml_view_1d", tensor, count, size)
        self.view_3d = self._function("ggml_view_3d", tensor, *[count] * 3, *[size] * 3)
        self.argsort = self._function("ggml_argsort", tensor, ctypes.c_int)
        self.get_rows = self._function("ggml_get_rows", tensor, tensor)
        self.arange = self._function("ggml_arange", real, real, real)
        self.scale_bias = self._function("ggml_scale_bias", tensor, real, real)
        self.repeat_4d = self._function("ggml_repeat_4d", tensor, *[count] * 4)
        self.concat = self._function("ggml_concat", tensor, tensor, ctypes.c_int)
        self.cast = self._function("ggml_cast", tensor, ctypes.c_int)
        pool_sizes = [ctypes.c_int] * 5
        self.pool_2d = self._function("ggml_pool_2d", tensor, *pool_sizes, real, real)
        self.clamp = self._function("ggml_clamp", tensor, real, real)
        self.cont = self._function("ggml_cont", tensor)
        self.pad = self._function("ggml_pad", tensor, *[ctypes.c_int] * 4)
        self.sum_rows = self._function("ggml_sum_rows", tensor)
        self.new_tensor_2d = self._function("ggml_new_tensor_2d", ctypes.c_int, count, count)

        self.add_to_graph = self._function("ggml_build_forward_expand", tensor, returns=None)
        self.num_nodes = self._function("ggml_graph_n_nodes", returns=ctypes.c_int)
        self.nodes = self._function("ggml_graph_nodes")
        self.is_host_memory = self._function("ggml_backend_buffer_is_host", returns=ctypes.c_bool)

    @staticmethod
    def _function(name: str, *kinds: Any, returns: Any = ctypes.c_void_p) -> Callable[..., int]:
        function = getattr(llama._lib, name)  # noqa: SLF001 - the bindings declare nothing of ggml
        function.restype, function.argtypes = returns, [ctypes.c_void_p, *kinds]
        return keeping_lock(function)


@cache
def ggml() -> Ggml:
    """The functions, looked up once."""
    return Ggml()


def is_layout_known() -> bool:
    """Whether a tensor of this library has its fields where `GraphTensor` looks for them."""
    init, free = llama._lib.ggml_init, llama._lib.ggml_free  # noqa: SLF001 - see `Ggml`
    init.restype, init.argtypes, free.argtypes = ctypes.c_void_p, [InitParams], [ctypes.c_void_p]
    context = init(InitParams(2**16, None, True))
    try:
        rows = ggml().new_tensor_2d(context, F32, 7, 5)
        padded = ggml().pad(context, rows, 0, 1, 0, 0)
        view = GraphTensor.from_address(ggml().view_1d(context, padded, 7, 3 * 28))
        source = view.view_src.contents
        return (
            (ctypes.addressof(source), view.view_offs) == (padded, 84)
            and (tuple(source.ne), tuple(source.nb)) == ((7, 6, 1, 1), (4, 28, 168, 168))
            and ctypes.addressof(source.src[0].contents) == rows
            and not source.view_src
        )
    finally:
        free(context)
