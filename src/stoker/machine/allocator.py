"""The C library's allocator: what it keeps of freed memory for itself (SPEC M4, R10).

Does something where malloc is glibc's, nothing elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_RETURNED_BYTES = 2**20


def limit_cache(size_bytes: int) -> None:
    """Keep at most so much of what is freed; blocks of a MiB and more go back to the system at once.

    It would else keep freed states of some MiB for itself, and more of them each time (mallopt(3)).
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _RETURNED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, size_bytes)


def trim() -> None:
    """Give back to the system what is free (malloc_trim(3)); takes milliseconds."""
    gc.collect()
    give_back()


def give_back() -> None:
    """The same without looking for garbage, which holds up every thread."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
