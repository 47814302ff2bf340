"""What a workload is: something done to one server, and the numbers that come of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bench.client import Stream
    from bench.peers import Shape
    from bench.target import Target


class Better(StrEnum):
    """Which direction of a metric is the good one."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number a workload yields.

    Attributes:
        key: its name in `Workload.run`'s answer and in the JSON report.
        bar: the least ratio (see `bench.results.Series`) that is good enough; None: shown only.
    """

    key: str
    title: str
    unit: str
    better: Better
    bar: float | None = None


class Workload(ABC):
    """One kind of load. A subclass names itself and its metrics and says how one repetition goes.

    `run` is called for each server in turn with the same seed, so both get the same prompts, and with a new
    seed each repetition, so none is in a cache. What a repetition starts must be over when `run` returns.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]

    @abstractmethod
    async def run(self, target: Target, seed: int) -> Mapping[str, float]:
        """One repetition against one server: a value for each metric, by key."""

    def shape(self, default: Shape) -> Shape:
        """The slots, context and threads this workload needs; servers are restarted when it differs."""
        return default


def require_tokens(streams: Iterable[Stream], num_tokens: int) -> None:
    """Raise BenchError unless every stream has exactly `num_tokens`: a short answer is not a fast one."""
    for stream in streams:
        if stream.completion_tokens != num_tokens:
            raise BenchError(f"{num_tokens} tokens were asked for, {stream.completion_tokens} came")
