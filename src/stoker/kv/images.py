"""Where pictures stand in a sequence, and how far it may go before they were looked at (SPEC V3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Placed
    from stoker.ipc.request import Picture


@dataclass(frozen=True, slots=True, eq=False)
class PictureSpan:
    """A place of a picture, or of a part of one.

    Attributes:
        start: position of its first embedding.
        num_tokens: how many there are.
        picture: what it shows.
        key: the tokens that stand for the whole picture, four bytes each: equal for equal ones (SPEC C11).
        offset: how many of the picture's embeddings are in parts before it.
    """

    start: int
    num_tokens: int
    picture: Picture
    key: bytes
    offset: int = 0

    def __repr__(self) -> str:
        return f"<PictureSpan {self.start} to {self.end}>"

    @property
    def end(self) -> int:
        """Position after its last embedding."""
        return self.start + self.num_tokens


def unseen(spans: Iterable[PictureSpan], placed: Iterable[Placed], num_computed: int) -> list[PictureSpan]:
    """The pictures still to be computed whose embeddings are not there yet, in their order."""
    seen = {each.start for each in placed}
    return [span for span in spans if span.end > num_computed and span.start not in seen]


def next_border(spans: Iterable[PictureSpan], num_computed: int) -> int | None:
    """Where the run of tokens, or the picture, of the next position ends: a step takes one or the other."""
    borders = (border for span in spans for border in (span.start, span.end))
    return next((border for border in borders if border > num_computed), None)
