"""Metrics of requests and calls that have ended, by model and class, from the runtime's events (SPEC O1).

Owns these families and the bound on their labels. Nothing is counted per token.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from stoker.client.event_bus import RuntimeEvent

MAX_MODELS = 32
"""Models with a label of their own; later ones are "other"."""
_OTHER = "other"
_LABELS = ("model", "priority")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)


class EndedMetrics:
    """Counts the ends that a runtime tells of."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: set[str] = set()
        self._ended = Counter(
            "stoker:ended_requests",
            "Requests, or calls of several, by model, class, kind and outcome.",
            [*_LABELS, "kind", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "stoker:ended_tokens",
            "Their tokens: of prompts, of these from the cache, and of answers.",
            [*_LABELS, "what"],
            registry=registry,
        )
        self._waits = self._histogram("queue", "From arrival to the first slot.", registry)
        self._first_tokens = self._histogram("first_token", "From arrival to the first token.", registry)

    @staticmethod
    def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
        full_name = f"stoker:ended_{name}_seconds"
        return Histogram(full_name, text, _LABELS, buckets=_SECONDS, registry=registry)

    def __repr__(self) -> str:
        return f"<EndedMetrics of {sorted(self._models)}>"

    async def follow(self, events: AsyncGenerator[RuntimeEvent, None]) -> None:
        """Count ends until there are no more events."""
        async with aclosing(events) as followed:
            async for event in followed:
                if event.event == "request" and event.fields.get("what") in {"finished", "failed"}:
                    self.count(event.fields)

    def count(self, fields: Mapping[str, Any]) -> None:
        """Count one end, as its event tells of it."""
        labels = (self._label(fields["model"]), fields["priority"])
        error = fields.get("error")
        outcome = error["code"] if error else fields.get("finish_reason") or _OTHER
        self._ended.labels(*labels, fields["kind"], outcome.partition(",")[0]).inc()
        for what, name in (("prompt", "prompt"), ("cached", "cached"), ("generated", "completion")):
            self._tokens.labels(*labels, what).inc(fields[f"{name}_tokens"])
        self._waits.labels(*labels).observe(fields["queue_s"])
        if fields["first_token_s"] is not None:
            self._first_tokens.labels(*labels).observe(fields["first_token_s"])

    def _label(self, model: str) -> str:
        if model not in self._models and len(self._models) < MAX_MODELS:
            self._models.add(model)
        return model if model in self._models else _OTHER
