"""What a workload is: something done to one server, and the numbers that come of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from bench.client import BrokenStream, Stream
from bench.errors import BenchError
from bench.stages import Stage
from bench.timeline import Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.peers import Shape
    from bench.target import Target
    from stoker.ipc.request import Priority


class Better(StrEnum):
    """Which direction of a metric is the good one."""

    HIGHER = "higher"
    LOWER = "lower"


class Judged(StrEnum):
    """What a metric's bar is held against.

    `RATIO`: the median ratio to the peer (see `bench.results.Series`), which must reach it. The others take
    the first server's own values, which must be no worse than the bar: their `MEDIAN`, or `EACH` of them.
    """

    RATIO = "ratio"
    MEDIAN = "median"
    EACH = "each"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number a workload yields.

    Attributes:
        key: its name in the `values` of an `Outcome` and in the JSON report.
        bar: what is good enough; None: shown only.
        judged: what the bar is held against.
        in_picture: whether its ratio is worth a row of the chart; the tables hold every metric.
    """

    key: str
    title: str
    unit: str
    better: Better
    bar: float | None = None
    judged: Judged = Judged.RATIO
    in_picture: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one repetition gave.

    Attributes:
        values: one for each metric by key.
        traces: who ran when, if that is worth a picture.
        stages: what a cache did, if that is.
    """

    values: Mapping[str, float]
    traces: tuple[Trace, ...] = ()
    stages: tuple[Stage, ...] = ()


class Workload(ABC):
    """One kind of load. A subclass names itself and its metrics and says how one repetition goes.

    `run` is called for each server in turn with the same seed, so both get the same prompts, and with a new
    seed each repetition, so none is in a cache. What a repetition starts must be over when `run` returns.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    ends_servers: ClassVar[bool] = False
    """Whether it stops and starts its server, so that only one the benchmark started will do."""

    @abstractmethod
    async def run(self, target: Target, seed: int) -> Outcome:
        """One repetition against one server."""

    def shape(self, default: Shape) -> Shape:
        """The slots, context and threads this workload needs; servers are restarted when it differs."""
        return default


PAUSES = (
    Metric("itl_p95_ms", "between tokens, p95", "ms", Better.LOWER, bar=1 / 1.15, in_picture=False),
    Metric("itl_max_ms", "between tokens, longest", "ms", Better.LOWER, bar=1 / 2, in_picture=False),
)
"""How long a reader waits for the next piece of text: p95 and the longest of all that read."""


def pauses(streams: Iterable[Stream]) -> dict[str, float]:
    """The values of `PAUSES`; each stream has two arrivals of text at least."""
    gaps_ms = [gap_s * 1e3 for stream in streams for gap_s in stream.gaps_s]
    return {"itl_p95_ms": percentile(gaps_ms, 95), "itl_max_ms": max(gaps_ms)}


def require_tokens(streams: Iterable[Stream], num_tokens: int) -> None:
    """Raise BenchError unless every stream has exactly `num_tokens`: a short answer is not a fast one."""
    for stream in streams:
        if stream.completion_tokens != num_tokens:
            raise BenchError(f"{num_tokens} tokens were asked for, {stream.completion_tokens} came")


def trace_of(outcome: Stream | BrokenStream, priority: Priority, num_tokens: int) -> Trace:
    """What was seen of a request that asked for exactly `num_tokens`."""
    return Trace(
        priority=priority,
        sent_s=outcome.sent_s,
        token_times_s=outcome.token_times_s,
        ended_s=outcome.last_s,
        is_complete=isinstance(outcome, Stream) and outcome.completion_tokens == num_tokens,
    )


def wall_s(traces: Iterable[Trace]) -> float:
    """Seconds from the first request sent to the last one ended."""
    seen = list(traces)
    return max(trace.ended_s for trace in seen) - min(trace.sent_s for trace in seen)


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of `values` that at least `percent` of them do not exceed (of few values: the greatest)."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
