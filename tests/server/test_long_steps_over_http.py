"""What is shown while a step takes long: status and metrics are of that moment, and prompts go on telling."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker.client import engine_view
from stoker.runtime import Runtime

STEP_S = 1.5


@pytest.fixture
def slow(start_server, monkeypatch):
    """A server whose steps take long, and which waits for its engine for a moment only."""
    monkeypatch.setattr(engine_view, "STATUS_WAIT_S", 0.02)
    monkeypatch.setattr("stoker.client.requests.meter.PROGRESS_OVERDUE_S", 0.1)
    model = f"fake:eog_period=0,step_delay_s={STEP_S}"
    server = start_server(lambda: Runtime(model=model, isolation="thread", slots=1, ctx_size=512))
    server.ready.result(60)
    return server


def gauges(http):
    """The metrics that have no labels."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {one.name: one.value for family in families for one in family.samples if not one.labels}


@pytest.mark.long
def test_status_and_metrics_are_true_during_a_step_and_prompts_tell_how_far_they_are(slow):
    """SPEC I4, S2: a slot with its request, the queue, counts; progress though no step has ended."""
    body = {"prompt": "one two", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    with (
        httpx.Client(base_url=slow.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body, headers={"X-Stoker-Progress": "event"}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(line for line in lines if line) == "event: prefill_progress"
        second = {"prompt": "three", "max_tokens": 1, "timeout_s": 60}
        other = threading.Thread(target=lambda: http.post("/v1/completions", json=second))
        other.start()
        status = http.get("/v1/runtime").json()
        while not status["queue"]:
            status = http.get("/v1/runtime").json()
        figures = gauges(http)
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        other.join()
    (slot,) = status["slots"]
    assert (slot["id"], slot["state"], slot["index"]) == (0, "prefill", 0)
    assert slot["request_id"] == chunks[0]["id"]
    assert status["as_of_s"] > 0
    assert (figures["stoker:num_requests_running"], figures["stoker:num_requests_waiting"]) == (1, 1)
    assert figures["stoker:figures_age_seconds"] > 0
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert len(told) >= 2
    assert told[0]["total"] == chunks[-1]["usage"]["prompt_tokens"]
    timings = chunks[-1]["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (told[0]["total"], 1)
    assert timings["prompt_per_second"] > 0
