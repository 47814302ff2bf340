"""The pool of KV cells of the fake backend: exact accounting of cells that sequences share."""

from __future__ import annotations

from stoker.errors import PoolFullError


class FakeCells:
    """`num_cells` cells; each holds one token and may belong to several sequences.

    A sequence's cells are a list of cell numbers in order of position; the caller keeps the lists.
    """

    def __init__(self, num_cells: int) -> None:
        self._num_owners = [0] * num_cells
        self._free = list(range(num_cells - 1, -1, -1))

    def __repr__(self) -> str:
        return f"<FakeCells {self.num_used} of {len(self._num_owners)} used>"

    @property
    def num_used(self) -> int:
        """Cells that belong to at least one sequence."""
        return len(self._num_owners) - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free cells with one owner each, all or none. Raises PoolFullError."""
        if count > len(self._free):
            raise PoolFullError(
                f"{count} cells are needed, {len(self._free)} of {len(self._num_owners)} are free",
                needed=count,
                free=len(self._free),
            )
        taken = [self._free.pop() for _ in range(count)]
        for cell in taken:
            self._num_owners[cell] = 1
        return taken

    def share(self, cells: list[int]) -> None:
        """One more owner for each of these."""
        for cell in cells:
            assert self._num_owners[cell] > 0, f"cell {cell} is free"
            self._num_owners[cell] += 1

    def release(self, cells: list[int]) -> None:
        """One owner less for each of these; a cell without owners is free."""
        for cell in cells:
            assert self._num_owners[cell] > 0, f"cell {cell} is free already"
            self._num_owners[cell] -= 1
            if self._num_owners[cell] == 0:
                self._free.append(cell)

    def check(self) -> None:
        """Assert that every cell is either owned or free, once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a cell is free twice"
        assert all((owners == 0) == (cell in free) for cell, owners in enumerate(self._num_owners))
