"""An encode that is computed in slices of time, so that other work has its turns between them (SPEC V3).

llama.cpp asks a callback after each operation of the encoder. The encode runs on a thread of its own, and in
that callback the thread waits until whoever drives the model grants it the next slice. So nothing of it is
computed beside a step.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from stoker.backends.llama.binding import llama
from stoker.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.protocol.backend import Rows


class SliceGate:
    """The native callback of one projector: lets the encode that is under way pass, wait or end.

    Attributes:
        native: what the library calls; referenced here for as long as it may.
    """

    def __init__(self) -> None:
        self.encoding: SlicedEncode | None = None
        self.native = llama.ggml_backend_sched_eval_callback(self._on_operation)

    def __repr__(self) -> str:
        return f"<SliceGate for {self.encoding!r}>"

    def _on_operation(self, _tensor: object, is_before: bool, _user_data: object) -> bool:  # noqa: FBT001
        """Before an operation: stop after it, always. After it: whether to go on."""
        return is_before or self.encoding is None or self.encoding.pause_if_due()


class SlicedEncode:
    """One encode, begun with its first slice. One thread drives it.

    Args:
        gate: of the projector; at most one encode of it is under way.
        encode: computes on this encode's thread; float32 (num_tokens, n_embd).
    """

    def __init__(self, gate: SliceGate, encode: Callable[[], Rows]) -> None:
        self._gate = gate
        self._encode = encode
        self._thread: threading.Thread | None = None
        self._granted = threading.Semaphore(0)
        self._returned = threading.Semaphore(0)
        self._deadline_s = 0.0
        self._is_cancelled = False
        self._rows: Rows | None = None
        self._error: BaseException | None = None
        self.is_over = False

    def __repr__(self) -> str:
        state = "over" if self.is_over else "under way" if self._thread else "not begun"
        return f"<SlicedEncode {state}>"

    def run(self, budget_s: float) -> bool:
        """Compute for about so long, by one operation of the encoder more at the most; whether it is done.

        Raises:
            StepFailedError: the projector failed on the image.
        """
        assert budget_s > 0, "a slice without time"
        assert not self.is_over, "a slice after the end"
        self._deadline_s = time.monotonic() + budget_s
        self._grant()
        if not self.is_over:
            return False
        if isinstance(self._error, StepFailedError):
            raise self._error
        if self._error is not None:
            raise StepFailedError(f"a picture could not be encoded: {self._error}") from self._error
        return True

    def result(self) -> Rows:
        """float32 (num_tokens, n_embd), once it is done."""
        assert self._rows is not None, f"{self!r} has no result"
        return self._rows

    def cancel(self) -> None:
        """Give up what was computed of it, after the operation it is at; idempotent."""
        self._is_cancelled = True
        if self._thread is None:
            self.is_over = True
        if not self.is_over:
            self._grant()
        self._rows = None

    def pause_if_due(self) -> bool:
        """On its own thread: wait for the next slice if this one is used up; whether to go on."""
        if not self._is_cancelled and time.monotonic() >= self._deadline_s:
            self._returned.release()
            self._granted.acquire()
        return not self._is_cancelled

    def _grant(self) -> None:
        """Let its thread compute until it waits again or has ended."""
        if self._thread is None:
            self._gate.encoding = self
            self._thread = threading.Thread(target=self._work, name="encode", daemon=True)
            self._thread.start()
        else:
            self._granted.release()
        self._returned.acquire()
        if self.is_over:
            self._thread.join()
            self._gate.encoding = None

    def _work(self) -> None:
        try:
            self._rows = self._encode()
        except BaseException as error:  # noqa: BLE001 - raised again where the slice was asked for
            self._error = error
        finally:
            self.is_over = True
            self._returned.release()
