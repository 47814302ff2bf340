"""Where pictures lie in a context's sequences, as llama.cpp counts (docs/adr/0030).

The engine counts tokens, and so do lengths, prefixes, trims and forks. Native positions part from them after
a picture whose tokens lie in a grid (M-RoPE), and a picture whose tokens see each other is computed in one
call. This keeps what a context needs to turn the one into the other: the places of such pictures, and how
much of each its cells hold. Pictures that are read like text have no place here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.backends.llama.batch import NUM_DIMENSIONS, Pass, PictureCall
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.backends.protocol.vision import placed_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from stoker.backends.protocol.backend import Placed

_PLACE = struct.Struct("<IIII")
_COUNT = struct.Struct("<I")


@dataclass(slots=True)
class PicturePlace:
    """A picture, or a part of one, in a sequence.

    Attributes:
        start: tokens before it.
        num_tokens: its own.
        num_positions: by how many it moves the native position on.
        num_held: of its tokens that have cells; all, once the sequence is longer than it.
    """

    start: int
    num_tokens: int
    num_positions: int
    num_held: int = 0

    @property
    def end(self) -> int:
        """Tokens before and in it."""
        return self.start + self.num_tokens


class PicturePlaces:
    """The places of pictures in sequences, in their order.

    Where a sequence ends inside of one, its cells hold a part of it or none: what is missing is computed with
    the tokens that come next. Its cells can only go all together, since they have one native position.
    """

    def __init__(self) -> None:
        self._places: dict[int, list[PicturePlace]] = {}

    def __repr__(self) -> str:
        return f"<PicturePlaces {self._places}>"

    def __bool__(self) -> bool:
        return bool(self._places)

    def native(self, seq: int, length: int) -> int:
        """The native position after `length` tokens; inside of a picture that of its beginning."""
        position = length
        for place in self._places.get(seq, ()):
            if place.start >= length:
                break
            if place.end > length:
                return position - (length - place.start)
            position -= place.num_tokens - place.num_positions
        return position

    # ------------------------------------------------------------ a step

    def laid_out(self, plan: BatchPlan, pictures: Mapping[int, tuple[Placed, ...]]) -> BatchPlan:
        """The plan by native positions, with what its pictures' tokens need beside them.

        A picture whose tokens see each other is left out until the item that ends it.
        """
        items = []
        for item in plan.items:
            places = self._places.get(item.seq)
            while places and places[-1].start >= item.start:  # of a picture that failed to begin
                places.pop()
            placed = placed_at(item, pictures.get(item.seq, ())) if item.tokens[0] < 0 else None
            if placed is not None and not placed.part.is_plain:
                items += self._of_picture(item, placed)
            elif item.seq in self._places:
                items.append(msgspec.structs.replace(item, start=self.native(item.seq, item.start)))
            else:
                items.append(item)
        return BatchPlan(tuple(items))

    def _of_picture(self, item: PlanItem, placed: Placed) -> list[PlanItem]:
        places, part = self._places.setdefault(item.seq, []), placed.part
        if not places or places[-1].start != placed.start:
            num_positions = part.num_tokens if part.grid is None else part.grid.num_positions
            places.append(PicturePlace(placed.start, part.num_tokens, num_positions))
        place = places[-1]
        end = item.start + len(item.tokens)
        if part.is_mutual and end < place.end:
            return []
        tokens = (-1,) * (end - place.start - place.num_held)
        return [PlanItem(item.seq, self.native(item.seq, place.start), tokens, item.num_logits)]

    def apart(self, each: Pass) -> Iterator[Pass]:
        """The same pass with each picture that has a place in one of its own."""
        at, others = 0, []
        rows: list[int] = []
        for item in each.plan.items:
            own = each.rows[at : at + item.num_logits]
            at += item.num_logits
            if self.has(item):
                yield Pass(each.adapters, each.is_pictured, BatchPlan((item,)), own)
            else:
                others.append(item)
                rows += own
        if others:
            yield Pass(each.adapters, each.is_pictured, BatchPlan(tuple(others)), tuple(rows))

    def calls(self, item: PlanItem, pictures: Iterable[Placed], most: int) -> Iterator[PictureCall]:
        """The native calls of at most so many tokens that compute an item of a picture with a place."""
        place = self._place_of(item)
        assert place is not None, f"{item} is of no picture with a place"
        (placed,) = (each for each in pictures if each.start == place.start)
        positions = np.arange(place.num_tokens, dtype=np.int32)[np.newaxis]
        if placed.part.grid is not None:
            positions = np.frombuffer(placed.part.grid.offsets, np.int32).reshape(NUM_DIMENSIONS, -1)
        begin, end = place.num_held, place.num_held + len(item.tokens)
        for at in range(begin, end, most):
            stop = min(at + most, end)
            part = PlanItem(item.seq, 0, item.tokens[: stop - at], item.num_logits if stop == end else 0)
            native = positions[:, at:stop].copy()
            native[: NUM_DIMENSIONS - 1] += item.start
            yield PictureCall(part, placed.embeddings[at:stop], native, placed.part.is_mutual)

    def has(self, item: PlanItem) -> bool:
        """Whether an item of `laid_out` is of a picture that has a place."""
        return self._place_of(item) is not None

    def _place_of(self, item: PlanItem) -> PicturePlace | None:
        places = self._places.get(item.seq)
        if item.tokens[0] >= 0 or not places:
            return None
        return places[-1] if self.native(item.seq, places[-1].start) == item.start else None

    def computed(self, item: PlanItem) -> None:
        """The picture's tokens in an item of `laid_out` have cells."""
        if (place := self._place_of(item)) is not None:
            place.num_held += len(item.tokens)

    def taken_back(self, item: PlanItem) -> None:
        """Cells from the item's native position on are gone, with those of its picture before it."""
        if (place := self._place_of(item)) is not None:
            place.num_held = 0

    # ------------------------------------------------------------ whole sequences

    def trim(self, seq: int, length: int) -> int:
        """Keep what `length` tokens hold; the native position from which cells have to go."""
        return self.fork(seq, seq, length)

    def fork(self, src: int, dst: int, length: int) -> int:
        """Let `dst` have what `length` tokens of `src` hold; the native position up to which cells count."""
        position = self.native(src, length)
        kept = [replace(place) for place in self._places.get(src, ()) if place.start < length]
        if kept and kept[-1].end > length:
            kept[-1].num_held = 0
        self._places[dst] = kept
        if not kept:
            self.drop(dst)
        return position

    def drop(self, seq: int) -> None:
        """Forget a sequence."""
        self._places.pop(seq, None)

    def packed(self, seq: int) -> bytes:
        """The sequence's places, their count last; empty where it has none."""
        places = self._places.get(seq)
        if not places:
            return b""
        table = (_PLACE.pack(at.start, at.num_tokens, at.num_positions, at.num_held) for at in places)
        return b"".join(table) + _COUNT.pack(len(places))

    def unpack(self, seq: int, payload: memoryview) -> int:
        """Give the empty sequence the places at the end of `payload`; how many of its bytes these are."""
        count = int(_COUNT.unpack_from(payload, len(payload) - _COUNT.size)[0])
        size = count * _PLACE.size + _COUNT.size
        table = payload[len(payload) - size : len(payload) - _COUNT.size]
        self._places[seq] = [PicturePlace(*numbers) for numbers in _PLACE.iter_unpack(table)]
        return size
