"""Health, readiness, metrics, the runtime's status, models, tokens, ids and cancelling."""

from __future__ import annotations

import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stand_in import HOLD, StandInRuntime, delta

HELLO = [{"role": "user", "content": "Say hello"}]
CHAT = "/v1/chat/completions"


def test_before_the_models_are_there_only_health_answers(start_server, until):
    """S3, S6: 503 with Retry-After, and nothing is woken by asking."""
    server = start_server(lambda: StandInRuntime(waits_for_models=True))
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/v1/models").json() == {"object": "list", "data": []}
        assert http.get("/metrics").status_code == 200
        assert http.get("/v1/runtime").json()["engine"]["state"] == "starting"
        refused = [
            http.get("/ready"),
            http.post(CHAT, json={"messages": HELLO}),
            http.post("/v1/completions", json={"prompt": "x"}),
            http.post("/tokenize", json={"content": "x"}),
        ]
        for answer in refused:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert int(answer.headers["retry-after"]) >= 1
        assert not server.ready.done()
        server.call(server.runtime.finish_loading)
        until(lambda: http.get("/ready").status_code == 200)
    assert server.ready.result(60)["models"] == ["stand-in"]


def test_models_are_listed_and_found(client, http):
    """S1: the list, one by id, and the default by its name."""
    models = client.models.list().data
    assert len(models) == 1
    assert client.models.retrieve(models[0].id).id == models[0].id
    assert http.get("/v1/models/default").json()["id"] == models[0].id
    assert http.get("/models").json()["data"][0]["meta"]["n_ctx"] > 0


def test_text_becomes_tokens_and_back(http):
    """S1: whatever the text, with pieces on request."""
    text = "Grüße, 世界 🙂"
    tokens = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert tokens
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    pieces = http.post("/tokenize", json={"text": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    raw = [piece["piece"] for piece in pieces]
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in raw).decode() == text
    assert http.post("/detokenize", json={"tokens": []}).json() == {"content": ""}
    assert http.post("/detokenize", json={"tokens": [-1]}).json()["error"]["param"] == "tokens"
    assert http.post("/tokenize", json={"content": 5}).json()["error"]["param"] == "content"


def test_a_conversation_is_shown_as_its_prompt(http):
    """S1: /apply-template."""
    prompt = http.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    assert "Say hello" in prompt


def test_request_ids_are_echoed_if_sane(http):
    """I8: on every answer, errors too."""
    for given, kept in (("my-id:1.2", True), ("x" * 129, False), ("a b", False), ("<script>", False)):
        answer = http.get("/v1/nothing", headers={"X-Request-Id": given})
        assert (answer.headers["x-request-id"] == given) is kept
    assert http.get("/health").headers["x-request-id"] != http.get("/health").headers["x-request-id"]


def test_the_runtime_shows_engine_slots_queue_and_memory(http):
    """I4: the shape outside checks read."""
    status = http.get("/v1/runtime").json()
    assert set(status["engine"]) == {"pid", "state", "restarts", "label", "threads"}
    assert {"slots", "queue", "parked", "models", "memory", "cache"} <= set(status)
    for slot in status["slots"]:
        assert {"id", "state", "request_id", "model", "num_tokens"} <= set(slot)
    assert {"limit", "footprint", "available"} <= set(status["memory"])
    assert status["memory"]["footprint"] > 0
    assert status["models"][0]["state"] == "ready"


def metric(http, name, **labels):
    """The value of one sample."""
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    raise AssertionError(name)


def test_metrics_count_what_happened(http):
    """O1: names of the field, moved by one request of four tokens."""
    names = {
        "stoker:generation_tokens_total": 4,
        "stoker:time_to_first_token_seconds_count": 1,
        "stoker:inter_token_latency_seconds_count": 3,
        "stoker:request_queue_time_seconds_count": 1,
    }
    before = {name: metric(http, name) for name in names}
    prompt = metric(http, "stoker:prompt_tokens_total")
    usage = http.post(CHAT, json={"messages": HELLO, "max_tokens": 4, "ignore_eos": True}).json()["usage"]
    assert {name: metric(http, name) - before[name] for name in names} == names
    assert metric(http, "stoker:prompt_tokens_total") - prompt == usage["prompt_tokens"]
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_parked"):
        assert metric(http, f"stoker:{name}") == 0
    assert 0 <= metric(http, "stoker:kv_cache_usage_perc") <= 1
    assert metric(http, "stoker:engine_restarts_total") >= 0


@pytest.mark.parametrize("by", ["header", "answer"])
def test_a_live_request_is_cancelled_by_any_of_its_names(scripted, scripted_http, by):
    """S1: the id of the header or of the answer; afterwards it is not found."""
    scripted.runtime.scripts.append([delta("a"), HOLD, delta("b")])
    body = {"messages": HELLO, "stream": True}
    with scripted_http.stream("POST", CHAT, json=body, headers={"X-Request-Id": "mine"}) as answer:
        lines = answer.iter_lines()
        own = next(lines).split('"id":"')[1].split('"')[0]
        path = f"/v1/runtime/requests/{'mine' if by == 'header' else own}/cancel"
        ended = scripted_http.post(path)
        assert ended.json()["cancelled"] == scripted.runtime.cancelled == [own]
        list(lines)
    assert scripted_http.post(path).json()["error"]["code"] == "request_not_found"
    assert scripted_http.post(path).status_code == 404


def test_every_prompt_of_a_request_is_cancelled_with_it(scripted, scripted_http, until):
    """S1: one name, all its work."""
    scripted.runtime.scripts.extend([[HOLD], [HOLD]])
    body = {"prompt": ["a", "b"]}
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(
            scripted_http.post("/v1/completions", json=body, headers={"X-Request-Id": "both"})
        )
    )
    thread.start()
    until(lambda: scripted.call(lambda: len(scripted.runtime.live) == 2))
    ended = scripted_http.post("/v1/runtime/requests/both/cancel").json()["cancelled"]
    thread.join()
    assert len(ended) == 2
    assert answers[0].status_code == 200
