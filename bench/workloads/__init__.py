"""The workloads, in the order they run. To add one: a module with a `Workload`, its class in `WORKLOADS`."""

from bench.workloads.exhaustion import Exhaustion
from bench.workloads.fanout import Fanout
from bench.workloads.noisy import Noisy
from bench.workloads.prefill import Prefill
from bench.workloads.priority import Beside
from bench.workloads.single import Single
from bench.workloads.workload import Better, Judged, Metric, Outcome, Workload

WORKLOADS: dict[str, type[Workload]] = {
    kind.name: kind for kind in (Single, Prefill, Fanout, Beside, Exhaustion, Noisy)
}

__all__ = ["WORKLOADS", "Better", "Judged", "Metric", "Outcome", "Workload"]
