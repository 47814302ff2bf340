"""Embeddings, rankings, choices and states over HTTP by their ids: cancelled, paused, listed and counted."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.runtime import Runtime

ENCODER = "fake:encoder=1"
RANKER = "fake:encoder=1,pooling=rank"
DECODER = "fake:eog_period=0,recurrent=1"
CHOOSER = "fake:eog_period=0"
TEXTS = [f"text {at}" for at in range(500)]
LONG = "word " * 60

KINDS = {
    "embed": (ENCODER, "/v1/embeddings", {"input": TEXTS}, 500),
    "rerank": (RANKER, "/v1/rerank", {"query": "q", "documents": TEXTS}, 500),
    "choose": (CHOOSER, "/v1/choose", {"prompt": LONG, "choices": [f"answer {at}" for at in range(40)]}, 1),
    "state": (DECODER, "/v1/embeddings", {"kind": "state", "input": [f"{LONG}{at}" for at in range(60)]}, 60),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def serve(start_server: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Start a server of one slow fake; each of its steps takes a while, or as long as is said."""

    def serve(kind: str, *, step_delay_s: float = 0.02, **settings: Any) -> Any:
        model = f"{KINDS[kind][0]},step_delay_s={step_delay_s}"

        def make() -> Runtime:
            fields = {"isolation": "thread", "slots": 2, "ctx_size": 1024, "drain_s": 0.0}
            return Runtime(model, **fields, states_dir=tmp_path / "states")

        server = start_server(make, **settings)
        server.ready.result(60)
        return server

    return serve


@contextmanager
def under_way(server: Any, kind: str, request_id: str, **headers: str) -> Iterator[Future[httpx.Response]]:
    """A call of that kind from a thread of its own."""
    _, path, body, _ = KINDS[kind]
    answer: Future[httpx.Response] = Future()

    def ask() -> None:
        try:
            sent = {"X-Request-Id": request_id, **headers}
            answer.set_result(httpx.post(server.url + path, json=body, headers=sent, timeout=60))
        except BaseException as error:  # noqa: BLE001 - handed to who asks for the answer
            answer.set_exception(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answer
    finally:
        thread.join()


def listed(server: Any, **headers: str) -> list[dict[str, Any]]:
    """What /v1/runtime/requests tells this caller."""
    found = httpx.get(f"{server.url}/v1/runtime/requests", headers=headers)
    return list(found.json()["data"])


def steer(server: Any, how: str, request_id: str = "mine", **headers: str) -> httpx.Response:
    """Cancel, pause or resume."""
    return httpx.post(f"{server.url}/v1/runtime/requests/{request_id}/{how}", headers=headers)


def metric(server: Any, name: str, **labels: str) -> float:
    """A figure of /metrics; 0 where there is none."""
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return 0.0


def fields_of(answer: httpx.Response) -> dict[str, Any]:
    """An answer that is one."""
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.long
@each_kind
def test_a_call_is_cancelled_by_its_id(
    serve: Callable[..., Any], until: Callable[[Callable[[], bool]], None], kind: str
) -> None:
    """SPEC I4, S5: by its X-Request-Id; all of its requests end, and its client is told with 499."""
    server = serve(kind, step_delay_s=0.2)  # it must not end before it is cancelled
    with under_way(server, kind, "mine") as answer:
        until(lambda: any(entry["state"] == "running" for entry in listed(server)))
        (entry,) = listed(server)
        cancelled = steer(server, "cancel").json()
        assert cancelled == {"id": "mine", "cancelled": [entry["id"]]}
        found = answer.result(60)
    assert found.status_code == 499
    assert found.json()["error"]["code"] == "request_cancelled"
    assert found.json()["error"]["type"] == "request_cancelled"
    assert found.headers["x-request-id"] == "mine"
    assert listed(server) == []
    assert server.call(server.runtime.stats)["num_live_requests"] == 0
    assert steer(server, "cancel").status_code == 404
    count = metric(server, "stoker:requests_by_kind_total", kind=kind, outcome="request_cancelled")
    assert count == 1


@pytest.mark.long
@each_kind
def test_a_paused_call_stands_still_and_goes_on_to_the_same_answer(
    serve: Callable[..., Any], until: Callable[[Callable[[], bool]], None], kind: str
) -> None:
    """SPEC Q17: as a chat does; what is done is kept."""
    server = serve(kind)
    with under_way(server, kind, "whole") as whole:
        expected = fields_of(whole.result(60))
    with under_way(server, kind, "mine") as answer:
        until(lambda: any(entry["names"] == ["mine"] for entry in listed(server)))
        (own,) = steer(server, "pause").json()["paused"]
        until(lambda: [entry["state"] for entry in listed(server)] == ["paused"])
        assert steer(server, "pause").json()["paused"] == [own]
        until(lambda: not any(slot["request_id"] for slot in status(server)["slots"]))
        (before,) = status(server)["groups"]
        assert (before["state"], before["position"], before["eta_s"]) == ("paused", None, None)
        assert not answer.done()
        assert status(server)["groups"][0]["num_done"] == before["num_done"]
        assert steer(server, "resume").json()["resumed"] == [own]
        found = fields_of(answer.result(60))
    assert found == expected


def status(server: Any, **headers: str) -> dict[str, Any]:
    """What /v1/runtime tells this caller."""
    return dict(httpx.get(f"{server.url}/v1/runtime", headers=headers).json())


@pytest.mark.long
@each_kind
def test_a_call_is_shown_with_its_kind_class_and_progress(
    serve: Callable[..., Any], until: Callable[[Callable[[], bool]], None], kind: str
) -> None:
    """SPEC I4: once in the list and once in the status, however many requests it is made of."""
    server, (_, _, _, num_members) = serve(kind), KINDS[kind]
    with under_way(server, kind, "mine", **{"X-Stoker-Priority": "background"}) as answer:
        until(lambda: len(listed(server)) == 1)
        steer(server, "pause")
        (entry,), (group,) = listed(server), status(server)["groups"]
        steer(server, "cancel")
        answer.result(60)
    assert entry["id"].startswith(f"{kind}-")
    assert entry["id"] == group["request_id"]
    assert entry["names"] == ["mine"]
    assert not entry["is_kept"]
    for shown in (entry, group):
        assert (shown["kind"], shown["class"], shown["num_members"]) == (kind, "background", num_members)
        assert 0 <= shown["num_done"] < num_members
    assert group["age_s"] > 0
    assert group["deadline_s"] is None


@each_kind
def test_a_call_is_counted_by_its_kind(serve: Callable[..., Any], kind: str) -> None:
    """SPEC O1: requests, durations, times in the queue and tokens; a refused body is none."""
    server, (_, path, body, _) = serve(kind), KINDS[kind]
    usage = fields_of(httpx.post(server.url + path, json=body, timeout=60))["usage"]
    assert httpx.post(server.url + path, json={}).status_code == 400
    for name, wanted in (
        ("stoker:requests_by_kind_total", 1),
        ("stoker:request_duration_seconds_count", 1),
        ("stoker:queue_time_by_kind_seconds_count", 1),
        ("stoker:prompt_tokens_by_kind_total", usage["prompt_tokens"]),
    ):
        assert (name, metric(server, name, kind=kind)) == (name, wanted)
    assert metric(server, "stoker:requests_by_kind_total", kind=kind, outcome="finished") == 1
    assert metric(server, "stoker:request_duration_seconds_sum", kind=kind) > 0


def test_generations_are_counted_by_their_kind(serve: Callable[..., Any]) -> None:
    """SPEC O1: the same figures for chats and completions, beside those they have."""
    server = serve("choose")
    fields_of(httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 2}))
    messages = [{"role": "user", "content": "abc"}]
    fields_of(httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages, "max_tokens": 2}))
    for kind in ("completion", "chat"):
        assert metric(server, "stoker:requests_by_kind_total", kind=kind, outcome="finished") == 1
        assert metric(server, "stoker:queue_time_by_kind_seconds_count", kind=kind) == 1
    assert metric(server, "stoker:requests_total", outcome="finished") == 2


def test_the_client_of_a_call_that_leaves_ends_it(
    serve: Callable[..., Any], until: Callable[[Callable[[], bool]], None]
) -> None:
    """SPEC S5: nothing of it is computed any more, and it counts as cancelled."""
    server, (_, path, body, _) = serve("embed"), KINDS["embed"]
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + sent)
        until(lambda: len(listed(server)) == 1)
        own = listed(server)[0]["id"]
        steer(server, "pause", own)  # it cannot end by itself
    until(lambda: listed(server) == [])
    until(lambda: server.call(server.runtime.stats)["num_live_requests"] == 0)
    assert metric(server, "stoker:requests_by_kind_total", kind="embed", outcome="cancelled") == 1


def test_a_call_belongs_to_the_key_that_it_came_with(
    serve: Callable[..., Any], until: Callable[[Callable[[], bool]], None], tmp_path: Path
) -> None:
    """SPEC S4: another key does not see its id and cannot end it; an operator can."""
    keys, operators = tmp_path / "keys", tmp_path / "operators"
    keys.write_text("own\nother\n")
    operators.write_text("boss\n")
    server = serve("embed", api_key_file=keys, admin_key_file=operators)
    own, other, boss = ({"Authorization": f"Bearer {key}"} for key in ("own", "other", "boss"))
    with under_way(server, "embed", "mine", **own) as answer:
        until(lambda: len(listed(server, **own)) == 1)
        steer(server, "pause", **own)
        assert listed(server, **other) == []
        assert steer(server, "cancel", **other).status_code == 404
        assert status(server, **other)["groups"][0]["request_id"] is None
        assert status(server, **own)["groups"][0]["request_id"] == listed(server, **own)[0]["id"]
        assert steer(server, "cancel", **boss).status_code == 200
        assert answer.result(60).status_code == 499
