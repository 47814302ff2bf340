"""Alternation: first, second, first, second, so that a slow minute of the machine hits both alike.

Each turn carries what other processes took meanwhile, where both servers are the benchmark's own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bench.company import cores_of_others, cpu_use, load_mean
from bench.results import Comparison, Series, Turn
from bench.stages import medians
from bench.timeline import timeline_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.target import Target
    from bench.workloads.workload import Outcome, Workload

# OpenMP threads spin for a while after their last work; the other server should not pay for that
SETTLE_S = 0.5


async def alternate(
    workload: Workload,
    pair: tuple[Target, Target],
    seeds: range,
    on_turn: Callable[[str], None] = lambda _label: None,
) -> Comparison:
    """Run `workload` on both servers once a seed, in turn; `on_turn` hears whose turn begins."""
    both: tuple[list[Outcome], list[Outcome]] = ([], [])
    turns: tuple[list[Turn], list[Turn]] = ([], [])
    are_ours = all(target.process is not None for target in pair)
    for seed in seeds:
        for target, outcomes, taken in zip(pair, both, turns, strict=True):
            on_turn(target.label)
            await asyncio.sleep(SETTLE_S)
            before = cpu_use()
            outcomes.append(await workload.run(target, seed))
            taken.append(Turn(load_mean(), cores_of_others(before, cpu_use()) if are_ours else None))
    first, second = both
    series = tuple(
        Series(metric, _values(first, metric.key), _values(second, metric.key)) for metric in workload.metrics
    )
    timelines = tuple(timeline_of(outcomes[-1].traces) for outcomes in both if outcomes[-1].traces)
    stages = tuple(medians(o.stages for o in outcomes) for outcomes in both)
    return Comparison(
        workload.name,
        workload.title,
        series,
        timelines,
        stages if any(stages) else (),
        tuple(zip(*turns, strict=True)),
    )


def _values(outcomes: list[Outcome], key: str) -> tuple[float, ...]:
    return tuple(outcome.values[key] for outcome in outcomes)
