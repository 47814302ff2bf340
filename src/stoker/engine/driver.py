"""Starts NVIDIA's driver while the engine's modules are imported.

The driver takes a quarter of a second for itself and the device's context, which is made for any model.
Loads nothing of llama.cpp. Apart because it comes before those imports.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Files that are there where the driver finds a device; the second is that of Windows' own Linux."""
LIBRARY = "libcuda.so.1"
_CUDA_BUILD = "libggml-cuda*"


def begin_driver() -> threading.Thread | None:
    """Start the driver in a thread; None where there is no device, or llama.cpp was not built for it.

    What goes wrong goes wrong again when llama.cpp asks for its devices, and is reported there.
    """
    if not any(node.exists() for node in NODES) or not _is_built_for_cuda():
        return None
    thread = threading.Thread(target=_begin, name="stoker-driver", daemon=True)
    thread.start()
    return thread


def _is_built_for_cuda() -> bool:
    """Whether the bindings would use the driver; they are not imported."""
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    if folder is None:
        spec = find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            return False
        folder = str(Path(spec.origin).with_name("lib"))
    return next(Path(folder).glob(_CUDA_BUILD), None) is not None


def _begin() -> None:
    """Start the driver, and the context of the device where there is only one.

    Of several it is not known yet which are used. llama.cpp takes the context that is there.
    """
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL(LIBRARY)
        count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value != 1:
            return
        if driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
