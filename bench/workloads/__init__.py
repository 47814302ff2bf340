"""The workloads, in the order they run. To add one: a module with a `Workload`, its class in `WORKLOADS`."""

from bench.workloads.agents import Agents
from bench.workloads.exhaustion import Exhaustion
from bench.workloads.fanout import Fanout
from bench.workloads.noisy import Noisy
from bench.workloads.prefill import Prefill
from bench.workloads.priority import Beside
from bench.workloads.quote import Quote
from bench.workloads.restart import Restart
from bench.workloads.shared import Shared, TakeOver
from bench.workloads.single import Single
from bench.workloads.turns import TightTurns, Turns, TurnsAlone
from bench.workloads.workload import Better, Judged, Metric, Outcome, Workload

WORKLOADS: dict[str, type[Workload]] = {
    kind.name: kind
    for kind in (
        *(Single, Prefill, Fanout, Beside, Exhaustion, Noisy),
        *(Shared, TakeOver, Turns, TurnsAlone, TightTurns, Restart, Agents),
        Quote,
    )
}

__all__ = ["WORKLOADS", "Better", "Judged", "Metric", "Outcome", "Workload"]
