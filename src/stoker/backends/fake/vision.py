"""The fake backend's projector: embeddings that follow from images and recordings, in slices to order."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.protocol.backend import PicturePart
from stoker.errors import StepFailedError, UnsupportedError
from stoker.ipc.request import Picture, Sound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.protocol.backend import Placed, PlanItem, Rows
    from stoker.backends.protocol.vision import Layout
    from stoker.ipc.request import Medium

NUM_TOKENS = 40
"""Of an image."""
TOKENS_S = 10
"""Of a second of sound."""
RATE_HZ = 16_000
N_EMBD = 8


class FakeEncoding:
    """One image or recording; each slice, however long, is one of `num_slices`."""

    def __init__(self, vision: FakeVision, medium: Medium) -> None:
        self._vision = vision
        self._medium = medium
        self._num_left = vision.num_slices
        self._is_over = False

    def __repr__(self) -> str:
        return f"<FakeEncoding {self._num_left} slices left>"

    def run(self, budget_s: float) -> bool:
        """One slice; StepFailedError for what is black or silent, the process ends for what almost is."""
        assert budget_s > 0, "a slice without time"
        assert not self._is_over, "a slice after the end"
        data = self._medium.rgb if isinstance(self._medium, Picture) else self._medium.pcm
        if set(data) == {1}:
            os.abort()
        if not any(data):
            self._end()
            what = "black picture" if isinstance(self._medium, Picture) else "silent recording"
            raise StepFailedError(f"a {what} was ordered to fail")
        if self._vision.slice_delay_s:
            time.sleep(self._vision.slice_delay_s)
        self._num_left -= 1
        self._vision.num_slices_run += 1
        if self._num_left == 0:
            self._end()
        return self._num_left == 0

    def result(self) -> Rows:
        """float32 (its tokens, N_EMBD)."""
        assert self._num_left == 0, f"{self!r} is not done"
        num_tokens = _num_tokens(self._medium)
        stream = hashlib.shake_128(self._medium.content).digest(num_tokens * N_EMBD)
        return np.frombuffer(stream, np.uint8).reshape(num_tokens, N_EMBD).astype(np.float32)

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
        num_slices: slices that an image or a recording takes.
        slice_delay_s: seconds every slice takes.
        takes: kinds of media that it takes.

    Attributes:
        encoding: the one that is not over.
        num_slices_run: over all media.
    """

    fingerprint = "fa" * 16

    def __init__(
        self, num_slices: int, slice_delay_s: float = 0.0, takes: tuple[type, ...] = (Picture, Sound)
    ) -> None:
        self.num_slices = num_slices
        self.takes = takes
        self.slice_delay_s = slice_delay_s
        self.encoding: FakeEncoding | None = None
        self.num_slices_run = 0

    def __repr__(self) -> str:
        return f"<FakeVision {self.encoding!r}>"

    def layout(self, medium: Medium) -> Layout:
        """A bracket, its embeddings, a bracket. Raises UnsupportedError where it takes no such media."""
        if not isinstance(medium, self.takes):
            what = "pictures" if isinstance(medium, Picture) else "recordings"
            raise UnsupportedError(f"the projector takes no {what}", param="messages")
        return ((ord("["),), PicturePart(_num_tokens(medium)), (ord("]"),))

    def begin(self, medium: Medium) -> FakeEncoding:
        """Encode it, one at a time."""
        assert self.encoding is None, f"{self.encoding!r} is not over"
        self.encoding = FakeEncoding(self, medium)
        return self.encoding


def _num_tokens(medium: Medium) -> int:
    if isinstance(medium, Picture):
        return NUM_TOKENS
    return -(-medium.num_samples * TOKENS_S // medium.rate_hz)


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
