"""Vision: a projector that makes embeddings of images, and of recordings, for its model (SPEC V1 to V3, V9).

What is said of an image holds for a recording. Encoding one is long beside a step, so it is cut by time: the
thread that drives the model grants it slices, and nothing of it is computed between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from stoker.backends.protocol.backend import PicturePart
from stoker.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Placed, PlanItem, Rows
    from stoker.ipc.request import Medium

Layout = tuple[tuple[int, ...] | PicturePart, ...]
"""What an image takes of a prompt: token ids that go around it, and its embeddings in one or more parts."""


class Encoding(Protocol):
    """One image on its way to embeddings; driven by one thread."""

    def run(self, budget_s: float) -> bool:
        """Compute for about so long; whether it is done.

        Raises:
            StepFailedError: the projector failed on it.
        """
        ...

    def result(self) -> Rows:
        """float32 (num_tokens, n_embd), once it is done."""
        ...

    def cancel(self) -> None:
        """Give up what was computed of it; idempotent."""
        ...


class Vision(Protocol):
    """A projector, beside the model whose embeddings it makes."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal; differs between projectors that encode an image differently."""
        ...

    def layout(self, medium: Medium) -> Layout:
        """What stands for an image; encodes nothing, safe to call from worker threads.

        Raises:
            InvalidRequestError: the projector cannot take an image of this shape or a recording of this
                length, or it becomes more tokens than can be computed where they have to be at once.
            UnsupportedError: it takes no images, or no recordings.
        """
        ...

    def begin(self, medium: Medium) -> Encoding:
        """Encode an image, one at a time: not before the one before is done or cancelled."""
        ...


def embeddings_of(item: PlanItem, pictures: Iterable[Placed]) -> Rows:
    """What stands at an item's place, float32 (its tokens, n_embd), a view.

    Raises:
        StepFailedError: there are no embeddings for its place.
    """
    placed, end = placed_at(item, pictures), item.start + len(item.tokens)
    return placed.embeddings[item.start - placed.start : end - placed.start]


def placed_at(item: PlanItem, pictures: Iterable[Placed]) -> Placed:
    """The image that all of an item's tokens are of; StepFailedError: there is none."""
    end = item.start + len(item.tokens)
    for placed in pictures:
        if placed.start <= item.start and end <= placed.start + len(placed.embeddings):
            return placed
    raise StepFailedError(f"sequence {item.seq} has no embeddings for {item.start} to {end}", seq=item.seq)
