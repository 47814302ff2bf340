"""Cells that nobody who runs needs: how many may stay, and when the others go.

Attention walks over every cell up to the last one in use, so what is only kept costs each step something.
What goes is stored if it is worth it; where its cells are, and who waits in cells, is the room's to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.kv.ops import Drop, Export, Fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.kv.allocator import KVAllocator
    from stoker.kv.ops import Effect, Schedule
    from stoker.scheduler.throttle import Throttle

REST_CELLS = 512
"""Cells that may be held for nobody who runs: attention walks over them, 7 % of a step each 1,000."""
BUSY_CELLS = 1024
"""The same while others run or wait in their cells: those left are moved together then (docs/adr/0019)."""
STORABLE_CELLS = 256
"""The same of what has ended and can be stored: it comes back quicker than attention walks over it."""


class Trimming:
    """What is held for nobody in one room.

    Attributes:
        is_due: somebody left cells behind since it was last looked at.
    """

    def __init__(self, allocator: KVAllocator) -> None:
        self._allocator = allocator
        self.is_due = False

    def __repr__(self) -> str:
        return f"<Trimming of {self._allocator!r}, {'due' if self.is_due else 'seen to'}>"

    def shed(
        self, turn: Schedule, free_kept: Callable[[Schedule], bool], throttle: Throttle | None = None
    ) -> None:
        """Free what is too much: before somebody starts only what costs no time, the rest a turn later.

        `free_kept` frees something that no running sequence needs; False: there is nothing.
        """
        if throttle is not None and throttle.keeps_nothing:
            while self._allocator.evict_oldest(turn.effects):
                pass
        elif turn.admitted:
            self._drop_copied(turn)
        elif self.is_due:
            self._free(turn, free_kept)
            self.is_due = False

    def _drop_copied(self, turn: Schedule) -> None:
        """What is put into cells in this turn then fills the holes; but nothing goes before it was shared."""
        dropped: list[Effect] = []
        self._allocator.drop_copied(dropped)
        needed = {_source(effect) for effect in turn.effects}
        is_needed = any(isinstance(effect, Drop) and effect.seq in needed for effect in dropped)
        turn.effects = turn.effects + dropped if is_needed else dropped + turn.effects

    def _free(self, turn: Schedule, free_kept: Callable[[Schedule], bool]) -> None:
        allocator = self._allocator
        allowed = BUSY_CELLS if allocator.slots.has_cells_in_use else REST_CELLS
        while allocator.num_surplus() > allowed and free_kept(turn):
            pass
        while allocator.num_storable() > STORABLE_CELLS and allocator.evict_oldest(turn.effects):
            pass


def _source(effect: Effect) -> int | None:
    """The sequence that an effect reads."""
    match effect:
        case Fork(src) | Export(src):
            return src
    return None
