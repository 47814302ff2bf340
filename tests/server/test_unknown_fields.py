"""A field that a route does not know is ignored, and who sent it can see that."""

from __future__ import annotations

import logging

import httpx
import pytest

from stoker.server.inbound import body
from stoker.server.reply import IGNORED_HEADER

HI = [{"role": "user", "content": "hi", "refusal": None}]
BODIES = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/choose": {"prompt": "x", "choices": ["a", "b"]},
    "/v1/runtime/requests": {"prompt": "x", "request": {"max_tokens": 1}},
    "/tokenize": {"content": "x"},
    "/apply-template": {"messages": HI},
    "/v1/runtime/models/pin": {"model": "default", "pinned": False},
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.fixture
def client(_fake) -> httpx.Client:
    """A client of a server with the fake backend."""
    with httpx.Client(base_url=_fake.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_a_mistyped_field_is_named_in_a_header(client, path):
    """I7: on every route; a body without one has no such header."""
    answer = client.post(path, json=BODIES[path] | {"temperatur": 0.5, "zz top": 1})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "temperatur, zz?top"
    assert IGNORED_HEADER not in client.post(path, json=BODIES[path]).headers


@pytest.mark.parametrize("path", STREAMED)
def test_streams_name_it_too(client, path):
    """I7: with their head."""
    with client.stream("POST", path, json=BODIES[path] | {"stream": True, "temperatur": 1}) as answer:
        assert answer.headers[IGNORED_HEADER] == "temperatur"
        answer.read()


def test_fields_of_objects_of_the_body_are_looked_at_and_those_of_turns_are_not(client):
    """I7: clients send turns back with what other vendors put there."""
    body = BODIES["/v1/chat/completions"] | {"stream_options": {"includ_usage": True}, "typical": 1.0}
    assert (
        client.post("/v1/chat/completions", json=body).headers[IGNORED_HEADER]
        == "stream_options.includ_usage"
    )
    body = {"prompt": "x", "request": {"max_tokens": 1, "temperature": 1}}
    assert client.post("/v1/runtime/requests", json=body).headers[IGNORED_HEADER] == "request.temperature"


def test_an_ignored_tool_and_an_ignored_field_share_the_header(client):
    """I7: the tools that were left out come first."""
    body = BODIES["/v1/chat/completions"] | {"tools": [{"type": "web_search"}], "temperatur": 1}
    assert (
        client.post("/v1/chat/completions", json=body).headers[IGNORED_HEADER]
        == "tools.0 (web_search), temperatur"
    )


def test_many_are_counted(client):
    """I7: a header has bounds."""
    body = BODIES["/tokenize"] | {f"field_{at}": 1 for at in range(20)}
    assert client.post("/tokenize", json=body).headers[IGNORED_HEADER].endswith("field_7, 12 more")


def test_the_log_tells_of_each_once_and_of_so_many_in_all(start_server, caplog, monkeypatch):
    """I7: with the field that may have been meant; a stranger does not fill the log."""
    monkeypatch.setattr(body, "MAX_TOLD", 3)
    caplog.set_level(logging.WARNING, logger=body.__name__)
    server = start_server()
    server.ready.result(60)
    for at in range(6):
        httpx.post(f"{server.url}/tokenize", json={"content": "x", "add_specal": True, f"field_{at}": 1})
    told = [record.getMessage() for record in caplog.records if record.name == body.__name__]
    assert told[0] == "/tokenize ignores the unknown field 'add_specal'; did a client mean 'add_special'?"
    assert len(told) == 3


def test_a_strict_server_refuses_it(start_server):
    """W3: by its path, with the field that may have been meant; a body without one is served."""
    server = start_server(strict=True)
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path in STREAMED:
            answer = client.post(path, json=BODIES[path] | {"temperatur": 1})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "temperatur")
            assert "did you mean 'temperature'?" in error["message"]
            assert client.post(path, json=BODIES[path]).status_code == 200
        nested = BODIES["/v1/completions"] | {"stream_options": {"includ_usage": True}}
        answer = client.post("/v1/completions", json=nested)
        assert answer.json()["error"]["param"] == "stream_options.includ_usage"


def test_the_class_has_its_own_name(client):
    """Q1, I7: `priority` as in the library; the numbers of others are taken and change nothing."""
    path, body = "/v1/chat/completions", BODIES["/v1/chat/completions"]
    assert client.post(path, json=body | {"priority": "background"}).json()["service_tier"] == "flex"
    both = {"priority": "interactive", "service_tier": "flex"}
    assert client.post(path, json=body | both).json()["service_tier"] == "default"
    assert client.post(path, json=body | {"priority": 3}).json()["service_tier"] == "default"
    refused = client.post(path, json=body | {"priority": "urgent"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


def test_a_request_has_the_id_that_its_body_gives(client):
    """I8: as by the header, over which it wins."""
    body = BODIES["/v1/completions"] | {"request_id": "mine"}
    answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": "other"})
    assert answer.headers["X-Request-Id"] == "mine"
    assert client.post("/v1/completions", json=body | {"request_id": "a b"}).status_code == 400
