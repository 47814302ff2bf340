"""GET /v1/runtime/events: what the runtime tells, as server-sent events."""

from __future__ import annotations

import json

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from stoker.client.event_bus import MAX_WAITING, RuntimeEvent
from stoker.ipc.request import Priority
from stoker.ipc.status import RequestStatus
from stoker.runtime import Runtime
from stoker.server.metrics.ended import MAX_MODELS, EndedMetrics

EVENTS = "/v1/runtime/events"


def data_of(lines):
    """The documents of `data:` lines."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_events_come_as_json_lines_in_order(scripted, scripted_http):
    """SPEC O3, I4: name, time and what it is about; comments while nothing happens; an end at the end."""
    scripted.runtime.told = [
        RuntimeEvent(event="snapshot", at=1.5, fields={"engine": "serving", "models": []}),
        RuntimeEvent(event="pressure", at=2.0, fields={"level": "warning", "fraction": 0.75}),
        RuntimeEvent(event="heat", at=3.0, fields={"level": "fair"}),
    ]
    with scripted_http.stream("GET", EVENTS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        found = data_of(lines)
        assert next(found) == {"event": "snapshot", "at": 1.5, "engine": "serving", "models": []}
        assert next(found) == {"event": "pressure", "at": 2.0, "level": "warning", "fraction": 0.75}
        assert next(found) == {"event": "heat", "at": 3.0, "level": "fair"}
        assert next(line for line in lines if line) == ": keep-alive"
        scripted.call(scripted.runtime.release)
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_the_events_beat_for_the_library_whatever_the_streams_of_others_do(start_server, monkeypatch):
    """I11: a connected program takes 30 s of silence for a lost server, and `keepalive_s` may be more."""
    monkeypatch.setattr("stoker.server.native.events.BEAT_S", 0.05)
    server = start_server(keepalive_s=60)
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=10) as http, http.stream("GET", EVENTS) as answer:
        assert next(line for line in answer.iter_lines() if line) == ": keep-alive"


def test_a_server_that_stops_ends_the_event_stream(start_server):
    """SPEC L4: whoever watches does not hold the shutdown up."""
    server = start_server(keepalive_s=60)
    server.ready.result(60)
    server.call(lambda: server.runtime.told.append(RuntimeEvent(event="snapshot", at=1.0)))
    with httpx.Client(base_url=server.url) as http, http.stream("GET", EVENTS) as answer:
        lines = answer.iter_lines()
        assert next(data_of(lines)) == {"event": "snapshot", "at": 1.0}
        server.stop()
        assert [line for line in lines if line] == ["data: [DONE]"]


def test_what_a_request_goes_through_is_told_without_its_text(start_server):
    """SPEC O3, S4: who may watch the machine may not read along."""
    server = start_server(lambda: Runtime(model="fake:eog_period=0", isolation="thread"))
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as http, http.stream("GET", EVENTS) as answer:
        found = data_of(answer.iter_lines())
        assert next(found)["event"] == "snapshot"
        body = {"prompt": "secret prompt", "max_tokens": 8, "seed": 7, "logprobs": 1, "echo": True}
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        told = []
        while not told or told[-1].get("what") != "finished":
            told.append(next(found))
    steps = [event["what"] for event in told if event["event"] == "request"]
    assert steps[0] == "arrived"
    assert "admitted" in steps
    assert told[-1]["usage"]["completion_tokens"] == 8
    assert (told[-1]["completion_tokens"], told[-1]["route"]) == (8, "/v1/completions")
    said = json.dumps(told)
    assert "secret" not in said
    assert text.removeprefix("secret prompt") not in said
    assert not any({"text", "token_ids", "logprobs"} & event.keys() for event in told)


@pytest.mark.long
def test_calls_of_every_route_are_told_of_by_their_route(start_server):
    """SPEC O3: what came by which route, and whether it was a call of several requests."""
    server = start_server(lambda: Runtime(model="fake:encoder=1", isolation="thread"))
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as http, http.stream("GET", EVENTS) as answer:
        found = data_of(answer.iter_lines())
        next(found)
        http.post("/v1/embeddings", json={"input": ["a", "b"]}).raise_for_status()
        end = next(event for event in found if event.get("what") == "finished")
    assert (end["kind"], end["route"], end["finish_reason"]) == ("embed", "/v1/embeddings", "stop")


def samples(http, name):
    """Values of a metric by its labels, which stand in order of their names."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == name
    }


def test_what_ended_is_counted_by_model_and_class(start_server):
    """SPEC O1: with how it ended, its tokens and its times; steps have figures by model."""
    server = start_server(lambda: Runtime(model="fake:eog_period=0", isolation="thread"))
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as http, http.stream("GET", EVENTS) as answer:
        found = data_of(answer.iter_lines())
        next(found)
        body = {"prompt": "one two", "max_tokens": 4, "service_tier": "flex"}
        http.post("/v1/completions", json=body).raise_for_status()
        http.post("/v1/choose", json={"prompt": "a", "choices": ["b", "c"]}).raise_for_status()
        ends = (event for event in found if event.get("what") == "finished")
        assert [next(ends)["kind"], next(ends)["kind"]] == ["completion", "choose"]
        ended = samples(http, "stoker:ended_requests_total")
        assert ended["completion", "fake", "length", "background"] == 1
        assert ended["choose", "fake", "stop", "interactive"] == 1
        assert samples(http, "stoker:ended_tokens_total")["fake", "background", "generated"] == 4
        assert samples(http, "stoker:ended_first_token_seconds_count")["fake", "background"] == 1
        assert samples(http, "stoker:rows_per_step")["fake",] > 0
        assert set(samples(http, "stoker:time_share")) == {("fake", "interactive"), ("fake", "background")}


def test_no_end_is_missed_however_many_come_at_once(start_server):
    """SPEC O1: subscribers lose the oldest past a bound; counters do not."""
    server = start_server(lambda: Runtime(model="fake:eog_period=0", isolation="thread"))
    server.ready.result(60)
    bus = server.runtime._client.bus
    end = RequestStatus(
        request_id="x",
        model="fake",
        priority=Priority.BACKGROUND,
        kind="chat",
        route="library",
        arrived_at=0.0,
        finish_reason="stop",
    )
    server.call(lambda: [bus.request_ended(end) for _ in range(2 * MAX_WAITING)])
    with httpx.Client(base_url=server.url, timeout=60) as http:
        ended = samples(http, "stoker:ended_requests_total")
    assert ended["chat", "fake", "stop", "background"] == 2 * MAX_WAITING


def test_labels_of_models_have_a_bound():
    """SPEC O1: who makes up names makes no metrics."""
    registry = CollectorRegistry()
    metrics = EndedMetrics(registry)
    for number in range(MAX_MODELS + 5):
        metrics.count(
            RequestStatus(
                request_id="x",
                model=f"m{number}",
                priority=Priority.INTERACTIVE,
                kind="chat",
                route="library",
                arrived_at=0.0,
            )
        )
    (family,) = [found for found in registry.collect() if found.name == "stoker:ended_requests"]
    models = {sample.labels["model"] for sample in family.samples}
    assert len(models) == MAX_MODELS + 1
    assert "other" in models


def test_a_client_that_comes_back_gets_what_it_missed(start_server):
    """SPEC O3: by the id of its last event, in the header that browsers send."""
    server = start_server(lambda: Runtime(model="fake:eog_period=0", isolation="thread"))
    server.ready.result(60)
    body = {"prompt": "one", "max_tokens": 2}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        with http.stream("GET", EVENTS) as answer:
            first = next(data_of(answer.iter_lines()))
        assert first["event"] == "snapshot"
        http.post("/v1/completions", json=body).raise_for_status()
        with http.stream("GET", EVENTS, headers={"Last-Event-ID": first["id"]}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("id: ")
            assert next(data_of(lines))["event"] == "request"


def test_operators_see_prefixes_and_the_log_and_others_do_not(start_server, tmp_path):
    """SPEC S4, O3: nor requests that are not theirs, ended ones and those of a snapshot included."""
    keys, operators = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("key-one\nkey-two\n", encoding="utf-8")
    operators.write_text("key-admin\n", encoding="utf-8")
    server = start_server(
        lambda: Runtime(model="fake:eog_period=0", isolation="thread"),
        api_key_file=keys,
        admin_key_file=operators,
    )
    server.ready.result(60)
    one, two, admin = ({"Authorization": f"Bearer key-{name}"} for name in ("one", "two", "admin"))
    with httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"prompt": "word " * 100, "max_tokens": 2}
        http.post("/v1/completions", json=body, headers=one).raise_for_status()
        for path in ("/v1/runtime/prefixes", "/v1/runtime/log"):
            assert http.get(path, headers=one).status_code == 403
            http.get(path, headers=admin).raise_for_status()
        shown = [http.get("/v1/runtime", headers=caller).json() for caller in (one, two, admin)]
        assert [len(document["recent"]) for document in shown] == [1, 0, 1]
        assert [bool(document["settings"]) for document in shown] == [False, False, True]
        row = shown[0]["recent"][0]
        assert (row["priority"], row["class"], row["completion_tokens"]) == ("interactive", "interactive", 2)
        assert "owner" not in row
        assert all(
            isinstance(value, int) for name, value in shown[2]["counters"].items() if name.endswith("_total")
        )
        for caller, number in ((one, 1), (two, 0), (admin, 1)):
            with http.stream("GET", EVENTS, headers=caller) as answer:
                snapshot = next(data_of(answer.iter_lines()))
            assert len(snapshot["recent"]) == number
            assert "owner" not in json.dumps(snapshot)
        health = http.get("/health").json()
        assert health["models"] == {"served": 1, "ready": 1}
        assert {"version", "up_s"} <= health.keys()
