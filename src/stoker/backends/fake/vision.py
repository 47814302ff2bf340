"""The fake backend's projector: embeddings that follow from what an image shows, in slices to order."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from typing import TYPE_CHECKING

import numpy as np

from stoker.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.protocol.backend import Placed, PlanItem, Rows
    from stoker.backends.protocol.vision import Layout
    from stoker.ipc.request import Picture

NUM_TOKENS = 40
N_EMBD = 8


class FakeEncoding:
    """One image; each slice, however long, is one of `num_slices`."""

    def __init__(self, vision: FakeVision, picture: Picture) -> None:
        self._vision = vision
        self._picture = picture
        self._num_left = vision.num_slices
        self._is_over = False

    def __repr__(self) -> str:
        return f"<FakeEncoding {self._num_left} slices left>"

    def run(self, budget_s: float) -> bool:
        """One slice; StepFailedError for a black image, the end of the process for an almost black one."""
        assert budget_s > 0, "a slice without time"
        assert not self._is_over, "a slice after the end"
        if set(self._picture.rgb) == {1}:
            os.abort()
        if not any(self._picture.rgb):
            self._end()
            raise StepFailedError("a black picture was ordered to fail")
        if self._vision.slice_delay_s:
            time.sleep(self._vision.slice_delay_s)
        self._num_left -= 1
        self._vision.num_slices_run += 1
        if self._num_left == 0:
            self._end()
        return self._num_left == 0

    def result(self) -> Rows:
        """float32 (NUM_TOKENS, N_EMBD)."""
        assert self._num_left == 0, f"{self!r} is not done"
        stream = hashlib.shake_128(self._picture.content).digest(NUM_TOKENS * N_EMBD)
        return np.frombuffer(stream, np.uint8).reshape(NUM_TOKENS, N_EMBD).astype(np.float32)

    def cancel(self) -> None:
        """Give up."""
        self._end()

    def _end(self) -> None:
        self._is_over = True
        if self._vision.encoding is self:
            self._vision.encoding = None


class FakeVision:
    """See the module.

    Args:
        num_slices: slices that an image takes.
        slice_delay_s: seconds every slice takes.

    Attributes:
        encoding: the one that is not over.
        num_slices_run: over all images.
    """

    fingerprint = "fa" * 16

    def __init__(self, num_slices: int, slice_delay_s: float = 0.0) -> None:
        self.num_slices = num_slices
        self.slice_delay_s = slice_delay_s
        self.encoding: FakeEncoding | None = None
        self.num_slices_run = 0

    def __repr__(self) -> str:
        return f"<FakeVision {self.encoding!r}>"

    def layout(self, picture: Picture) -> Layout:  # noqa: ARG002 - all images take the same
        """A bracket, the image, a bracket."""
        return ((ord("["),), NUM_TOKENS, (ord("]"),))

    def begin(self, picture: Picture) -> FakeEncoding:
        """Encode an image, one at a time."""
        assert self.encoding is None, f"{self.encoding!r} is not over"
        self.encoding = FakeEncoding(self, picture)
        return self.encoding


def seen_tokens(item: PlanItem, pictures: Sequence[Placed]) -> list[int]:
    """What the history takes in of an item: at an image's place what its embeddings say.

    Raises:
        StepFailedError: there are no embeddings for its place.
    """
    if item.tokens[0] >= 0:
        return list(item.tokens)
    end = item.start + len(item.tokens)
    for placed in pictures:
        if placed.start <= item.start and end <= placed.start + len(placed.embeddings):
            rows = placed.embeddings[item.start - placed.start : end - placed.start]
            return [-1 - (zlib.crc32(row.tobytes()) >> 1) for row in rows]
    raise StepFailedError(f"sequence {item.seq} has no embeddings for {item.start} to {end}", seq=item.seq)
