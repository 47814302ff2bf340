"""No body holds other callers up: what may be in one, where it is decoded, how long it may take."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from stoker.errors import ServerBusyError
from stoker.server import app
from stoker.server.fields import GenerationFields
from stoker.server.inbound import bodies as incoming
from stoker.server.inbound import body
from stoker.server.inbound.bodies import MAX_VALUES
from stoker.server.inbound.body import MAX_ITEMS, MAX_KEYS, MAX_TOKEN_IDS, VALUES_WITH_TOKENS
from stoker.settings import ServerSettings

POSTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses/input_tokens": "input",
    "/v1/responses/compact": "input",
    "/v1/embeddings": "input",
    "/v1/rerank": "documents",
    "/v1/choose": "choices",
    "/v1/states": "prompt",
    "/v1/states/embeddings": "input",
    "/tokenize": "content",
    "/detokenize": "tokens",
    "/apply-template": "messages",
    "/v1/runtime/models/load": "model",
    "/v1/runtime/models/unload": "model",
    "/v1/runtime/models/pin": "model",
    "/v1/runtime/suspend": "reason",
    "/v1/runtime/requests": "prompt",
    "/v1/runtime/requests/count_tokens": "prompt",
}
OLLAMA_POSTS = {
    "/api/chat": "messages",
    "/api/generate": "images",
    "/api/embed": "input",
    "/api/embeddings": "prompt",
    "/api/show": "model",
    "/api/pull": "model",
}


FORMS = {"/v1/audio/transcriptions"}
"""See `test_transcriptions`: they hold no JSON."""


def head(path, length):
    """The head of a POST."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def answer_of(connection):
    """(status, code of the error) of the answer that comes on a socket."""
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
        got = connection.recv(65536)
        assert got, data
        data += got
    return int(data.split()[1]), json.loads(data.partition(b"\r\n\r\n")[2])["error"]


@contextlib.contextmanager
def unfinished(server, size, path="/v1/completions"):
    """A connection that has sent so many bytes of a body that is to be longer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head(path, size + 1000) + b'{"prompt":"' + b"a" * (size - 11))
        yield connection


def test_every_route_with_a_body_is_looked_at(scripted_http):
    """S4: a route that is added later belongs into this list."""
    paths = scripted_http.get("/openapi.json").json()["paths"]
    found = {path for path, operations in paths.items() if "requestBody" in operations.get("post", {})}
    assert found == {*POSTS, *OLLAMA_POSTS, *FORMS}


@pytest.mark.parametrize("path", [*POSTS, *OLLAMA_POSTS])
def test_too_many_values_are_refused_before_the_body_has_come(scripted, path, monkeypatch):
    """S4: 413 while the client still sends, and nothing of it was decoded."""
    decoded = []
    monkeypatch.setattr(incoming.IncomingBodies, "decoded", lambda *given: decoded.append(given))
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=60) as connection:
        begin = b'{"' + (POSTS | OLLAMA_POSTS)[path].encode() + b'":[' + b"null," * (VALUES_WITH_TOKENS + 1)
        connection.sendall(head(path, 2 * len(begin)) + begin)
        status, error = answer_of(connection)
    assert status == 413
    assert error if path in OLLAMA_POSTS else error["code"] == "request_too_large"
    assert not decoded


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "wrong", [[None] * 20_000, {"a": None}, [{}] * 20_000, 1], ids=lambda wrong: str(wrong)[:9]
)
def test_the_first_error_is_the_only_one_made(scripted_http, path, wrong, monkeypatch):
    """S3: a list of thousands of wrong values makes a handful of errors, one a branch of the field."""
    counts = []
    made = body.invalid_body
    monkeypatch.setattr(body, "invalid_body", lambda error: counts.append(error.error_count()) or made(error))
    answer = scripted_http.post(path, json={POSTS[path]: wrong, "max_tokens": 1, "query": "q"})
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert all(count < 20 for count in counts)
    assert counts


NOBODY = SimpleNamespace(runtime=SimpleNamespace(owner_of=None), settings=ServerSettings())
BODIES = body.described_bodies(route for api in app._APIS for route in api.router(NOBODY).routes)


def _unbounded(schema: dict[str, Any], where: str) -> list[str]:
    """Lists and objects of a JSON schema that say no bound on their length."""
    found = []
    if schema.get("type") == "array" and "maxItems" not in schema:
        found.append(where)
    if schema.get("type") == "object" and "properties" not in schema and "maxProperties" not in schema:
        found.append(where)
    for name, inner in schema.items():
        if isinstance(inner, dict):
            found += _unbounded(inner, f"{where}.{name}")
        elif isinstance(inner, list):
            for each in inner:
                found += _unbounded(each, f"{where}.{name}") if isinstance(each, dict) else []
    return found


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_every_list_of_every_body_has_a_bound(model):
    """S4: `Many`, `TokenIds` and `Named` have one; a list without it may not be added."""
    assert _unbounded(body.body_schemas([model]), model.__name__) == []
    takes_tokens = str(MAX_TOKEN_IDS) in json.dumps(model.model_json_schema())
    assert model.max_values == (VALUES_WITH_TOKENS if takes_tokens else MAX_VALUES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a"] * (MAX_ITEMS + 1)),
        ("logit_bias", {str(key): 0.5 for key in range(MAX_KEYS + 1)}),
        ("prompt", [1] * (MAX_TOKEN_IDS + 1)),
        ("model", "m" * 2000),
    ],
)
def test_a_field_over_its_bound_is_named(scripted_http, field, value):
    """S3: 400, with the field and the number."""
    answer = scripted_http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert any(number in error["message"] for number in ("8192", "4096", "300000", "1024", "valid string"))


@pytest.mark.parametrize(
    ("size", "thread"), [(1000, "server"), (incoming.LARGE_BYTES + 1, "stoker-bodies_0")]
)
def test_a_large_body_is_decoded_off_the_loop(scripted_http, size, thread, monkeypatch):
    """S4: JSON, validation and their errors; a small one needs no thread."""
    seen = []
    found = body._validated
    monkeypatch.setattr(
        body, "_validated", lambda *given: seen.append(threading.current_thread().name) or found(*given)
    )
    sent = b'{"max_tokens":1,"prompt":"' + b"a" * size + b'"}'
    assert scripted_http.post("/v1/completions", content=sent).status_code == 200
    assert scripted_http.post("/v1/completions", content=sent.replace(b"1", b"[]", 1)).status_code == 400
    assert seen == [thread, thread]


def test_what_a_large_body_asks_for_is_worked_out_off_the_loop(scripted, scripted_http, monkeypatch):
    """S4: a schema, a grammar or stop strings of megabytes are looked at in a thread, small ones not."""
    loop_thread, seen = scripted.call(threading.get_ident), []
    found = GenerationFields.common
    monkeypatch.setattr(
        GenerationFields,
        "common",
        lambda *given: seen.append(threading.get_ident() == loop_thread) or found(*given),
    )
    for text in ("a", "a" * incoming.LARGE_BYTES):
        for path, field, given in (
            ("/v1/chat/completions", "messages", [{"role": "user", "content": text}]),
            ("/v1/completions", "prompt", text),
        ):
            assert scripted_http.post(path, json={field: given, "max_tokens": 1}).status_code == 200
    assert seen == [True, True, False, False]


def test_an_error_quotes_little_of_what_was_sent(scripted_http):
    """S3: neither a key of megabytes nor a value."""
    for wrong in (
        {"logit_bias": {"k" * 100_000: "x"}},
        {"service_tier": "x" * 100_000},
        {"n": "1" * 100_000},
    ):
        answer = scripted_http.post("/v1/completions", json={"prompt": "a", **wrong})
        assert answer.status_code == 400
        assert len(answer.content) < 1000


def test_pictures_of_many_megabytes_are_read(scripted_http):
    """S4: base64 with the slashes of PHP too; what is said of them is about the model."""
    picture = "data:image/png;base64," + "aGVsbG8/" * 2**18
    content = [{"type": "image_url", "image_url": {"url": picture}}] * 8
    sent = json.dumps({"messages": [{"role": "user", "content": content}]})
    for given in (sent, sent.replace("/", r"\/")):
        answer = scripted_http.post("/v1/chat/completions", content=given.encode())
        assert answer.status_code == 400
        assert "pictures" in answer.json()["error"]["message"]


def test_unfinished_bodies_are_bounded_over_all_connections(start_server, until):
    """S4: 503 with the number once they take all the room; small bodies need none, and room comes back."""
    server = start_server(max_receiving_bytes=2 * 2**20, max_body_bytes=2**20)
    server.ready.result(60)
    bodies = server.service.context.bodies
    with contextlib.ExitStack() as stack, httpx.Client(base_url=server.url, timeout=60) as http:
        for count in (1, 2, 3):
            stack.enter_context(unfinished(server, 600_000))
            until(
                lambda count=count: (
                    server.call(lambda: bodies.num_held) == count * (600_000 - incoming.LARGE_BYTES)
                )
            )
        with unfinished(server, 600_000) as late:
            status, error = answer_of(late)
        assert (status, error["code"]) == (503, "server_busy")
        assert str(2 * 2**20) in error["message"]
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        stack.close()
        until(lambda: server.call(lambda: bodies.num_held) == 0)
        large = {"prompt": "a" * 900_000, "max_tokens": 1}
        assert http.post("/v1/completions", json=large).status_code == 200


def test_the_oldest_unfinished_body_gives_way(start_server, until, monkeypatch):
    """S4: who sends nothing more keeps nobody else from being served."""
    monkeypatch.setattr(incoming, "GIVES_WAY_S", 0.0)
    server = start_server(max_receiving_bytes=2**20, max_body_bytes=2**20)
    server.ready.result(60)
    bodies = server.service.context.bodies
    with unfinished(server, 900_000) as idle, httpx.Client(base_url=server.url, timeout=60) as http:
        until(lambda: server.call(lambda: bodies.num_held) > 0)
        answer = http.post("/v1/completions", json={"prompt": "a" * 900_000, "max_tokens": 1})
        assert answer.status_code == 200
        status, error = answer_of(idle)
        assert (status, error["code"]) == (503, "server_busy")


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_sender_that_is_too_slow_is_a_408(start_server, is_silent, monkeypatch):
    """S4: whether it sends nothing more, or a little again and again."""
    server = start_server(receive_timeout_s=0.2)
    server.ready.result(60)
    with unfinished(server, 2000) as slow:
        is_over = threading.Event()

        def drip():
            with contextlib.suppress(OSError):
                while not is_silent and not is_over.wait(0.05):
                    slow.sendall(b"a")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            status, error = answer_of(slow)
        finally:
            is_over.set()
            dripping.join()
    assert (status, error["code"]) == (408, "request_timeout")
    assert "0.2 s" in error["message"]


async def test_a_body_that_gave_way_is_not_received_further():
    """S4: also where its next bytes had come, unread, when it gave way: what it holds no longer counts."""
    bodies = incoming.IncomingBodies(ServerSettings())
    receipts = []

    async def receive():
        receipts.extend(bodies._receipts)
        receipts[0].gave_way = True  # by another body; the clock that ends this one strikes after this
        return {"type": "http.request", "body": b" " * 500_000, "more_body": True}

    with pytest.raises(ServerBusyError):
        async with bodies.received(receive):
            raise AssertionError("it was whole")
    assert len(receipts) == 1
    bodies.close()


async def test_a_client_that_leaves_frees_what_it_sent():
    """S4: at once, whatever was held."""
    bodies = incoming.IncomingBodies(ServerSettings())
    messages = [
        {"type": "http.request", "body": b" " * 500_000, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return messages.pop(0)

    with pytest.raises(incoming.ClientDisconnect):
        async with bodies.received(receive):
            raise AssertionError("it was whole")
    assert bodies.num_held == 0
    bodies.close()
