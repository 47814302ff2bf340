"""What is counted of requests and calls when they end, by model and class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from stoker.server.tracing.intervals import intervals

if TYPE_CHECKING:
    from stoker.ipc.status import RequestStatus

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
"""Buckets of times that a person notices."""
MAX_MODELS = 32
"""Models with a label of their own; later ones are "other"."""
OTHER = "other"
LABELS = ("model", "priority")


class ModelLabels:
    """Labels of models: a bounded number of names, so that who makes up names makes no metrics."""

    def __init__(self) -> None:
        self._models: set[str] = set()

    def __repr__(self) -> str:
        return f"<ModelLabels of {sorted(self._models)}>"

    def label(self, model: str) -> str:
        """Its name, or "other" where MAX_MODELS others have labels."""
        if model not in self._models and len(self._models) < MAX_MODELS:
            self._models.add(model)
        return model if model in self._models else OTHER


class EndedMetrics:
    """Requests and calls that have ended, by model and class.

    Args:
        registry: shows them.
        labels: of the models.
    """

    def __init__(self, registry: CollectorRegistry, labels: ModelLabels | None = None) -> None:
        self._model_labels = labels or ModelLabels()
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}
        self._ended = Counter(
            "stoker:ended_requests",
            "Requests, or calls of several, by model, class, kind and outcome.",
            [*LABELS, "kind", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "stoker:ended_tokens",
            "Their tokens: of prompts, of these from the cache, and of answers.",
            [*LABELS, "what"],
            registry=registry,
        )
        self._parks = Counter(
            "stoker:ended_parks", "How often others got their slots.", LABELS, registry=registry
        )
        self._parked = Counter(
            "stoker:ended_parked_seconds", "How long they waited parked.", LABELS, registry=registry
        )
        self._states = Counter(
            "stoker:ended_state_seconds",
            "How long they, or their choices, were in each state.",
            [*LABELS, "state"],
            registry=registry,
        )
        self._restarts = Counter(
            "stoker:ended_restarts", "Ends of engines that they survived.", LABELS, registry=registry
        )
        self._durations = self._histogram("duration", "From arrival to the end.", registry)
        self._waits = self._histogram("queue", "From arrival to the first slot.", registry)
        self._first_tokens = self._histogram("first_token", "From arrival to the first token.", registry)

    @staticmethod
    def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
        full_name = f"stoker:ended_{name}_seconds"
        return Histogram(full_name, text, LABELS, buckets=SECONDS, registry=registry)

    def __repr__(self) -> str:
        return f"<EndedMetrics of {self._model_labels!r}>"

    def count(self, end: RequestStatus) -> None:
        """Count one that has ended."""
        labels = (self._model_labels.label(end.model), str(end.priority))
        outcome = end.error.code if end.error else end.finish_reason or OTHER
        of = self._child
        of(self._ended, *labels, end.kind, outcome.partition(",")[0]).inc()
        of(self._tokens, *labels, "prompt").inc(end.prompt_tokens)
        of(self._tokens, *labels, "cached").inc(end.cached_tokens)
        of(self._tokens, *labels, "generated").inc(end.completion_tokens)
        of(self._parks, *labels).inc(end.num_parks)
        of(self._parked, *labels).inc(end.parked_s)
        of(self._waits, *labels).observe(end.queue_s)
        if end.first_token_s is not None:
            of(self._first_tokens, *labels).observe(end.first_token_s)
        of(self._durations, *labels).observe(end.end_to_end_s)
        of(self._restarts, *labels).inc(end.num_restarts)
        for each in intervals(end.moves, end.arrived_at + end.end_to_end_s):
            if each.length_s > 0:
                of(self._states, *labels, each.move.state).inc(each.length_s)

    def _child(self, metric: Any, *labels: str) -> Any:
        """`metric.labels(*labels)`, kept: to find it there takes longer than to count."""
        found = self._children.get((metric, labels))
        if found is None:
            found = self._children[metric, labels] = metric.labels(*labels)
        return found
