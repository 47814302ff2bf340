"""What an engine writes to its stderr: passed on to this program's, and its end kept for error messages.

Native code says why it gives up there and nowhere else: a failed assertion, an exception nobody caught.
"""

from __future__ import annotations

import contextlib
import os
import threading

from stoker.native_crash import native_text

KEPT_BYTES = 32 * 1024
"""Holds the dump of every thread's stack that Python writes at a crash, and what was said before it."""
_READ_BYTES = 8192
_STDERR = 2


class StderrTail:
    """Reads the pipe that is an engine's stdout and stderr, in a thread, until the engine closes it.

    Args:
        source: the read end; closed here.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._read, name="stoker-engine-stderr", daemon=True)

    def __repr__(self) -> str:
        return f"<StderrTail {len(self._kept)} bytes>"

    def start(self) -> None:
        """Begin reading.

        Raises:
            RuntimeError: the system starts no further thread; the pipe is closed.
        """
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._source)
            raise

    def text(self, wait_s: float) -> str:
        """What was said last, for an error message; waits so long for the end of the pipe."""
        self._thread.join(wait_s)
        return native_text(bytes(self._kept))

    def _read(self) -> None:
        with contextlib.closing(os.fdopen(self._source, "rb", buffering=0)) as pipe:
            while data := pipe.read(_READ_BYTES):
                self._kept += data
                del self._kept[:-KEPT_BYTES]
                with contextlib.suppress(OSError):  # this program's stderr may be closed or full
                    os.write(_STDERR, data)
