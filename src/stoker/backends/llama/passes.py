"""Cuts a plan into native passes: what one call of llama.cpp can compute together.

A context has one set of adapters at a time, and a call takes tokens or embeddings, so items of sequences
with different sets go into different calls, and so do those of pictures. Pure; computing the passes and
taking them back is `context`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.backends.protocol.backend import BatchPlan, PlanItem

if TYPE_CHECKING:
    from collections.abc import Mapping

AdapterSet = tuple[tuple[str, float], ...]
"""Name and scale of each adapter, in the order of names."""

NONE: AdapterSet = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """Items that are computed in one call.

    Attributes:
        adapters: what their sequences are computed with.
        is_pictured: embeddings stand at their places, and no tokens.
        plan: the items, in the order of the whole plan.
        rows: where each of its rows of logits goes among the rows of the whole plan.
    """

    adapters: AdapterSet
    is_pictured: bool
    plan: BatchPlan
    rows: tuple[int, ...]


def passes(plan: BatchPlan, adapters: Mapping[int, AdapterSet], current: AdapterSet) -> list[Pass]:
    """The plan by adapter sets: that of the last call first, as changing it costs, and each set once.

    Args:
        plan: one step.
        adapters: the set of each sequence that has one.
        current: what the context computed with last.
    """
    groups: dict[tuple[AdapterSet, bool], list[tuple[int, PlanItem]]] = {}
    row = 0
    for item in plan.items:
        kind = adapters.get(item.seq, NONE), item.tokens[0] < 0
        groups.setdefault(kind, []).append((row, item))
        row += item.num_logits

    def order(kind: tuple[AdapterSet, bool]) -> tuple[bool, AdapterSet]:
        return kind[0] != current, kind[0]

    return [_pass(*each, groups[each]) for each in sorted(groups, key=order)]


def _pass(adapters: AdapterSet, is_pictured: bool, group: list[tuple[int, PlanItem]]) -> Pass:  # noqa: FBT001
    rows = tuple(row + index for row, item in group for index in range(item.num_logits))
    return Pass(adapters, is_pictured, BatchPlan(tuple(item for _, item in group)), rows)
