"""What a backend's eyes are: a projector that makes embeddings of pictures for its model (SPEC V1 to V3).

Encoding one picture is long beside a step, so it is cut by time: whoever drives the model gives it a slice
now and then, and nothing of it is computed between slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from stoker.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Placed, PlanItem, Rows
    from stoker.ipc.request import Picture

Layout = tuple[tuple[int, ...] | int, ...]
"""What a picture takes of a prompt: token ids that go around it, and numbers of embeddings."""


class Encoding(Protocol):
    """One picture on its way to embeddings; driven by one thread."""

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
        """Hexadecimal; differs between projectors that would see a picture differently."""
        ...

    def layout(self, picture: Picture) -> Layout:
        """What stands for a picture; computes nothing, safe to call from worker threads.

        Raises:
            InvalidRequestError: the projector cannot take a picture of this shape.
        """
        ...

    def begin(self, picture: Picture) -> Encoding:
        """Encode a picture, one at a time: not before the one before is done or cancelled."""
        ...


def embeddings_of(item: PlanItem, pictures: Iterable[Placed]) -> Rows:
    """What stands at an item's place, float32 (its tokens, n_embd), a view.

    Raises:
        StepFailedError: there are no embeddings for its place.
    """
    end = item.start + len(item.tokens)
    for placed in pictures:
        if placed.start <= item.start and end <= placed.start + len(placed.embeddings):
            return placed.embeddings[item.start - placed.start : end - placed.start]
    raise StepFailedError(f"sequence {item.seq} has no embeddings for {item.start} to {end}", seq=item.seq)
