"""Budgets of steps on a CPU that computes prompts in tiles of rows (SPEC Q28).

A slice of a prompt beside decode rows is computed row by row. Behind other text each of its tokens costs
several times what it costs in a tile, and in a step with both the tile attends to the cells of all. So there
prompts get whole tiles in steps of their own, short ones before long ones, and between two such steps decode
rows have as many as slices would have left them. A reader sees a gap at times where each token was late, and
who asks has the answer sooner.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stoker.cache.radix import common_prefix
from stoker.ipc.model import Policy
from stoker.scheduler.plan import MIN_PREFILL_TOKENS, StepBudget, fair_shares, one_after_another

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from stoker.backends.protocol.extensions import Tiles
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.cost import StepCost

GAIN = 2.0
"""Readers wait for a tile where slices cost that many times what it does. The last tokens of a prompt, where
they are several slices and no more than a tile, are worth it anyway: readers lose as much by those slices."""
LEAST_GAIN = 1.1
"""Prompts without readers go one after the other where a token costs that many times less so."""
MIN_SLICE_SHARE = 0.5
"""Of its target a slice counts as that much at least."""
A_STEP = 2.0
"""What a step costs besides its rows, in products of the weights with one: it reads them."""


class TiledStepBudget(StepBudget):
    """As `StepBudget`, where a step with so many rows as a tile has costs less than somewhat fewer.

    Args:
        tiles: what steps cost.
    """

    def __init__(  # noqa: PLR0913 - those of every budget, and one
        self,
        cost: StepCost,
        n_batch: int,
        policy: Policy = Policy.LATENCY,
        target_s: float = 0.05,
        max_s: float = math.inf,
        *,
        tiles: Tiles,
    ) -> None:
        super().__init__(cost, n_batch, policy, target_s, max_s)
        self._tiles = tiles
        self._num_owed = 0.0  # steps of the decode rows before the next tile

    def without_rows(self, prompts: SequenceOf[Sequence], num_rows: int) -> dict[Sequence, int]:
        """Tokens of prompts that go in a step without so many interactive decode rows; empty: beside them.

        It is of one tile at most, or of as many as its target has room for. It has what is left of prompts,
        where that is more than a slice, and all of a tile that costs so much less than slices.
        """
        tile = self._tiles.num_rows
        if self.policy is Policy.THROUGHPUT or self.num_left(0) < tile:
            return {}
        most_s = self._targets(num_rows, len(prompts)) * self.target_s
        within = min(self.num_left(0), self._cost.tokens_within(most_s, self.n_batch))
        counts = one_after_another(prompts, max(tile, within - within % tile), self._cost)
        ending = {prompt: count for prompt, count in counts.items() if count == prompt.num_pending}
        spans = [(prompt.num_computed, count) for prompt, count in counts.items()]
        if len(ending) < len(counts) and GAIN * self._tiles.together(spans) <= self._tiles.alone(spans):
            return counts
        num_left = sum(ending.values())
        is_slice = num_left <= self.prefill(num_rows, len(prompts)) or self.can_finish(num_left, num_rows)
        return {} if is_slice else ending

    def slices(self, sequences: list[Sequence], num_tokens: int) -> list[int]:
        """Tokens of each prompt: fair shares, or all of those that a tile of their own brings to their ends.

        These where each token costs so much less there: a step of all attends to the cells of all.
        """
        shares = super().slices(sequences, num_tokens)
        ending = {
            each: count
            for each, count in one_after_another(sequences, self._tiles.num_rows, self._cost).items()
            if count == each.num_pending
        }
        if not ending or sum(shares) <= self._tiles.num_rows:
            return shares
        each_of_all = self._together(zip(sequences, shares, strict=True)) / sum(shares)
        if LEAST_GAIN * self._together(ending.items()) / sum(ending.values()) > each_of_all:
            return shares
        return [ending.get(each, 0) for each in sequences]

    def _together(self, counts: Iterable[tuple[Sequence, int]]) -> float:
        """What so many tokens of each prompt cost in one step; cells of a beginning in common count once."""
        first, spans = None, []
        for prompt, count in counts:
            start = prompt.num_computed
            if first is None:
                first = prompt
            elif first.namespace == prompt.namespace:
                start -= min(start, first.num_computed, common_prefix(first.tokens, prompt.tokens))
            spans.append((start, count))
        return self._tiles.together(spans)

    def background(self, num_tokens: int, *, has_decoding: bool) -> int:
        """Tokens of background beside `num_tokens` of interactive work; none beside a tile of prompts.

        It would attend to the cells of all of them, for some rows that cost less in any other step.
        """
        if (
            not has_decoding
            and 2 * num_tokens >= self._tiles.num_rows
            and self.policy is not Policy.THROUGHPUT
        ):
            return 0
        return super().background(num_tokens, has_decoding=has_decoding)

    def splits(self, rows: list[Sequence], prompts: list[Sequence], num_tokens: int) -> bool:
        """Whether `num_tokens` of prompts and these rows, of background alone, cost less in turns."""
        counts = fair_shares([prompt.num_in_reach for prompt in prompts], num_tokens)
        read = [(prompt.num_computed, count) for prompt, count in zip(prompts, counts, strict=True)]
        decoded = [(row.num_computed, 1) for row in rows]
        if sum(counts) + len(rows) < self._tiles.num_rows:
            return False
        apart = min(self._tiles.together(read), self._tiles.alone(read)) + self._tiles.alone(decoded)
        return apart + A_STEP < self._tiles.together(read + decoded)

    @property
    def owes_rows(self) -> bool:
        """Whether decode rows have their step before the next tile."""
        return self._num_owed > 0.0

    def rows_waited(self, took_s: float, num_rows: int, num_prompts: int) -> None:
        """They waited so long for a step, and are owed as many as slices would have had in that time."""
        alone_s = self._cost.predict(num_rows)
        least_s = self._cost.predict(num_rows + MIN_PREFILL_TOKENS)
        if alone_s is None or least_s is None:
            return
        slice_s = max(self._targets(num_rows, num_prompts) * self.target_s, least_s) - alone_s
        slice_s = max(slice_s, MIN_SLICE_SHARE * self.target_s) * self._cost.slowdown.times
        self._num_owed = min(took_s, self.max_s) / slice_s

    def rows_stepped(self) -> None:
        """They have their step."""
        super().rows_stepped()
        self._num_owed = max(0.0, self._num_owed - 1.0)

    def rows_gone(self) -> None:
        """No interactive sequence decodes any more: the next one is owed nothing."""
        self._num_owed = 0.0
