"""How a plan is cut into native passes; nothing is computed."""

from __future__ import annotations

from stoker.backends.llama.batch import NONE, Pass, passes
from stoker.backends.protocol.backend import BatchPlan, PlanItem

RED, BLUE = (("red", 1.0),), (("blue", 1.0), ("red", 0.5))


def plan_of(*items: tuple[int, int, int]) -> BatchPlan:
    """Items of (sequence, first token, rows), two tokens each."""
    return BatchPlan(tuple(PlanItem(seq, 0, (token, token), rows) for seq, token, rows in items))


def told(found: list[Pass]) -> list[tuple[object, list[int], tuple[int, ...]]]:
    """Set, sequences and rows of each pass."""
    return [(each.adapters, [item.seq for item in each.plan.items], tuple(each.rows)) for each in found]


def test_one_set_is_one_pass_in_the_plans_own_order() -> None:
    """SPEC K6: whatever the context computed with before."""
    plan = plan_of((3, 7, 1), (1, 7, 2), (2, 7, 0))
    for current in (NONE, RED):
        (found,) = passes(plan, {}, current, range(len(plan.items)))
        assert (found.adapters, found.plan, tuple(found.rows)) == (NONE, plan, (0, 1, 2))


def test_each_set_is_one_pass_and_its_rows_know_their_places() -> None:
    """SPEC K6: the set of the last call first, so that it changes as seldom as can be."""
    plan = plan_of((0, 7, 1), (1, 7, 2), (2, 7, 0), (3, 7, 1), (4, 7, 1))
    sets = {1: RED, 2: BLUE, 4: RED}
    assert told(passes(plan, sets, RED, range(len(plan.items)))) == [
        (RED, [1, 4], (1, 2, 4)),
        (NONE, [0, 3], (0, 3)),
        (BLUE, [2], ()),
    ]
    assert told(passes(plan, sets, BLUE, range(len(plan.items))))[0] == (BLUE, [2], ())


def test_pictures_are_apart_from_tokens_and_beside_their_own_set() -> None:
    """SPEC V3, K6: embeddings and tokens cannot share a call; the set still changes once."""
    plan = plan_of((0, 7, 1), (1, 7, 1), (2, -5, 1), (3, -5, 0))
    found = passes(plan, {1: RED, 3: RED}, NONE, range(len(plan.items)))
    assert told(found) == [(NONE, [0], (0,)), (NONE, [2], (2,)), (RED, [1], (1,)), (RED, [3], ())]
    assert [each.is_pictured for each in found] == [False, True, False, True]
