"""What was measured and what follows from it: series, ratios, medians. Values only; drawn elsewhere."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import median, median_high, median_low
from typing import TYPE_CHECKING, Any

from bench.company import is_disturbed
from bench.stages import Stage, medians
from bench.timeline import Timeline
from bench.workloads.workload import Better, Judged, Metric

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over all repetitions: `first[i]` and `second[i]` came back to back on the same prompts.

    A ratio above 1 always means that the first server is better, whatever the metric's direction. It is
    infinite where the peer gives nothing to divide by, such as no complete answer at all.
    """

    metric: Metric
    first: tuple[float, ...]
    second: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.first or len(self.first) != len(self.second):
            raise ValueError(
                f"{self.metric.key}: {len(self.first)} and {len(self.second)} values do not make pairs"
            )

    @property
    def ratios(self) -> tuple[float, ...]:
        """One ratio a repetition."""
        pairs = zip(self.first, self.second, strict=True)
        if self.metric.better is Better.HIGHER:
            return tuple(_ratio(a, b) for a, b in pairs)
        return tuple(_ratio(b, a) for a, b in pairs)

    @property
    def ratio(self) -> float:
        """The median of the ratios (not the ratio of medians: noise that hits a pair alike cancels).

        The lower of the middle two of an even number: their mean would follow whichever is an outlier.
        """
        return median_low(self.ratios)

    @property
    def judged(self) -> float:
        """What is held against the bar: the ratio, or the first server's own value, median or worst.

        A median of an even number is the worse of the middle two.
        """
        is_higher = self.metric.better is Better.HIGHER
        match self.metric.judged:
            case Judged.RATIO:
                return self.ratio
            case Judged.MEDIAN:
                return median_low(self.first) if is_higher else median_high(self.first)
            case Judged.EACH:
                return min(self.first) if is_higher else max(self.first)

    @property
    def is_good(self) -> bool | None:
        """Whether the metric's bar is reached; None where there is no bar."""
        if self.metric.bar is None:
            return None
        if self.metric.judged is Judged.RATIO or self.metric.better is Better.HIGHER:
            return self.judged >= self.metric.bar
        return self.judged <= self.metric.bar


def _ratio(value: float, by: float) -> float:
    if by:
        return value / by
    return math.inf if value else 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What the machine did while one server had its turn.

    Attributes:
        load: processes that ran or wanted to at its end, mean of a minute; the servers' own are among them.
        others_cores: cores that other processes had, on average; None: not known.
    """

    load: float
    others_cores: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A workload's outcome on two servers.

    Attributes:
        timelines: one a server, of the last repetition, or none.
        stages: those of each server, or none.
        turns: those of the first and the second server in each repetition, or none.
    """

    workload: str
    title: str
    series: tuple[Series, ...]
    timelines: tuple[Timeline, ...] = ()
    stages: tuple[tuple[Stage, ...], ...] = ()
    turns: tuple[tuple[Turn, Turn], ...] = ()

    def without_bars(self) -> Comparison:
        """The same, where nothing is judged."""
        series = (replace(each, metric=replace(each.metric, bar=None)) for each in self.series)
        return replace(self, series=tuple(series))

    @property
    def num_disturbed(self) -> int:
        """Repetitions in which another process took a core from one of the two."""
        return sum(is_disturbed(turn.others_cores for turn in pair) for pair in self.turns)


def joined(starts: Sequence[Comparison]) -> Comparison:
    """One workload's repetitions of several starts of the same two servers, in order."""
    *_, last = starts
    stages = [one.stages for one in starts if one.stages]
    return replace(
        last,
        series=tuple(_in_order(parts) for parts in zip(*(one.series for one in starts), strict=True)),
        stages=tuple(medians(parts) for parts in zip(*stages, strict=True)),
        turns=tuple(pair for one in starts for pair in one.turns),
    )


def _in_order(parts: Sequence[Series]) -> Series:
    first = tuple(value for part in parts for value in part.first)
    second = tuple(value for part in parts for value in part.second)
    return Series(parts[0].metric, first, second)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that is no ratio, with the most it may be (None: shown only).

    `is_disturbed`: another process took a core while it was measured.
    """

    key: str
    title: str
    unit: str
    value: float
    limit: float | None = None
    is_disturbed: bool = False

    @property
    def is_good(self) -> bool | None:
        """Whether the value keeps its limit; None where there is none."""
        return None if self.limit is None else self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `machine` and `settings` are shown as they are; they name no host and no absolute path."""

    labels: tuple[str, str]
    machine: dict[str, str]
    settings: dict[str, str]
    comparisons: tuple[Comparison, ...]
    figures: tuple[Figure, ...]

    @property
    def is_watched(self) -> bool:
        """Whether it is known of any turn what others took."""
        return any(turn.others_cores is not None for turn in self.turns)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns of all workloads."""
        return tuple(turn for each in self.comparisons for pair in each.turns for turn in pair)

    @property
    def load_during(self) -> str:
        """The greatest load of all turns and what others took in them, as text; empty: nothing had a turn."""
        if not self.turns:
            return ""
        load = f"at most {max(turn.load for turn in self.turns):.1f} (1 minute mean, the servers' own in it)"
        taken = [turn.others_cores for turn in self.turns if turn.others_cores is not None]
        if not self.is_watched:
            return f"{load}; what others took is not known"
        return f"{load}; others took {median(taken):.2f} cores, at most {max(taken):.2f}"

    def document(self) -> dict[str, Any]:
        """The report as plain data: every value, every ratio, every verdict."""
        return {
            "labels": list(self.labels),
            "machine": self.machine,
            "load_during": self.load_during,
            "settings": self.settings,
            "workloads": [_comparison_document(comparison) for comparison in self.comparisons],
            "figures": [
                {
                    "key": figure.key,
                    "title": figure.title,
                    "unit": figure.unit,
                    "value": figure.value,
                    "limit": figure.limit,
                    "good": figure.is_good,
                    "disturbed": figure.is_disturbed,
                }
                for figure in self.figures
            ],
        }


def _comparison_document(comparison: Comparison) -> dict[str, Any]:
    return {
        "workload": comparison.workload,
        "title": comparison.title,
        "metrics": [
            {
                "key": series.metric.key,
                "unit": series.metric.unit,
                "better": series.metric.better.value,
                "first": list(series.first),
                "second": list(series.second),
                "ratios": list(series.ratios),
                "ratio": series.ratio,
                "bar": series.metric.bar,
                "judged": series.metric.judged.value,
                "good": series.is_good,
            }
            for series in comparison.series
        ],
        "timelines": [asdict(timeline) for timeline in comparison.timelines],
        "stages": [[asdict(stage) for stage in stages] for stages in comparison.stages],
        "turns": [[asdict(turn) for turn in pair] for pair in comparison.turns],
        "disturbed": comparison.num_disturbed,
    }
