"""Responses over a WebSocket: events as messages, one at a time, a memory of the last one, refusals."""

from __future__ import annotations

import contextlib
import json
import logging
from functools import partial

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.frames import CloseCode
from websockets.sync.client import connect

from stoker import Runtime
from stoker.server.openai.responses import socket as module
from stoker.site_settings import KeySettings, hash_of


@pytest.fixture
def dial(_fake):
    """Opens connections to a server with the fake backend."""
    with contextlib.ExitStack() as stack:

        def connected(server=None, path="/v1/responses", **how):
            url = f"ws://127.0.0.1:{(server or _fake).port}{path}"
            return stack.enter_context(connect(url, proxy=None, **how))

        yield connected


def create(connection, **fields):
    """Ask for a response."""
    asked = {"type": "response.create", "input": "Hi", "max_output_tokens": 4, **fields}
    connection.send(json.dumps(asked))


def events(connection):
    """The events up to the end of a response, or an error."""
    found = []
    while not found or found[-1]["type"] not in (
        *(f"response.{end}" for end in ("completed", "incomplete", "failed")),
        "error",
    ):
        found.append(json.loads(connection.recv(60)))
    return found


def test_a_response_comes_as_the_events_of_a_stream(dial):
    """W7: each a text message of its own, as the official client declares them."""
    connection = dial()
    create(connection)
    found = events(connection)
    adapter = TypeAdapter(ResponseStreamEvent)
    assert [adapter.validate_python(event).sequence_number for event in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created"
    assert found[-1]["response"]["output"][0]["content"][0]["text"]
    create(dial(path="/responses"), stream=True, background=False)


def test_several_messages_are_answered_in_order_one_at_a_time(dial):
    """W7: those that come meanwhile wait; too many of them are refused, and the others are answered."""
    connection = dial()
    for number in range(3):
        create(connection, metadata={"number": str(number)})
    assert [events(connection)[-1]["response"]["metadata"]["number"] for _ in range(3)] == ["0", "1", "2"]
    num_asked = module.MAX_WAITING + 6
    for _ in range(num_asked):
        create(connection, max_output_tokens=40)
    ends = []
    while len(ends) < num_asked:
        event = json.loads(connection.recv(60))
        if event["type"] == "error":
            ends.append(event["error"]["code"])
        elif event["type"] in ("response.completed", "response.incomplete"):
            ends.append("")
    assert ends.count("queue_full") in range(1, num_asked - module.MAX_WAITING + 1)


def test_a_connection_remembers_its_last_response_though_it_is_not_stored(dial):
    """W7: a next turn sends what is new; another connection knows nothing of it."""
    connection = dial()
    create(connection, store=False, input="Remember the word cobalt.")
    first = events(connection)[-1]["response"]
    create(connection, store=False, input="Which?", previous_response_id=first["id"])
    second = events(connection)[-1]["response"]
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    other = dial()
    create(other, store=False, previous_response_id=second["id"])
    (error,) = events(other)
    assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
    create(other, store=False)
    assert events(other)[-1]["type"] == "response.incomplete"


def test_a_turn_that_cannot_go_on_makes_the_connection_forget(dial):
    """W7: what was continued is not found afterwards; the connection goes on."""
    connection = dial()
    create(connection, store=False)
    first = events(connection)[-1]["response"]["id"]
    output = {"type": "function_call_output", "call_id": "c", "output": "o"}
    create(connection, store=False, previous_response_id=first, input=[output])
    assert events(connection)[-1]["error"]["param"] == "input.0.call_id"
    create(connection, store=False, previous_response_id=first)
    assert events(connection)[-1]["error"]["code"] == "previous_response_not_found"
    create(connection, store=False)
    assert events(connection)[-1]["type"] == "response.incomplete"


def test_items_are_taken_in_ahead_of_a_turn(dial):
    """W7: with `generate: false` nothing is generated, and a next turn goes on from them."""
    connection = dial()
    create(connection, store=False, generate=False, input="A long beginning.")
    first = events(connection)[-1]
    assert (first["type"], first["response"]["output"]) == ("response.completed", [])
    create(connection, store=False, previous_response_id=first["response"]["id"])
    assert events(connection)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", None),
        (b"\xff", None),
        ('{"type": "response.cancel"}', "type"),
        ('{"input": "x"}', "type"),
        ('{"type": "response.create", "input": "x", "temperature": 9}', "temperature"),
        ('{"type": "response.create", "input": [' + "[" * 5000, None),
    ],
)
def test_a_message_that_asks_for_nothing_is_refused_and_the_connection_goes_on(dial, message, param):
    """W7: with an error event of the API's shape."""
    connection = dial()
    connection.send(message)
    (error,) = events(connection)
    assert (error["type"], error["status"]) == ("error", 400)
    assert error["error"]["param"] == param
    create(connection)
    assert events(connection)[-1]["type"] == "response.incomplete"


def test_a_connection_is_let_in_as_a_request_is(start_server, tmp_path, dial, caplog):
    """W7, S4: Host, Origin and key; a refusal is an HTTP answer in the usual shape."""
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    server = start_server(api_key_file=keys)
    server.ready.result(60)
    with pytest.raises(InvalidStatus) as caught:
        dial(server)
    assert caught.value.response.status_code == 401
    assert json.loads(caught.value.response.body)["error"]["code"] == "invalid_api_key"
    key = {"Authorization": "Bearer one"}
    with pytest.raises(InvalidStatus) as caught:
        dial(server, additional_headers=key, origin="https://evil.example")
    assert caught.value.response.status_code == 403
    connection = dial(server, additional_headers=key, origin=server.url)
    create(connection)
    assert events(connection)[-1]["type"] == "response.incomplete"
    assert "handshake" not in caplog.text  # whoever is refused fills no log


def test_a_key_that_is_taken_away_ends_its_connection_behind_the_answer(start_server, dial):
    """W7, G7: with an error and a code; a connection of a key that stays goes on."""
    keys = {name: KeySettings(hash=hash_of(name.encode())) for name in ("gone", "kept")}
    server = start_server(
        lambda: Runtime("fake:eog_period=0,step_delay_s=0.02", isolation="thread"), keys=keys
    )
    server.ready.result(60)
    idle, busy, kept = (
        dial(server, additional_headers={"Authorization": f"Bearer {name}"})
        for name in ("gone", "gone", "kept")
    )
    create(busy, max_output_tokens=40)
    create(busy)
    assert json.loads(busy.recv(60))["type"] == "response.created"
    context = server.service.context
    server.call(lambda: context.take_keys(context.settings.replace(keys={"kept": keys["kept"]})))
    assert [event["error"]["code"] for event in events(idle)] == ["invalid_api_key"]
    assert events(busy)[-1]["type"] == "response.incomplete"
    assert events(busy)[-1]["error"]["code"] == "invalid_api_key"
    for ended in (idle, busy):
        with pytest.raises(ConnectionClosedError) as caught:
            ended.recv(60)
        assert caught.value.rcvd.code == module._POLICY_VIOLATION
    create(kept)
    assert events(kept)[-1]["type"] == "response.incomplete"


def test_a_connection_has_the_rights_that_its_key_has_now(start_server, dial):
    """W7, G7: models that were taken from it are refused from the next message on."""
    own = KeySettings(hash=hash_of(b"one"))
    server = start_server(keys={"one": own})
    server.ready.result(60)
    connection = dial(server, additional_headers={"Authorization": "Bearer one"})
    create(connection)
    assert events(connection)[-1]["type"] == "response.incomplete"
    context = server.service.context
    less = {"one": own.replace(models=("other",))}
    server.call(lambda: context.take_keys(context.settings.replace(keys=less)))
    create(connection)
    assert events(connection)[-1]["error"]["code"] == "key_forbids"


def test_a_client_that_leaves_ends_what_runs_and_its_connection_is_given_back(start_server, dial, until):
    """W7, S5: the slot is free, and the bound of connections counts it no more."""
    server = start_server(max_connections=16)
    server.ready.result(60)
    for _ in range(20):
        connection = dial(server)
        create(connection)
        connection.recv(60)
        connection.close()
    until(lambda: not server.call(server.runtime.with_client))
    create(last := dial(server))
    assert events(last)[-1]["type"] == "response.incomplete"


def test_a_message_over_the_bound_ends_its_connection_with_both_numbers(start_server, dial, caplog):
    """W7: however much of it is still on its way, its client reads why."""
    caplog.set_level(logging.INFO, "stoker.server")
    server = start_server(max_body_bytes=1024)
    server.ready.result(60)
    for size in (32 * 2**20, 1025):
        connection = dial(server)
        with contextlib.suppress(ConnectionClosedError):  # which may come while it is being sent
            connection.send(b" " * size)
        with pytest.raises(ConnectionClosedError) as caught:
            connection.recv(60)
        assert caught.value.rcvd.code == CloseCode.MESSAGE_TOO_BIG
        assert str(size) in caught.value.rcvd.reason
        assert "1024" in caught.value.rcvd.reason
        assert caught.value.rcvd.reason in caplog.text
    create(last := dial(server))
    assert events(last)[-1]["type"] == "response.incomplete"


def test_messages_that_are_too_large_together_are_refused_with_their_bytes(start_server, dial, until):
    """W7: while one is answered; those that fit are answered."""
    runtime = partial(Runtime, "fake:eog_period=0,step_delay_s=0.02", isolation="thread")
    server = start_server(runtime, max_body_bytes=1024)
    server.ready.result(60)
    connection = dial(server)
    create(connection, max_output_tokens=40)
    assert json.loads(connection.recv(60))["type"] == "response.created"
    first, second = (" " * (size - 2) + "{}" for size in (1000, 25))
    connection.send(first)
    connection.send(second)
    found = events(connection)
    assert found[-1]["error"]["code"] == "queue_full"
    assert all(number in found[-1]["error"]["message"] for number in ("1024 bytes", "1000 wait", "has 25"))


def test_a_connection_has_a_longest_time(dial, monkeypatch):
    """W7: then its client is told, and connects again."""
    monkeypatch.setattr(module, "MAX_CONNECTED_S", 0.05)
    (error,) = events(dial())
    assert error["error"]["code"] == "websocket_connection_limit_reached"
