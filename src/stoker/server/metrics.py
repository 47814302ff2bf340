"""Prometheus metrics (SPEC O1): of each request while it runs and at its end, and of the engine's status.

Names are the field's with the prefix `stoker:`. Reading them asks the engine for its status and wakes
nothing (SPEC S6).
"""

from __future__ import annotations

import collections
import contextlib
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stoker.errors import StokerError
from stoker.ipc.events import Delta, Finished
from stoker.ipc.model import ModelLife
from stoker.ipc.request import Priority
from stoker.ipc.usage import CacheSource
from stoker.server.context import models_now

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stoker.ipc.events import Event
    from stoker.ipc.status import (
        CacheStatus,
        DeviceStatus,
        GroupStatus,
        MemoryStatus,
        ModelStatus,
        RequestStatus,
    )
    from stoker.ipc.usage import Timings, Usage
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
            "stoker:requests",
            "Requests that generate, by how they ended.",
            ["outcome"],
            registry=self._registry,
        )
        self.kinds = KindMetrics(self._registry)
        self.ended = EndedMetrics(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"stoker:{name}", text, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"stoker:{name}", text, registry=self._registry)

    @contextlib.contextmanager
    def request(self, kind: str) -> Iterator[StreamMeter]:
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
            buckets=_SECONDS,
            registry=registry,
        )
        self._queue_times = Histogram(
            "stoker:queue_time_by_kind_seconds",
            "From submission to the first work, as the engine saw it.",
            ["kind"],
            buckets=_SECONDS,
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


MAX_MODELS = 32
"""Models with a label of their own; later ones are "other"."""
_OTHER = "other"
_LABELS = ("model", "priority")


class EndedMetrics:
    """Requests and calls that have ended, by model and class."""

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

    def count(self, end: RequestStatus) -> None:
        """Count one that has ended."""
        labels = (self._label(end.model), str(end.priority))
        outcome = end.error.code if end.error else end.finish_reason or _OTHER
        self._ended.labels(*labels, end.kind, outcome.partition(",")[0]).inc()
        self._tokens.labels(*labels, "prompt").inc(end.prompt_tokens)
        self._tokens.labels(*labels, "cached").inc(end.cached_tokens)
        self._tokens.labels(*labels, "generated").inc(end.completion_tokens)
        self._waits.labels(*labels).observe(end.queue_s)
        if end.first_token_s is not None:
            self._first_tokens.labels(*labels).observe(end.first_token_s)

    def _label(self, model: str) -> str:
        if model not in self._models and len(self._models) < MAX_MODELS:
            self._models.add(model)
        return model if model in self._models else _OTHER


class StreamMeter:
    """Times of one stream, taken where its events pass."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun = time.perf_counter()
        self._last: dict[int, float] = {}
        self.num_tokens = 0
        self.finished: tuple[Usage, Timings] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._begun

    def note(self, event: Event) -> None:
        """Count one event."""
        if type(event) is Delta:
            if event.token_ids:
                self._note_tokens(event.index, len(event.token_ids))
        elif type(event) is Finished:
            self._metrics.queue_time.observe(event.timings.queue_s)
            self._metrics.prompt_tokens.inc(event.usage.prompt_tokens)
            self.finished = event.usage, event.timings

    def _note_tokens(self, index: int, count: int) -> None:
        now = time.perf_counter()
        last = self._last.get(index)
        if last is not None:
            self._metrics.inter_token.observe(now - last)
        elif not self._last:
            self._metrics.first_token.observe(now - self._begun)
        self._last[index] = now
        self.num_tokens += count


_RUNNING = frozenset({"prefill", "decode"})
_MILLISECONDS = 1000.0
_PRESSURES = ("normal", "warning", "critical")
_HEATS = ("nominal", "fair", "serious", "critical")


class StatusCollector(Collector):
    """The figures of one status.

    Attributes:
        status: what they are read from; None: there are none.
        models: served models as the client last heard of them.
    """

    def __init__(self) -> None:
        self.status: RuntimeStatus | None = None
        self.models: Sequence[ModelStatus] = ()

    def collect(self) -> Iterable[Metric]:
        """Every figure, in families; none without a status."""
        status = self.status
        if status is None:
            return
        engine = status.engine
        running = sum(slot.state in _RUNNING for slot in engine.slots)
        used = engine.kv_cells_used / engine.kv_cells_total if engine.kv_cells_total else 0.0
        yield GaugeMetricFamily("stoker:num_requests_running", "Sequences in a slot.", running)
        yield GaugeMetricFamily("stoker:num_requests_waiting", "Sequences in the queue.", len(engine.queue))
        yield GaugeMetricFamily("stoker:num_requests_parked", "Sequences preempted.", len(engine.parked))
        yield GaugeMetricFamily("stoker:num_requests_paused", "Sequences paused.", len(engine.paused))
        yield GaugeMetricFamily("stoker:kv_cache_usage_perc", "Used KV cells, 0 to 1.", used)
        yield GaugeMetricFamily("stoker:num_threads", "CPU threads a step uses.", status.threads)
        yield from _counted(engine.counters)
        yield from _cached(engine.counters)
        yield from _stored(engine.cache)
        yield from _active(engine.activity)
        yield from _served(models_now(status, self.models))
        if engine.memory.limit:  # else it was not measured
            yield from _measured(engine.memory)
            yield from _devices(engine.devices)
        yield CounterMetricFamily("stoker:engine_restarts", "Restarts of the engine.", status.restarts)


def _counted(counters: dict[str, float]) -> Iterable[Metric]:
    """What the engine counts; after a restart it counts from 0."""
    preemptions = counters.get("num_preemptions_total", 0.0)
    yield CounterMetricFamily(
        "stoker:num_preemptions", "Sequences that others took the place of.", preemptions
    )
    yield CounterMetricFamily(
        "stoker:num_owed_steps",
        "Steps given to background that had waited over its patience.",
        counters.get("num_owed_steps_total", 0.0),
    )
    yield CounterMetricFamily(
        "stoker:num_stalls",
        "Requests ended because no step could be planned: bugs of the scheduler.",
        counters.get("num_stalls_total", 0.0),
    )
    for name, text, key in (
        ("num_draft_tokens", "Guessed tokens that steps computed.", "num_drafted_total"),
        ("num_accepted_tokens", "Guessed tokens that were drawn.", "num_accepted_total"),
    ):
        yield CounterMetricFamily(f"stoker:spec_decode_{name}", text, counters.get(key, 0.0))
    for name, text in (
        ("images_encoded", "Pictures that a projector encoded."),
        ("images_reused", "Places of pictures that needed no encoding."),
    ):
        yield CounterMetricFamily(f"stoker:{name}", text, counters.get(f"{name}_total", 0.0))
    parked = counters.get("parked_bytes", 0.0)
    yield GaugeMetricFamily("stoker:parked_bytes", "Host memory of parked sequences' states.", parked)
    target_s = counters.get("step_target_ms", 0.0) / _MILLISECONDS
    yield GaugeMetricFamily("stoker:step_target_seconds", "How long a step may take; 0: no target.", target_s)


def _cached(counters: dict[str, float]) -> Iterable[Metric]:
    """What the cache saved, by where it came from (SPEC C13); after a restart it counts from 0."""
    tokens = {source: counters.get(f"cached_tokens_{source}_total", 0.0) for source in CacheSource}
    hits = {source: counters.get(f"cache_hits_{source}_total", 0.0) for source in CacheSource}
    for name, text, key in (
        ("prefix_cache_queries", "Prompt tokens of admitted requests.", "prompt_tokens_total"),
        ("prompt_tokens_computed", "Prompt tokens that steps computed.", "prompt_tokens_computed_total"),
        ("cache_misses", "Admitted requests that the cache had nothing for.", "cache_misses_total"),
        ("cache_stored", "Prefixes that were stored.", "cache_stored_total"),
        ("cache_evicted", "Stored prefixes that were given up for room.", "cache_evicted_total"),
        ("cache_damaged", "Stored prefixes that were found damaged.", "cache_damaged_total"),
    ):
        yield CounterMetricFamily(f"stoker:{name}", text, counters.get(key, 0.0))
    yield CounterMetricFamily(
        "stoker:prefix_cache_hits", "Prompt tokens that were not computed.", sum(tokens.values())
    )
    for name, text, values in (
        ("cached_tokens", "Prompt tokens that were not computed, by where they came from.", tokens),
        ("cache_hits", "Admitted requests that the cache had something for, by where it was.", hits),
    ):
        family = CounterMetricFamily(f"stoker:{name}", text, labels=["source"])
        for source, value in values.items():
            family.add_metric([source], value)
        yield family


def _stored(cache: CacheStatus) -> Iterable[Metric]:
    """What the cache holds now."""
    num_bytes = GaugeMetricFamily("stoker:cache_bytes", "Bytes of stored prefixes.", labels=["tier"])
    entries = GaugeMetricFamily("stoker:cache_entries", "Stored prefixes.", labels=["tier"])
    num_bytes.add_metric(["ram"], cache.ram_bytes)
    num_bytes.add_metric(["disk"], cache.disk_bytes)
    entries.add_metric(["ram"], cache.num_ram)
    entries.add_metric(["disk"], cache.num_disk)
    yield from (num_bytes, entries)


def _active(activity: dict[str, dict[str, float]]) -> Iterable[Metric]:
    """What the steps of each model were like lately, and whose the time was."""
    steps = GaugeMetricFamily("stoker:step_seconds", "Of a step, on average lately.", labels=["model"])
    rows = GaugeMetricFamily("stoker:rows_per_step", "Of a step, on average lately.", labels=["model"])
    shares = GaugeMetricFamily(
        "stoker:time_share",
        "Of the time lately, in steps with a person's row or without.",
        labels=["model", "priority"],
    )
    for model, figures in activity.items():
        steps.add_metric([model], figures["step_ms"] / _MILLISECONDS)
        rows.add_metric([model], figures["rows_per_step"])
        for priority, name in ((Priority.INTERACTIVE, "people_share"), (Priority.BACKGROUND, "jobs_share")):
            shares.add_metric([model, priority], figures[name])
    yield from (steps, rows, shares)


def _served(models: Sequence[ModelStatus]) -> Iterable[Metric]:
    """How many models are in each state."""
    found = collections.Counter(model.state for model in models)
    family = GaugeMetricFamily("stoker:models", "Served models by state.", labels=["state"])
    for state in ModelLife:
        family.add_metric([state], found[state])
    yield family


def _measured(memory: MemoryStatus) -> Iterable[Metric]:
    """Memory by line of the ledger, pressure and heat."""
    lines = GaugeMetricFamily("stoker:memory_bytes", "Bytes by line of the ledger.", labels=["line"])
    for line, num_bytes in memory.lines.items():
        lines.add_metric([line], num_bytes)
    yield lines
    for name, text, value in (
        ("limit", "What engine and client may take together.", memory.limit),
        ("footprint", "What they take.", memory.footprint),
        ("available", "What could be used now without swapping.", memory.available),
    ):
        yield GaugeMetricFamily(f"stoker:memory_{name}_bytes", text, value)
    yield GaugeMetricFamily(
        "stoker:memory_pressure_fraction", "Of the worst source, 0 to 1 and more.", memory.pressure_fraction
    )
    yield _one_of("stoker:memory_pressure", "1 at the level it has.", _PRESSURES, memory.pressure)
    yield _one_of("stoker:heat", "1 at the level it has.", _HEATS, memory.heat)


def _devices(devices: Sequence[DeviceStatus]) -> Iterable[Metric]:
    """Each accelerator's own memory by who has it, and what its driver says of it."""
    held = GaugeMetricFamily(
        "stoker:device_memory_bytes",
        "Own memory of an accelerator, by who has it: own, others or free.",
        labels=["device", "held_by"],
    )
    heat = GaugeMetricFamily("stoker:device_celsius", "Of an accelerator's processor.", labels=["device"])
    power = GaugeMetricFamily("stoker:device_power_watts", "What an accelerator takes.", labels=["device"])
    for device in (each for each in devices if each.total):
        for holder, num_bytes in (("own", device.own), ("others", device.others), ("free", device.free)):
            if num_bytes is not None:
                held.add_metric([device.id, holder], num_bytes)
        if device.celsius is not None:
            heat.add_metric([device.id], device.celsius)
        if device.power_w is not None:
            power.add_metric([device.id], device.power_w)
    yield from (held, heat, power)


def _one_of(name: str, text: str, levels: Sequence[str], level: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["level"])
    for known in levels:
        family.add_metric([known], known == level)
    return family
