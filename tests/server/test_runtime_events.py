"""GET /v1/runtime/events: what the runtime tells, as server-sent events."""

from __future__ import annotations

import json

import httpx

from stoker.client.event_bus import RuntimeEvent
from stoker.runtime import Runtime

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
        RuntimeEvent(event="lagged", at=3.0, fields={"dropped": 7}),
    ]
    with scripted_http.stream("GET", EVENTS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        found = data_of(lines)
        assert next(found) == {"event": "snapshot", "at": 1.5, "engine": "serving", "models": []}
        assert next(found) == {"event": "pressure", "at": 2.0, "level": "warning", "fraction": 0.75}
        assert next(found) == {"event": "lagged", "at": 3.0, "dropped": 7}
        assert next(line for line in lines if line) == ": keep-alive"
        scripted.call(scripted.runtime.release)
        assert [line for line in lines if line][-1] == "data: [DONE]"


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
    assert steps[0] == "queued"
    assert "admitted" in steps
    assert told[-1]["usage"]["completion_tokens"] == 8
    assert (told[-1]["completion_tokens"], told[-1]["route"]) == (8, "/v1/completions")
    said = json.dumps(told)
    assert "secret" not in said
    assert text.removeprefix("secret prompt") not in said
    assert not any({"text", "token_ids", "logprobs"} & event.keys() for event in told)


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
