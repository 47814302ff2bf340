"""Families of gauges and counters as a scrape gets them, each made in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Key = TypeVar("Key", bound=tuple[str, ...])

PREFIX = "stoker:"


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels; `name` has no prefix."""
    return GaugeMetricFamily(PREFIX + name, text, value)


def counter(name: str, text: str, value: float) -> Metric:
    """A counter without labels; `name` has neither prefix nor `_total`."""
    return CounterMetricFamily(PREFIX + name, text, value)


def gauges(name: str, text: str, labels: Iterable[str], values: Mapping[Key, float | None]) -> Metric:
    """A gauge with labels.

    Args:
        name: without the prefix.
        text: what it is.
        labels: names of the labels.
        values: by the values of the labels, in their order; None: not known, so left out.
    """
    family = GaugeMetricFamily(PREFIX + name, text, labels=list(labels))
    for key, value in values.items():
        if value is not None:
            family.add_metric(list(key), value)
    return family


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter with one label, by its values; `name` has neither prefix nor `_total`."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def one_of(name: str, text: str, levels: Iterable[str], level: str) -> Metric:
    """A gauge with the label `level` that is 1 at one of the levels and 0 at the others."""
    return gauges(name, text, ["level"], {(known,): float(known == level) for known in levels})
