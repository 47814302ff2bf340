"""What was measured and what follows from it: series, ratios, medians. Values only; drawn elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import Any

from bench.workloads.workload import Better, Metric


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over all repetitions: `first[i]` and `second[i]` came back to back on the same prompts.

    A ratio above 1 always means that the first server is better, whatever the metric's direction.
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
            return tuple(a / b for a, b in pairs)
        return tuple(b / a for a, b in pairs)

    @property
    def ratio(self) -> float:
        """The median of the ratios (not the ratio of medians: noise that hits a pair alike cancels).

        The lower of the middle two of an even number: their mean would follow whichever is an outlier.
        """
        return median_low(self.ratios)

    @property
    def is_good(self) -> bool | None:
        """Whether the ratio reaches the metric's bar; None where there is no bar."""
        return None if self.metric.bar is None else self.ratio >= self.metric.bar


@dataclass(frozen=True, slots=True)
class Comparison:
    """A workload's outcome on two servers."""

    workload: str
    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that is no ratio, with the most it may be (None: shown only)."""

    key: str
    title: str
    unit: str
    value: float
    limit: float | None = None

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

    def document(self) -> dict[str, Any]:
        """The report as plain data: every value, every ratio, every verdict."""
        return {
            "labels": list(self.labels),
            "machine": self.machine,
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
                "good": series.is_good,
            }
            for series in comparison.series
        ],
    }
