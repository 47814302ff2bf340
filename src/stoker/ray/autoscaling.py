"""How many replicas a site needs: what a replica tells for that, and the decision. Pure.

Ray Serve's controller loads this module by value, so it holds plain classes and imports little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.ipc.status import EngineStatus

SPARE = 0.7
"""A replica goes only where the others stay below this part of the load at which one would come."""


@dataclass(frozen=True)
class ReplicaLoad:
    """What one replica has to do.

    Attributes:
        slots: requests that generate at once; 0: it takes none now, as it loads or is suspended.
        interactive, background: requests that run or wait.
        waiting: of the interactive ones, those that wait.
        wait_s: how long one more person would wait for a slot.
    """

    slots: float = 0.0
    interactive: float = 0.0
    background: float = 0.0
    waiting: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True)
class ScaleRule:
    """When replicas come and go.

    Attributes:
        load: interactive requests a slot, of all replicas together, at which one more comes.
        wait_s: one more comes where a person would wait longer than that.
        for_background: background work counts as interactive work does.
    """

    load: float = 0.8
    wait_s: float = 5.0
    for_background: bool = False


def load_of(engine: EngineStatus, *, is_taking: bool) -> dict[str, float]:
    """What a replica tells of its engine, for `record_autoscaling_stats`: the fields of a `ReplicaLoad`.

    Args:
        engine: its status.
        is_taking: it takes requests.
    """
    running = [slot.priority for slot in engine.slots if slot.priority is not None]
    waits = [*engine.queue, *engine.parked]
    people = [one for one in waits if one.priority is Priority.INTERACTIVE]
    etas = [one.eta_s for one in engine.queue if one.priority is Priority.INTERACTIVE]
    num_background = len(waits) - len(people) + running.count(Priority.BACKGROUND)
    return {
        "slots": float(len(engine.slots)) if is_taking else 0.0,
        "interactive": float(len(people) + running.count(Priority.INTERACTIVE)),
        "background": float(num_background),
        "waiting": float(len(people)),
        "wait_s": max((eta for eta in etas if eta is not None), default=0.0),
    }


def replicas_wanted(loads: Sequence[ReplicaLoad], rule: ScaleRule) -> int:
    """How many replicas there should be, before the bounds of the site.

    With people who wait longer than the rule says it is one more than take requests now; else as many as keep
    the interactive load of a slot at the rule's. Fewer than there are only where the rest has slots to spare.

    Args:
        loads: of each replica that runs.
        rule: when replicas come and go.
    """
    num_now = len(loads)
    taking = [load for load in loads if load.slots]
    if not taking:
        return num_now
    slots = sum(load.slots for load in taking) / len(taking)
    work = sum(_work(load, rule) for load in loads)
    at_least = math.ceil(work / (slots * rule.load))
    if any(load.wait_s > rule.wait_s for load in loads):
        at_least = max(at_least, len(taking) + 1)
    at_most = math.ceil(work / (slots * rule.load * SPARE))
    return max(at_least, min(num_now, at_most), 1)


def _work(load: ReplicaLoad, rule: ScaleRule) -> float:
    return load.interactive + (load.background if rule.for_background else 0.0)


class InteractivePolicy:
    """`replicas_wanted` as Ray Serve's controller asks for it.

    Args:
        rule: fields of a `ScaleRule`.
    """

    def __init__(self, **rule: Any) -> None:
        self._rule = ScaleRule(**rule)

    def __repr__(self) -> str:
        return f"<InteractivePolicy {self._rule}>"

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and nothing to keep. Delays and bounds are the controller's.

        Args:
            context: Ray Serve's `AutoscalingContext`.
        """
        loads = list(newest_loads(context.raw_metrics or {}, context.running_replicas))
        if not any(load.slots for load in loads):  # they are being started
            return context.target_num_replicas, {}
        return replicas_wanted(loads, self._rule), {}


def newest_loads(metrics: Mapping[str, Mapping[Any, Any]], replicas: Iterable[Any]) -> Iterable[ReplicaLoad]:
    """The last figures of each replica; one that has told nothing yet has no slots.

    Args:
        metrics: series of points with a `value`, by the name of the figure and the replica.
        replicas: those that run.
    """
    for replica in replicas:
        told = {}
        for name in ReplicaLoad.__dataclass_fields__:
            if series := metrics.get(name, {}).get(replica):
                told[name] = series[-1].value
        yield ReplicaLoad(**told)
