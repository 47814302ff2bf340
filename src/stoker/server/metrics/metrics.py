"""Prometheus metrics (SPEC O1): of each request while it runs and at its end, and of the engine's status.

Names are the field's with the prefix `stoker:`. Reading them asks the engine for its status and wakes
nothing (SPEC S6).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from stoker.errors import StokerError
from stoker.ipc.events import Delta, Finished
from stoker.ipc.request import Priority
from stoker.server.metrics.collector import StatusCollector
from stoker.server.metrics.ended import SECONDS, EndedMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stoker.ipc.events import Event
    from stoker.ipc.status import GroupStatus, ModelStatus
    from stoker.ipc.usage import Timings, Usage
    from stoker.runtime import RuntimeStatus


_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._status = StatusCollector()
        self._registry.register(self._status)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two deltas of one choice.", _TOKEN_SECONDS
        )
        self.inter_token_by_class = Histogram(
            "stoker:inter_token_by_class_seconds",
            "Between two deltas of one choice, by class.",
            ["priority"],
            buckets=_TOKEN_SECONDS,
            registry=self._registry,
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From submission to a slot, as the engine saw it.", SECONDS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.outcomes = Counter(
            "stoker:requests",
            "Requests that generate, by how they ended.",
            ["outcome"],
            registry=self._registry,
        )
        self.kinds = KindMetrics(self._registry)
        self.ended = EndedMetrics(self._registry)
        self._meters: set[StreamMeter] = set()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"stoker:{name}", text, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"stoker:{name}", text, registry=self._registry)

    @contextlib.contextmanager
    def request(self, kind: str, priority: Priority = Priority.INTERACTIVE) -> Iterator[StreamMeter]:
        """Measure one stream while the block runs; how the block ends is its outcome."""
        meter = StreamMeter(self, priority)
        self._meters.add(meter)
        outcome = "cancelled"  # unless it gets to its end
        try:
            yield meter
            outcome = "finished"
        except StokerError as error:
            outcome = error.code
            raise
        finally:
            self._meters.remove(meter)
            meter.count_gaps()
            self.generation_tokens.inc(meter.num_tokens)
            self.outcomes.labels(outcome).inc()
            self.kinds.count(kind, outcome, meter.age_s, meter.finished)

    def count_call(self, call: GroupStatus, outcome: str) -> None:
        """Count a call of several requests that has ended."""
        finished = (call.usage, call.timings) if call.num_done else None
        self.kinds.count(call.kind, outcome, call.age_s, finished)

    def render(self, status: RuntimeStatus | None, models: Sequence[ModelStatus] = ()) -> bytes:
        """The text format; without a status the engine's own figures are left out.

        Args:
            status: of the runtime; None: there is none.
            models: served models as the client last heard of them.
        """
        self._status.status, self._status.models = status, models
        for meter in self._meters:
            meter.count_gaps()
        return generate_latest(self._registry)


class KindMetrics:
    """The same figures of every kind of request: chat, completion, embed, rerank, choose, state, read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "stoker:requests_by_kind",
            "Requests, or calls of several, by kind and by how they ended.",
            ["kind", "outcome"],
            registry=registry,
        )
        self._durations = Histogram(
            "stoker:request_duration_seconds",
            "From submission to the end.",
            ["kind"],
            buckets=SECONDS,
            registry=registry,
        )
        self._queue_times = Histogram(
            "stoker:queue_time_by_kind_seconds",
            "From submission to the first work, as the engine saw it.",
            ["kind"],
            buckets=SECONDS,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "stoker:prompt_tokens_by_kind", "Prompt tokens of what finished.", ["kind"], registry=registry
        )

    def count(
        self, kind: str, outcome: str, duration_s: float, finished: tuple[Usage, Timings] | None
    ) -> None:
        """Count one that has ended; `finished` is of what of it has finished, None: nothing."""
        self._ended.labels(kind, outcome).inc()
        self._durations.labels(kind).observe(duration_s)
        if finished is not None:
            usage, timings = finished
            self._queue_times.labels(kind).observe(timings.queue_s)
            self._prompt_tokens.labels(kind).inc(usage.prompt_tokens)


MAX_GAPS = 256
"""Times between deltas that one stream keeps before they are counted."""


class StreamMeter:
    """Times of one stream, taken where its events pass.

    Times between deltas are kept, and counted many at once: before figures are read, and at the end.
    """

    def __init__(self, metrics: Metrics, priority: Priority) -> None:
        self._metrics = metrics
        self._gaps_of_class = metrics.inter_token_by_class.labels(priority)
        self._begun = time.perf_counter()
        self._last: dict[int, float] = {}
        self._gaps: list[float] = []
        self.num_tokens = 0
        self.finished: tuple[Usage, Timings] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._begun

    def note(self, event: Event) -> None:
        """Count one event."""
        if type(event) is Delta:
            if not event.token_ids:
                return
            now, last = time.perf_counter(), self._last.get(event.index)
            if last is not None:
                self._gaps.append(now - last)
                if len(self._gaps) == MAX_GAPS:
                    self.count_gaps()
            elif not self._last:
                self._metrics.first_token.observe(now - self._begun)
            self._last[event.index] = now
            self.num_tokens += len(event.token_ids)
        elif type(event) is Finished:
            self._metrics.queue_time.observe(event.timings.queue_s)
            self._metrics.prompt_tokens.inc(event.usage.prompt_tokens)
            self.finished = event.usage, event.timings

    def count_gaps(self) -> None:
        """Count what is kept."""
        gaps, self._gaps = self._gaps, []
        for gap_s in gaps:
            self._metrics.inter_token.observe(gap_s)
            self._gaps_of_class.observe(gap_s)
