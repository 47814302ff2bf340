"""Steps that are quicker with padding: on a CPU llama.cpp's flash attention computes tiles of 64 rows.

With fewer rows it reads the cells of each row and head one by one, with 64 and more it multiplies whole tiles
(`ggml_compute_forward_flash_attn_ext`; keys and values of one type, f16 or f32). So 63 tokens behind 900
others take three times as long as 64 (docs/adr/0039). Knows numbers of tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import BatchPlan
    from stoker.backends.protocol.extensions import Span

TILE = 64
"""Rows from which on it does (`GGML_FA_TILE_Q`)."""
TILED = 1.7
"""An operation of attention takes so many times as long in a tile as one of a product with weights. Measured
1.5 on a Xeon with AVX-512 and 1.6 on an EPYC without, with SmolLM2-135M."""
CAUTIOUS, MOST = 3.0, 12.0
"""The same row by row: where it was not measured, and at most. Measured 11 on that Xeon, 4.9 on that EPYC."""
HALF, BEHIND = TILE // 2, 448
"""What is measured for it: so many rows beside a whole tile, behind so many tokens."""
SURE = 0.05
"""The part of attention in a row there from which what was measured tells of it, and not of the clock."""
LEAST_GAIN = 1.2
"""What is measured is one thread's: heads are dealt to several unevenly, and a tile gains less by them."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """What a model's steps cost, in products of its weights with one row; see `Tiles`.

    Attributes:
        cell: operations that one row takes to attend to one cell, by those of its products.
        by_row: how many times as long one of them takes, where it is done row by row.
    """

    cell: float
    by_row: float = CAUTIOUS

    @classmethod
    def of(
        cls, num_params: int, num_embedded: int, width: int, num_layers: int, half_tile: float = 0.0
    ) -> RowTiles:
        """Of a model with so many parameters, those of its embeddings among them, which rows only look up.

        Of a mixture all experts count, and an output matrix of its own, so less is padded than would pay.

        `half_tile` is what `HALF` rows behind `BEHIND` tokens take on this processor, by what a tile takes
        there; 0: not measured.
        """
        cell = 2 * width * num_layers / max(num_params - num_embedded, 1)
        if not half_tile:
            return cls(cell)
        of_tile = TILE / HALF * (1.0 + TILED * cell * (BEHIND + TILE))
        measured = (half_tile * of_tile - 1.0) / (cell * (BEHIND + HALF / 2))
        weight = min(1.0, cell * BEHIND / SURE)
        return cls(cell, CAUTIOUS + weight * (min(MOST, max(TILED, measured)) - CAUTIOUS))

    @property
    def num_rows(self) -> int:
        """Rows of a tile."""
        return TILE

    def alone(self, spans: Iterable[Span]) -> float:
        """What the rows of some tokens cost in steps of less than a tile."""
        return sum(count * (1.0 + self.by_row * self.cell * (start + count / 2)) for start, count in spans)

    def together(self, spans: Iterable[Span]) -> float:
        """What they cost in one step of a tile or more, padded if they are fewer."""
        num_rows = num_seen = 0
        for start, count in spans:
            num_rows += count
            num_seen += start + count
        return max(num_rows, TILE) * (1.0 + TILED * self.cell * num_seen)

    def num_missing(self, plan: BatchPlan) -> int:
        """Rows of padding with which a step has a tile and is quicker; 0: none.

        Decode rows alone stay as they are. Who wants the logits of several tokens compares them, and a tile
        rounds otherwise than a row alone.
        """
        num_rows = plan.num_tokens
        if not len(plan.items) < num_rows < TILE or any(item.num_logits > 1 for item in plan.items):
            return 0
        spans = [(item.start, len(item.tokens)) for item in plan.items]
        return TILE - num_rows if LEAST_GAIN * self.together(spans) < self.alone(spans) else 0
