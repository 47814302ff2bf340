"""What `/metrics` shows of a given status: every figure under its name, none of a text."""

from __future__ import annotations

import msgspec
import pytest
from shown_status import MODELS, figures, request, status_of

from stoker.ipc.request import Priority
from stoker.ipc.status import ExitStatus, RequestMove
from stoker.server.metrics.live import wait_cause
from stoker.server.metrics.metrics import Metrics


@pytest.mark.parametrize(
    ("sample", "value"),
    [
        (("engine_state", "serving"), 1),
        (("engine_state", "suspended"), 0),
        (("figures_age_seconds",), 2.5),
        (("threads_reduced",), 1),
        (("requests_live", "interactive", "decode"), 1),
        (("requests_live", "background", "prefix_wait"), 1),
        (("requests_live", "background", "parked"), 0),
        (("longest_eta_seconds", "background"), 4),
        (("slots", "chat", "decode"), 1),
        (("slots", "chat", "idle"), 1),
        (("steps_total",), 12),
        (("step_busy_seconds_total",), 1.5),
        (("cache_limit_bytes", "ram"), 10),
        (("cache_disk_problem",), 1),
        (("kv_cache_usage_perc",), 0.25),
        (("model_state", "other", "loading"), 1),
        (("model_load_fraction", "other"), 0.25),
        (("model_load_fraction", "chat"), 1),
        (("model_leases", "chat"), 2),
        (("model_pinned", "chat"), 1),
        (("expert_bytes", "chat", "resident"), 20),
        (("expert_read_faults_total", "chat"), 4),
        (("expert_read_bytes_per_second", "chat"), 40),
        (("memory_rung", "a"), 1),
        (("memory_rung", "b"), 0),
        (("device_memory_bytes", "CUDA0", "others"), 20),
        (("device_ledger_bytes", "CUDA0", "weights"), 40),
        (("device_celsius", "CUDA0"), 61),
        (("device_held_by_another", "CUDA0"), 1),
    ],
)
def test_what_status_knows_is_a_metric(sample, value) -> None:
    """O1: requests by state and class, models, devices, cache, engine, memory."""
    assert figures(Metrics().render(status_of(), MODELS))[sample] == value


def test_what_is_not_known_is_left_out_and_not_zero() -> None:
    """O1: a device's power that its driver does not tell is no figure."""
    shown = figures(Metrics().render(status_of(), MODELS))
    assert ("device_power_watts", "CUDA0") not in shown


def test_requests_at_exits_add_up_over_more_exits_than_a_status_shows() -> None:
    """O1: each exit is counted once, however often it is shown."""
    metrics = Metrics()

    def rendered(*ats: float) -> dict[tuple[str, ...], float]:
        exits = [
            ExitStatus(at=at, pid=1, reason="x", served_s=1, num_survived=2, num_failed=1, next_start_s=0)
            for at in ats
        ]
        return figures(metrics.render(status_of(exits=exits), MODELS))

    assert rendered(10.0)["requests_at_exits_total", "survived"] == 2
    assert rendered(10.0)["requests_at_exits_total", "survived"] == 2
    shown = rendered(11.0, 12.0)
    assert shown["requests_at_exits_total", "survived"] == 6
    assert shown["requests_at_exits_total", "failed"] == 3
    assert shown["engine_last_exit_timestamp_seconds",] == 12.0


@pytest.mark.parametrize(
    ("state", "reason", "cause"),
    [
        ("queued", "no free slot", "slot"),
        ("queued", "no free cells", "cells"),
        ("queued", "its beginning is read from disk", "disk"),
        ("queued", "its model is being loaded, 43 %", "model"),
        ("queued", "heat: background waits", "heat"),
        ("queued", "memory pressure: background waits", "memory"),
        ("prefix_wait", "waits for a prefix that req-7 computes", "prefix"),
        ("parked", "gave its slot to req-9 (interactive)", "slot"),
        ("held", "the engine is restarting", "engine"),
        ("queued", "a reason of tomorrow", "other"),
    ],
)
def test_a_reason_in_words_is_one_of_few_labels(state, reason, cause) -> None:
    """O1: whatever request a reason names, it is one label."""
    assert wait_cause(state, reason) == cause
    waits = msgspec.structs.replace(request(state, Priority.BACKGROUND), waits_for=reason)
    shown = figures(Metrics().render(status_of(requests=[waits]), MODELS))
    assert shown["requests_waiting_for", cause] == 1


def test_an_end_counts_the_seconds_of_each_state() -> None:
    """O1: by class, from its moves; also of a request that wrote nothing."""
    moves = [
        RequestMove(at=10.0, state="queued"),
        RequestMove(at=12.0, state="prefix_wait", index=0),
        RequestMove(at=15.0, state="prefill", index=0, slot=0),
    ]
    metrics = Metrics()
    ended = msgspec.structs.replace(
        request("ended", Priority.BACKGROUND), arrived_at=10.0, end_to_end_s=6.0, moves=moves, num_restarts=2
    )
    metrics.ended.count(ended)
    shown = figures(metrics.render(None))
    labels = ("chat", "background")
    assert shown["ended_state_seconds_total", *labels, "queued"] == 2
    assert shown["ended_state_seconds_total", *labels, "prefix_wait"] == 3
    assert shown["ended_state_seconds_total", *labels, "prefill"] == 1
    assert shown["ended_restarts_total", *labels] == 2
    assert shown["ended_duration_seconds_count", *labels] == 1
