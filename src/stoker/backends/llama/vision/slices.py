"""An encode that is computed in slices of time, so that other work has its turns between them (SPEC V3).

llama.cpp asks a callback after each operation of the encoder. The encode runs on a thread of its own, and in
that callback the thread waits until whoever drives the model grants it the next slice. So nothing of the
encoder is computed beside a step. What comes before it (cutting a picture, the spectrogram of a recording)
is, as it cannot be stopped: of ten minutes of sound it takes seconds.
"""

from __future__ import annotations

import math
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
        encode: computes on this encode's thread; float32 (num_tokens, n_embd). It gets a function that it
            has to call before the encoder begins, which returns when the first slice is granted.
        former: the projector's encode before, which may have been given up before its encoder began.
    """

    def __init__(
        self,
        gate: SliceGate,
        encode: Callable[[Callable[[], None]], Rows],
        former: SlicedEncode | None = None,
    ) -> None:
        self._gate = gate
        self._encode = encode
        self._former = former
        self._thread: threading.Thread | None = None
        self._is_prepared = threading.Event()
        self._is_granted = False
        self._granted = threading.Semaphore(0)
        self._returned = threading.Semaphore(0)
        self._deadline_s = 0.0
        self._is_cancelled = False
        self._has_ended = False  # of its thread; the one that drives it learns it where it waits
        self._rows: Rows | None = None
        self._error: BaseException | None = None
        self.is_over = False

    def __repr__(self) -> str:
        state = "over" if self.is_over else "under way" if self._thread else "not begun"
        return f"<SlicedEncode {state}>"

    def run(self, budget_s: float) -> bool:
        """Compute for about so long, by one operation of the encoder more at the most; whether it is done.

        Raises:
            StepFailedError: the projector failed.
        """
        assert budget_s > 0, "a slice without time"
        assert not self.is_over, "a slice after the end"
        self._deadline_s = time.monotonic() + budget_s
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="encode", daemon=True)
            self._thread.start()
        if not self._is_prepared.wait(budget_s if math.isfinite(budget_s) else None):
            return False
        if self._has_ended:  # before its encoder began
            self.is_over = True
        else:
            self._grant()
        if not self.is_over:
            return False
        if isinstance(self._error, StepFailedError):
            raise self._error
        if self._error is not None:
            raise StepFailedError(f"what was given could not be encoded: {self._error}") from self._error
        return True

    def result(self) -> Rows:
        """float32 (num_tokens, n_embd), once it is done."""
        assert self._rows is not None, f"{self!r} has no result"
        return self._rows

    def cancel(self) -> None:
        """Give up what was computed of it, after the operation it is at; idempotent.

        What is prepared for the encoder is not waited for; `join` does that.
        """
        self._is_cancelled = True
        if self.is_over:
            pass
        elif self._is_granted:
            self._grant()
        else:
            self._granted.release()
            self.is_over = True
        self._rows = None

    def join(self) -> None:
        """Wait until its thread has ended; it has to be over."""
        assert self.is_over, f"{self!r} is not over"
        if self._thread is not None:
            self._thread.join()
        elif self._former is not None:
            self._former.join()

    def pause_if_due(self) -> bool:
        """On its own thread: wait for the next slice if this one is used up; whether to go on."""
        if not self._is_cancelled and time.monotonic() >= self._deadline_s:
            self._returned.release()
            self._granted.acquire()
        return not self._is_cancelled

    def _grant(self) -> None:
        """Let its thread compute until it waits again or has ended."""
        self._is_granted, self._gate.encoding = True, self
        self._granted.release()
        self._returned.acquire()
        if self._has_ended:
            self.is_over = True
            self.join()
            self._gate.encoding = None

    def _begin_encoder(self) -> None:
        """On its own thread: wait for the first slice."""
        self._is_prepared.set()
        self._granted.acquire()
        if self._is_cancelled:
            raise _CancelledError

    def _work(self) -> None:
        try:
            if self._former is not None:
                self._former.join()
                self._former = None
            self._rows = self._encode(self._begin_encoder)
        except BaseException as error:  # noqa: BLE001 - raised again where the slice was asked for
            self._error = error
        finally:
            self._has_ended = True
            self._is_prepared.set()
            self._returned.release()


class _CancelledError(Exception):
    """It was given up before its encoder began."""
