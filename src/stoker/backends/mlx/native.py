"""MLX itself: what it computes on, what memory it may take, and what has to happen where its threads end.

Importing this module loads MLX. Arrays that were evaluated may be used from any thread; those that were not
belong to the thread that made them.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any, TypeAlias
from weakref import WeakSet

import mlx.core as mx

from stoker.backends.device import CPU, Device, allocator_limits
from stoker.backends.mlx import openblas

Array: TypeAlias = Any
"""An array of MLX, which has no types of its own that a checker could read."""

BLAS = openblas.take_place()
"""What multiplies on a CPU in place of the reference library that MLX brings; None: that one does."""

LAST_WAIT_S = 5.0
"""For how long the end of the process waits for threads that compute: a closed engine ends in some ms."""

_ends = threading.local()
_threads: WeakSet[threading.Thread] = WeakSet()


class _ThreadEnd:
    """Ends MLX's streams of a thread together with it: left open they abort the process at its exit."""

    def __del__(self) -> None:
        mx.clear_streams()


def enter_thread() -> None:
    """Have this thread's streams end with it. To be called before MLX computes in it; idempotent."""
    thread = threading.current_thread()
    is_main = thread is threading.main_thread()  # whose streams MLX itself ends
    if not is_main and not hasattr(_ends, "end"):
        _ends.end = _ThreadEnd()
        _threads.add(thread)


@atexit.register
def await_threads() -> None:
    """Let the threads that have computed end before the process does, daemons too."""
    until_s = time.monotonic() + LAST_WAIT_S
    for thread in list(_threads):
        thread.join(max(0.0, until_s - time.monotonic()))


def is_on_device() -> bool:
    """Whether an accelerator computes."""
    return bool(mx.default_device() == mx.Device(mx.gpu, 0))


def device() -> Device:
    """What computes."""
    if not is_on_device():
        return CPU
    name = str(mx.device_info(mx.default_device()).get("device_name", ""))
    if mx.metal.is_available():
        return Device(name or "Apple GPU", kind="Metal", id="Metal0", is_integrated=True)
    return Device(name or "GPU", kind="CUDA", id="CUDA0")


def label() -> str:
    """The same for people, such as "MLX · Metal" or "MLX · CPU"."""
    return f"MLX · {device().kind}"


def limit_memory() -> None:
    """Tell MLX what it may take of this machine, and what of freed memory it may keep (SPEC M2).

    The limit is not a wall: above it MLX waits for steps under way before it allocates more.
    """
    limits = allocator_limits()
    mx.set_memory_limit(limits.most_bytes)
    mx.set_cache_limit(limits.cache_bytes)
    if is_on_device() and mx.metal.is_available():
        most = int(mx.device_info(mx.default_device())["max_recommended_working_set_size"])
        mx.set_wired_limit(min(most, limits.most_bytes))
