"""The C library's malloc: how much freed memory it keeps (SPEC M4, R10). Acts on glibc only."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_RETURNED_BYTES = 2**20


def share_arena() -> None:
    """Give all threads one arena; called before any is started.

    Each would else get its own and keep what it freed there. Python's lock lets one of them run at a time.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def limit_cache(size_bytes: int) -> None:
    """Keep at most `size_bytes` of freed memory; blocks of a MiB and more go back to the system at once.

    Without it glibc raises its thresholds and keeps freed states of some MiB (mallopt(3)).
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _RETURNED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, size_bytes)


def trim() -> None:
    """Collect garbage and return free memory to the system (malloc_trim(3)); takes milliseconds."""
    gc.collect()
    give_back()


def give_back() -> None:
    """The same without collecting garbage, which stops every thread."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
