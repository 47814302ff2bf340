"""The figures of the engine's status as `/metrics` shows them, read when a scrape asks.

Owns which figure has which name. Those of requests are `live`'s, of models `served`'s, of the machine
`machine`'s.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from stoker.ipc.usage import CacheSource
from stoker.server.context import models_now
from stoker.server.metrics.families import counter, counters, gauge, gauges
from stoker.server.metrics.live import live_requests
from stoker.server.metrics.machine import devices, measured
from stoker.server.metrics.served import active, served, streaming

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client.core import Metric

    from stoker.ipc.shared_store import SharedStoreStatus
    from stoker.ipc.status import CacheStatus, EngineStatus, ExitStatus, ModelStatus
    from stoker.runtime import RuntimeStatus

_MILLISECONDS = 1000.0
ENGINE_STATES = (
    "starting",
    "serving",
    "restarting",
    "suspended",
    "closing",
    "failing",
    "failed",
    "closed",
)


class StatusCollector(Collector):
    """The figures of one status.

    Attributes:
        status: what they are read from; None: there are none.
        models: served models as the client last heard of them.
    """

    def __init__(self) -> None:
        self.status: RuntimeStatus | None = None
        self.models: Sequence[ModelStatus] = ()
        self._exits = ExitCounts()

    def collect(self) -> Iterable[Metric]:
        """Every figure, in families; none without a status."""
        status = self.status
        if status is None:
            return ()
        engine = status.engine
        return chain(
            _engine(status),
            self._exits.collect(status.exits),
            live_requests(status),
            _counted(engine.counters),
            _speculated(engine.counters),
            _cached(engine.counters),
            _stored(engine),
            active(engine.activity),
            served(models_now(status, self.models)),
            streaming(engine.models),
            measured(engine.memory),
            devices(engine.devices),
        )


class ExitCounts:
    """Ends of engines that nobody asked for, added up: a status shows the last ones only."""

    def __init__(self) -> None:
        self._last_at = 0.0
        self._fates = {"survived": 0, "failed": 0}

    def __repr__(self) -> str:
        return f"<ExitCounts {self._fates}>"

    def collect(self, exits: Sequence[ExitStatus]) -> Iterable[Metric]:
        """What became of the requests of all engines, and when the last of these ended."""
        for ended in exits:
            if ended.at > self._last_at:
                self._fates["survived"] += ended.num_survived
                self._fates["failed"] += ended.num_failed
                self._last_at = ended.at
        text = "Requests whose engine ended, by what became of them."
        yield counters("requests_at_exits", text, "fate", self._fates)
        at = exits[-1].at if exits else 0.0
        yield gauge("engine_last_exit_timestamp_seconds", "Since the epoch; 0: none was unasked for.", at)


def _engine(status: RuntimeStatus) -> Iterable[Metric]:
    """The engine itself, and how old its figures are."""
    health = status.health
    yield gauges("build_info", "Version of this package.", ["version"], {(status.version,): 1.0})
    yield gauge("up_seconds", "Since the program started it.", status.up_s)
    states = {(state,): float(state == health.state) for state in ENGINE_STATES}
    yield gauges("engine_state", "1 at the state it has.", ["state"], states)
    yield gauge("engine_state_seconds", "For how long it has that state.", health.for_s)
    yield counter("engine_restarts", "Restarts of the engine.", status.restarts)
    yield gauge("engine_failed_starts", "Starts in a row that failed.", health.num_failed_starts)
    yield gauge("figures_age_seconds", "Since the engine said what is shown of it.", status.as_of_s)
    yield gauge("num_threads", "CPU threads a step uses.", status.threads)
    reduced = float(bool(status.engine.threads_reason))
    yield gauge("threads_reduced", "1: fewer CPU threads than set, for a reason in status.", reduced)


def _counted(figures: Mapping[str, float]) -> Iterable[Metric]:
    """What the engine counts; after a restart it counts from 0."""
    for name, text, key in (
        ("num_preemptions", "Sequences that others took the place of.", "num_preemptions_total"),
        (
            "num_owed_steps",
            "Steps given to background that had waited over its patience.",
            "num_owed_steps_total",
        ),
        (
            "num_stalls",
            "Requests ended because no step could be planned: bugs of the scheduler.",
            "num_stalls_total",
        ),
        ("steps", "Steps that models computed.", "num_steps"),
        ("step_busy_seconds", "Time in which a step was computed.", "step_busy_s"),
        ("long_steps_ended", "Steps cut short for somebody who waits.", "num_ended_steps_total"),
        ("requests_moved", "Of a gate: requests taken from their machine.", "requests_moved_total"),
        ("states_moved", "Of a gate: of these, with what was computed of them.", "states_moved_total"),
        ("states_moved_bytes", "Of a gate: bytes of these states.", "states_moved_bytes_total"),
        ("images_encoded", "Pictures that a projector encoded.", "images_encoded_total"),
        ("images_reused", "Places of pictures that needed no encoding.", "images_reused_total"),
    ):
        yield counter(name, text, figures.get(key, 0.0))
    parked = figures.get("parked_bytes", 0.0)
    yield gauge("parked_bytes", "Host memory of parked sequences' states.", parked)
    target_s = figures.get("step_target_ms", 0.0) / _MILLISECONDS
    yield gauge("step_target_seconds", "How long a step may take; 0: no target.", target_s)


def _speculated(figures: Mapping[str, float]) -> Iterable[Metric]:
    for name, text, key in (
        ("num_draft_tokens", "Guessed tokens that steps computed.", "num_drafted_total"),
        ("num_accepted_tokens", "Guessed tokens that were drawn.", "num_accepted_total"),
    ):
        yield counter(f"spec_decode_{name}", text, figures.get(key, 0.0))


def _cached(figures: Mapping[str, float]) -> Iterable[Metric]:
    """What the cache saved, by where it came from (SPEC C13); after a restart it counts from 0."""
    tokens = {str(source): figures.get(f"cached_tokens_{source}_total", 0.0) for source in CacheSource}
    hits = {str(source): figures.get(f"cache_hits_{source}_total", 0.0) for source in CacheSource}
    for name, text, key in (
        ("prefix_cache_queries", "Prompt tokens of admitted requests.", "prompt_tokens_total"),
        ("prompt_tokens_computed", "Prompt tokens that steps computed.", "prompt_tokens_computed_total"),
        ("cache_misses", "Admitted requests that the cache had nothing for.", "cache_misses_total"),
        ("cache_stored", "Prefixes that were stored.", "cache_stored_total"),
        ("cache_evicted", "Stored prefixes that were given up for room.", "cache_evicted_total"),
        ("cache_damaged", "Stored prefixes that were found damaged.", "cache_damaged_total"),
    ):
        yield counter(name, text, figures.get(key, 0.0))
    yield counter("prefix_cache_hits", "Prompt tokens that were not computed.", sum(tokens.values()))
    text = "Prompt tokens that were not computed, by where they came from."
    yield counters("cached_tokens", text, "source", tokens)
    text = "Admitted requests that the cache had something for, by where it was."
    yield counters("cache_hits", text, "source", hits)
    for name, text in (
        ("puts", "Prefixes that were put into the shared store."),
        ("put_bytes", "Bytes that were put there."),
        ("gets", "Prefixes that were asked of the shared store."),
        ("got_bytes", "Bytes that came from there."),
        ("lost", "Prefixes that were gone or damaged when they were asked for."),
        ("late", "Prefixes that did not come in time and were computed."),
        ("slower", "Looks at a prefix there that is computed as quickly as it is got."),
        ("failures", "Calls of the shared store that failed or took too long."),
        ("removed", "Files that were removed from there, for their age or for room."),
    ):
        yield counter(f"prefix_store_{name}", text, figures.get(f"prefix_store_{name}_total", 0.0))


def _stored(engine: EngineStatus) -> Iterable[Metric]:
    """What cells and the cache hold now."""
    total, used = engine.kv_cells_total, engine.kv_cells_used
    yield gauge("kv_cache_usage_perc", "Used KV cells, 0 to 1.", used / total if total else 0.0)
    yield gauge("kv_cells", "KV cells of all models in memory.", total)
    yield from _tiers(engine.cache)


def _tiers(cache: CacheStatus) -> Iterable[Metric]:
    def by_tier(ram: float, disk: float) -> dict[tuple[str, ...], float | None]:
        return {("ram",): ram, ("disk",): disk}

    tier = ["tier"]
    yield gauges("cache_bytes", "Bytes of stored prefixes.", tier, by_tier(cache.ram_bytes, cache.disk_bytes))
    limits = by_tier(cache.ram_limit_bytes, cache.disk_limit_bytes)
    yield gauges("cache_limit_bytes", "What stored prefixes may take; 0: the tier is off.", tier, limits)
    yield gauges("cache_entries", "Stored prefixes.", tier, by_tier(cache.num_ram, cache.num_disk))
    yield gauge("cache_unsaved", "Stored prefixes that are not on disk yet.", cache.num_unsaved)
    problem = float(bool(cache.disk_problem))
    yield gauge("cache_disk_problem", "1: the disk tier is wanted and cannot be used.", problem)
    yield from _shared(cache.shared)


def _shared(store: SharedStoreStatus | None) -> Iterable[Metric]:
    size, usable = (store.size_bytes, store.num_usable) if store else (0, 0)
    yield gauge("prefix_store_bytes", "Bytes of all machines in the shared store, at the last listing.", size)
    yield gauge("prefix_store_entries", "Prefixes there of models in memory here.", usable)
    rate, latency_s = (store.bytes_per_s, store.latency_ms / _MILLISECONDS) if store else (0.0, 0.0)
    yield gauge("prefix_store_bytes_per_second", "Bandwidth of the shared store as measured here.", rate)
    yield gauge("prefix_store_latency_seconds", "Of a call of it.", latency_s)
    problem = float(bool(store and store.problem))
    yield gauge("prefix_store_problem", "1: the shared store is left alone for a while.", problem)
