"""Where a step is padded, because llama.cpp's attention is quicker with a tile of rows."""

from __future__ import annotations

import pytest

from stoker.backends.llama import row_tiles
from stoker.backends.llama.row_tiles import TILE, RowTiles
from stoker.backends.protocol.backend import BatchPlan, PlanItem

SMALL = RowTiles.of(134_515_008, 49152 * 576, 576, 30)
LARGE = RowTiles.of(8_030_261_248, 128256 * 4096, 4096, 32)


def step(*items: tuple[int, int]) -> BatchPlan:
    """A sequence each, by the tokens that it has and those that it gets."""
    return BatchPlan(tuple(PlanItem(seq, start, (0,) * count, 1) for seq, (start, count) in enumerate(items)))


def fewest(tiles: RowTiles, start: int) -> int:
    """Rows from which on a step behind so many tokens gets more."""
    counts = range(1, TILE)
    return next((count for count in counts if tiles.num_missing(step((start, count)))), TILE)


def test_fewer_rows_are_padded_the_more_each_of_them_reads() -> None:
    """SPEC Q24: 63 rows are dearer than 64 soon, a few only behind a long text."""
    needed = [fewest(SMALL, start) for start in (0, 323, 900, 4000, 8000)]
    assert needed == sorted(needed, reverse=True)
    assert needed[0] > 55
    assert 33 <= needed[1] < 50, "measured: as long from 33 on"
    assert 22 <= needed[2] < 40, "measured: as long from 22 on"
    assert 2 < needed[-1] < 20


def test_a_large_model_has_less_of_attention() -> None:
    """SPEC Q24: its weights are most of a step, and padding takes as long as other rows there."""
    for start in (323, 900, 4000):
        assert fewest(LARGE, start) > fewest(SMALL, start)


@pytest.mark.parametrize(
    "items", [[(900, 1)], [(8000, 1)] * 60, [(900, TILE)], [(900, TILE + 1)], [(900, 40), (0, 24)]]
)
def test_decode_rows_alone_and_a_whole_tile_stay_as_they_are(
    items: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC Q24: whatever the estimate says."""
    monkeypatch.setattr(row_tiles, "LEAST_GAIN", 0.0)
    assert SMALL.num_missing(step(*items)) == 0


def test_the_rows_of_a_step_count_together() -> None:
    """SPEC Q24: prompts and decode rows; each sees its own cells, and a tile those of all."""
    assert SMALL.num_missing(step((900, 20), (900, 20))) == TILE - 40
    assert SMALL.num_missing(step((900, 1), (900, 1), (900, 45))) == TILE - 47
    assert SMALL.num_missing(step((0, 20), (0, 20))) == 0


def test_rows_that_are_compared_are_computed_as_they_are() -> None:
    """SPEC Q24, D6: log probabilities of a prompt, and guesses."""
    plan = BatchPlan((PlanItem(0, 900, (0,) * 50, 2),))
    assert SMALL.num_missing(plan) == 0
