"""Prometheus metrics (SPEC O1): what the front measures of each stream, beside what the engine's status says.

Names are the field's with the prefix `stoker:`. Reading them asks the engine for its status and wakes
nothing (SPEC S6). The figures of the status are `status_metrics`'s.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from stoker.errors import StokerError
from stoker.ipc.events import Delta, Finished
from stoker.server.status_metrics import StatusCollector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stoker.ipc.events import Event
    from stoker.ipc.status import ModelStatus
    from stoker.runtime import RuntimeStatus

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._status = StatusCollector()
        self._registry.register(self._status)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", _SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two deltas of one choice.", _TOKEN_SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From submission to a slot, as the engine saw it.", _SECONDS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.outcomes = Counter(
            "stoker:requests", "Requests by how they ended.", ["outcome"], registry=self._registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"stoker:{name}", text, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"stoker:{name}", text, registry=self._registry)

    @contextlib.contextmanager
    def request(self) -> Iterator[StreamMeter]:
        """Measure one stream while the block runs; how the block ends is its outcome."""
        meter = StreamMeter(self)
        outcome = "cancelled"  # unless it gets to its end
        try:
            yield meter
            outcome = "finished"
        except StokerError as error:
            outcome = error.code
            raise
        finally:
            self.generation_tokens.inc(meter.num_tokens)
            self.outcomes.labels(outcome).inc()

    def render(self, status: RuntimeStatus | None, roster: Sequence[ModelStatus] = ()) -> bytes:
        """The text format; without a status the engine's own figures are left out.

        Args:
            status: of the runtime; None: there is none.
            roster: served models as the front last heard of them.
        """
        self._status.status, self._status.roster = status, roster
        return generate_latest(self._registry)


class StreamMeter:
    """Times of one stream, taken where its events pass."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun = time.perf_counter()
        self._last: dict[int, float] = {}
        self.num_tokens = 0

    def note(self, event: Event) -> None:
        """Count one event."""
        if type(event) is Delta:
            if event.token_ids:
                self._note_tokens(event.index, len(event.token_ids))
        elif type(event) is Finished:
            self._metrics.queue_time.observe(event.timings.queue_s)
            self._metrics.prompt_tokens.inc(event.usage.prompt_tokens)

    def _note_tokens(self, index: int, count: int) -> None:
        now = time.perf_counter()
        last = self._last.get(index)
        if last is not None:
            self._metrics.inter_token.observe(now - last)
        elif not self._last:
            self._metrics.first_token.observe(now - self._begun)
        self._last[index] = now
        self.num_tokens += count
