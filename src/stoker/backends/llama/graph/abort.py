"""Ends a native step of the CPU from another thread, without Python in its way.

llama.cpp asks a callback before each operation of a graph. That is the C library's `strlen` of one byte
here, which is 0 until `abort_step` sets it: a callback of Python's would wait for the interpreter's lock, and
cost each operation of each step. Apart because it is memory that a context reads for as long as it lives.
"""

from __future__ import annotations

import ctypes

from stoker.backends.llama.binding import llama


class AbortFlag:
    """See `StepAbort`; must live longer than the contexts that it was attached to."""

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self._is_set = ctypes.cast(ctypes.CDLL(None).strlen, llama.ggml_abort_callback)

    def __repr__(self) -> str:
        return f"<AbortFlag {bool(self._text.value)}>"

    def attach_to(self, handle: int) -> None:
        """Let the steps of a context end by it."""
        llama.llama_set_abort_callback(handle, self._is_set, ctypes.addressof(self._text))

    def abort_step(self) -> None:
        """End the step under way, or the next one, within an operation of its graph; from any thread."""
        self._text[0] = b"\x01"

    def allow_steps(self) -> None:
        """Compute steps to their ends again."""
        self._text[0] = b"\x00"
