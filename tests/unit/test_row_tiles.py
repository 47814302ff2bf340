"""Where a step is padded, because llama.cpp's attention is quicker with a tile of rows."""

from __future__ import annotations

import pytest

from stoker.backends.llama import row_tiles
from stoker.backends.llama.row_tiles import TILE, RowTiles
from stoker.backends.protocol.backend import BatchPlan, PlanItem

SIZES = (134_515_008, 49152 * 576, 576, 30)
LARGE_SIZES = (8_030_261_248, 128256 * 4096, 4096, 32)
XEON, EPYC = 0.978, 0.68
"""What 32 rows take there beside a tile of SmolLM2-135M."""
SMALL = RowTiles.of(*SIZES, XEON)
LARGE = RowTiles.of(*LARGE_SIZES, 0.52)


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


def test_a_processor_that_reads_row_by_row_quickly_pads_less() -> None:
    """SPEC Q24: 31 rows behind 900 take 265 ms there, and 412 with padding; 63 take 455, and 360."""
    quick = RowTiles.of(*SIZES, EPYC)
    assert 4 < quick.by_row < 5.5
    assert 9 < SMALL.by_row < 12, "measured: 11"
    for start, least, most in ((323, 50, 63), (900, 42, 60)):
        assert least <= fewest(quick, start) <= most
    assert fewest(SMALL, 900) < 40


@pytest.mark.parametrize(("half_tile", "by_row"), [(0.0, 3.0), (0.2, 1.7), (9.0, 12.0)])
def test_what_cannot_be_is_not_believed(half_tile: float, by_row: float) -> None:
    """SPEC Q24: another program ran meanwhile; where nothing is measured, little is padded."""
    assert RowTiles.of(*SIZES, half_tile).by_row == pytest.approx(by_row)


def test_a_large_model_tells_little_of_attention() -> None:
    """SPEC Q24: a clock that is off by a twentieth would make it four times as dear."""
    low, high = (RowTiles.of(*LARGE_SIZES, 0.52 * off).by_row for off in (0.97, 1.03))
    assert high - low < 2.0


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
    assert SMALL.num_missing(step((900, 1), (900, 1), (900, 55))) == TILE - 57
    assert SMALL.num_missing(step((0, 20), (0, 20))) == 0


def test_rows_that_are_compared_are_computed_as_they_are() -> None:
    """SPEC Q24, D6: log probabilities of a prompt, and guesses."""
    plan = BatchPlan((PlanItem(0, 900, (0,) * 50, 2),))
    assert SMALL.num_missing(plan) == 0
