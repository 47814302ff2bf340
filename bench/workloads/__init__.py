"""The workloads, in the order they run. To add one: a module with a `Workload`, its class in `WORKLOADS`."""

from bench.workloads.fanout import Fanout
from bench.workloads.prefill import Prefill
from bench.workloads.single import Single
from bench.workloads.workload import Better, Metric, Workload

WORKLOADS: dict[str, type[Workload]] = {kind.name: kind for kind in (Single, Prefill, Fanout)}

__all__ = ["WORKLOADS", "Better", "Metric", "Workload"]
