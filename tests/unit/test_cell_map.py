"""The map of a unified pool: which cells tokens take, who shares them, what has to be moved."""

from __future__ import annotations

import pytest

from stoker.backends.cell_map import CellMap, Stretch
from stoker.errors import PoolFullError


def test_new_tokens_take_the_lowest_free_cells() -> None:
    """adr/0019: as llama.cpp's search does, which begins at the lowest cell that was freed."""
    cells = CellMap(8)
    cells.append(0, 2)
    cells.append(1, 2)
    cells.append(2, 1)
    cells.trim(0, 0)
    cells.append(2, 3)
    assert cells.cells(2) == [4, 0, 1, 5]
    assert not cells.is_in_order(2)
    assert not cells.has_hole


def test_a_cell_is_free_when_its_last_owner_lets_go() -> None:
    """SPEC C3: shared cells count once."""
    cells = CellMap(4)
    cells.append(0, 3)
    cells.fork(0, 1, 2)
    cells.trim(0, 0)
    assert cells.num_used == 2
    with pytest.raises(PoolFullError, match="3 cells are needed, 2 of 4 are free"):
        cells.append(2, 3)
    assert cells.num_used == 2
    cells.trim(1, 0)
    assert cells.num_used == 0
    cells.check()


def test_what_is_behind_a_free_cell_is_moved_for_all_who_share_it() -> None:
    """adr/0019: shared tokens first, once, then each one's own; who does not run stays where it is."""
    cells = CellMap(20)
    cells.append(9, 3)
    cells.append(0, 4)
    cells.fork(0, 1, 3)
    cells.append(1, 2)
    cells.append(5, 2)
    cells.trim(9, 1)
    found = []
    for stretch in cells.loose([1], most=2):
        found.append(stretch)
        cells.moved(stretch)
    assert found == [Stretch((0, 1), 0, 2), Stretch((0, 1), 2, 3), Stretch((1,), 3, 5)]
    assert (cells.cells(0), cells.cells(1), cells.cells(5)) == ([1, 2, 3, 6], [1, 2, 3, 4, 5], [9, 10])
    assert list(cells.loose([1, 0], most=2)) == []
    cells.check()


def test_nothing_is_moved_that_has_no_free_cell_before_it() -> None:
    """adr/0019: a hole behind a sequence does not matter to it."""
    cells = CellMap(10)
    cells.append(0, 2)
    cells.append(1, 2)
    cells.append(2, 2)
    cells.trim(1, 0)
    assert cells.has_hole
    assert list(cells.loose([0], most=9)) == []
    assert list(cells.loose([2], most=9))[:1] == [Stretch((2,), 0, 2)]
