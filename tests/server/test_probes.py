"""Health, readiness, metrics, the runtime's status, models, tokens, ids and cancelling."""

from __future__ import annotations

import threading

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stand_in import HOLD, StandInRuntime, delta

from stoker.errors import EngineError
from stoker.ipc.request import Priority
from stoker.ipc.shared_store import SharedStoreStatus
from stoker.ipc.status import (
    CacheStatus,
    EngineHealth,
    EngineStatus,
    ModelStatus,
    SlotStatus,
    WaitStatus,
)
from stoker.server.context import loading_text

HELLO = [{"role": "user", "content": "Say hello"}]
CHAT = "/v1/chat/completions"


def test_before_the_models_are_there_only_health_answers(start_server, until):
    """S3, S6: 503 with Retry-After, and nothing is woken by asking."""
    server = start_server(lambda: StandInRuntime(waits_for_models=True))
    with httpx.Client(base_url=server.url) as http:
        health = http.get("/health").json()
        assert (health["status"], health["engine"]["state"]) == ("ok", "starting")
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
        says = [answer.json()["error"]["message"] for answer in refused]
        assert (
            says[0] == "the models are not ready yet (0 of 1); /ready tells when they are"
        )  # it asks for no key
        assert says[1] == "the models are not ready yet (stand-in: loading); /ready tells when they are"
        assert not server.ready.done()
        server.call(server.runtime.finish_loading)
        until(lambda: http.get("/ready").status_code == 200)
    assert server.ready.result(60)["models"] == ["stand-in"]


def test_a_refusal_says_how_far_each_model_is():
    """S3: those that are on their way, a few of them; nothing where nothing is known."""
    half = ModelStatus(id="a", state="loading", stage="weights", fraction=0.4)
    others = [ModelStatus(id=f"m{at}", state="downloading") for at in range(5)]
    assert loading_text([ModelStatus(id="b", state="ready"), half]).endswith(" (a: loading, weights, 40%)")
    assert loading_text([half, *others]).endswith("; m1: downloading; m2: downloading; 2 more)")
    assert loading_text([]) == "the models are not ready yet"


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
    shown = {"pid", "state", "for_s", "restarts", "label", "devices", "threads", "threads_reason"}
    assert set(status["engine"]) == shown
    assert {"slots", "queue", "parked", "paused", "models", "memory", "cache"} <= set(status)
    for slot in status["slots"]:
        assert {"id", "state", "request_id", "class", "model", "num_tokens", "story"} <= set(slot)
    assert {"limit", "footprint", "available"} <= set(status["memory"])
    assert status["memory"]["footprint"] > 0
    assert status["models"][0]["state"] == "ready"


def test_the_runtime_shows_who_runs_waits_and_stands_still_with_their_stories(scripted, scripted_http):
    """I4, Q4, Q14, Q17: everything the engine says of slots, line, parked and paused sequences."""
    story = [(1.235, "queued: arrived"), (0.5, "prefill: slot 0")]
    told = [[1.235, "queued: arrived"], [0.5, "prefill: slot 0"]]
    person, job = Priority.INTERACTIVE, Priority.BACKGROUND
    scripted.runtime.engine = EngineStatus(
        slots=[
            SlotStatus(
                id=0, state="decode", model="m", num_tokens=7, request_id="a", priority=person, story=story
            ),
            SlotStatus(id=1, state="idle", model="m", num_tokens=3),
        ],
        queue=[WaitStatus(request_id="b", priority=person, model="m", position=1, eta_s=2.5, story=story)],
        parked=[
            WaitStatus(
                request_id="c", priority=job, index=1, model="m", position=0, eta_s=0.5, form="snapshot"
            )
        ],
        paused=[WaitStatus(request_id="d", priority=job, model="m", num_tokens=9, form="cells", story=story)],
        num_threads=1,
        threads_reason="another process is busy",
        counters={},
        kv_cells_total=1,
        kv_cells_used=0,
    )
    status = scripted_http.get("/v1/runtime").json()
    assert status["engine"]["threads"] == 1
    assert status["engine"]["threads_reason"] == "another process is busy"
    busy, idle = status["slots"]
    assert (busy["class"], busy["story"]) == ("interactive", told)
    assert (idle["class"], idle["request_id"], idle["story"]) == (None, None, [])
    empty = {"index": 0, "model": "m", "position": None, "eta_s": None, "num_tokens": 0, "form": None}
    empty |= {"story": [], "others": [], "reason": "", "by": None}
    as_person, as_job = ({"class": name, "priority": name} for name in ("interactive", "background"))
    assert status["queue"] == [
        {**empty, "request_id": "b", **as_person, "position": 1, "eta_s": 2.5, "story": told}
    ]
    where = {"index": 1, "position": 0, "eta_s": 0.5, "form": "snapshot"}
    assert status["parked"] == [{**empty, **where, "request_id": "c", **as_job}]
    kept = {"num_tokens": 9, "form": "cells", "story": told}
    assert status["paused"] == [{**empty, **kept, "request_id": "d", **as_job}]


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
    for kind in ("running", "waiting", "parked", "paused"):
        assert metric(http, f"stoker:num_requests_{kind}") == 0
    assert 0 <= metric(http, "stoker:kv_cache_usage_perc") <= 1
    assert metric(http, "stoker:engine_restarts_total") >= 0


def test_metrics_show_what_the_engine_counts(scripted, scripted_http):
    """O1: parked, paused, preemptions, the memory of parked states, the target of a step, threads."""
    waiting = WaitStatus(request_id="a", priority=Priority.BACKGROUND)
    counters = {
        "num_preemptions_total": 5.0,
        "num_owed_steps_total": 7.0,
        "num_stalls_total": 1.0,
        "parked_bytes": 4096.0,
        "step_target_ms": 50.0,
    }
    scripted.runtime.engine = EngineStatus(
        slots=[],
        queue=[],
        parked=[waiting] * 2,
        paused=[waiting] * 3,
        num_threads=2,
        counters=counters,
        kv_cells_total=1,
        kv_cells_used=0,
    )
    assert {
        name: metric(scripted_http, f"stoker:{name}")
        for name in (
            "num_requests_parked",
            "num_requests_paused",
            "num_preemptions_total",
            "num_owed_steps_total",
            "num_stalls_total",
            "parked_bytes",
            "step_target_seconds",
            "num_threads",
        )
    } == {
        "num_requests_parked": 2,
        "num_requests_paused": 3,
        "num_preemptions_total": 5,
        "num_owed_steps_total": 7,
        "num_stalls_total": 1,
        "parked_bytes": 4096,
        "step_target_seconds": 0.05,
        "num_threads": 2,
    }


CACHE = CacheStatus(
    num_entries=7,
    ram_bytes=100,
    ram_limit_bytes=1000,
    disk_bytes=200,
    disk_limit_bytes=2000,
    num_ram=3,
    num_disk=5,
    num_unsaved=2,
    disk_problem="no space left",
)


def engine_with(cache, counters):
    """An idle engine with this cache."""
    return EngineStatus(
        slots=[],
        queue=[],
        parked=[],
        counters=counters,
        cache=cache,
        kv_cells_total=64,
        kv_cells_used=48,
    )


def test_the_runtime_shows_the_cache_by_tier_and_every_counter(scripted, scripted_http):
    """C14, I4: bytes, limits and entries; how many prompt tokens were computed."""
    counters = {"prompt_tokens_total": 900.0, "prompt_tokens_computed_total": 260.0}
    scripted.runtime.engine = engine_with(CACHE, counters)
    status = scripted_http.get("/v1/runtime").json()
    assert status["cache"] == {
        "entries": 7,
        "unsaved": 2,
        "live": {"cells_used": 48, "cells_total": 64},
        "ram": {"bytes": 100, "limit": 1000, "entries": 3},
        "disk": {"bytes": 200, "limit": 2000, "entries": 5, "problem": "no space left"},
    }
    assert status["counters"] == counters


def test_a_shared_store_is_in_status_and_metrics_with_its_problem(scripted, scripted_http):
    """C19: what it holds, how quick it is, what came of asking it."""
    store = SharedStoreStatus(
        url="/mnt/prefixes",
        num_files=9,
        num_usable=4,
        size_bytes=700,
        limit_bytes=900,
        latency_ms=2.5,
        bytes_per_s=1e8,
        problem="it hangs",
    )
    counters = {f"prefix_store_{name}_total": 3.0 for name in ("gets", "late", "failures")}
    scripted.runtime.engine = engine_with(msgspec.structs.replace(CACHE, shared=store), counters)
    assert scripted_http.get("/v1/runtime").json()["cache"]["store"] == msgspec.to_builtins(store)
    assert metric(scripted_http, "stoker:prefix_store_bytes") == 700
    assert metric(scripted_http, "stoker:prefix_store_entries") == 4
    assert metric(scripted_http, "stoker:prefix_store_latency_seconds") == 0.0025
    assert metric(scripted_http, "stoker:prefix_store_bytes_per_second") == 1e8
    assert metric(scripted_http, "stoker:prefix_store_problem") == 1
    for name in ("gets", "late", "failures"):
        assert metric(scripted_http, f"stoker:prefix_store_{name}_total") == 3
    assert metric(scripted_http, "stoker:prefix_store_puts_total") == 0


def test_metrics_show_what_the_cache_saves_and_holds(scripted, scripted_http):
    """O1, C13, C14: tokens and requests by source, bytes and entries by tier."""
    counters = {
        "prompt_tokens_total": 900.0,
        "prompt_tokens_computed_total": 260.0,
        "cache_misses_total": 4.0,
    }
    counters |= {"cache_stored_total": 8.0, "cache_evicted_total": 6.0, "cache_damaged_total": 1.0}
    sources = ("live", "ram", "disk", "shared")
    for number, source in enumerate(sources, start=1):
        counters |= {f"cached_tokens_{source}_total": 64.0 * number, f"cache_hits_{source}_total": number}
    scripted.runtime.engine = engine_with(CACHE, counters)
    assert {
        name: metric(scripted_http, f"stoker:{name}_total")
        for name in (
            "prefix_cache_queries",
            "prefix_cache_hits",
            "prompt_tokens_computed",
            "cache_misses",
            "cache_stored",
            "cache_evicted",
            "cache_damaged",
        )
    } == {
        "prefix_cache_queries": 900,
        "prefix_cache_hits": 640,
        "prompt_tokens_computed": 260,
        "cache_misses": 4,
        "cache_stored": 8,
        "cache_evicted": 6,
        "cache_damaged": 1,
    }
    for number, source in enumerate(sources, start=1):
        assert metric(scripted_http, "stoker:cached_tokens_total", source=source) == 64 * number
        assert metric(scripted_http, "stoker:cache_hits_total", source=source) == number
    for tier, size, entries in (("ram", 100, 3), ("disk", 200, 5)):
        assert metric(scripted_http, "stoker:cache_bytes", tier=tier) == size
        assert metric(scripted_http, "stoker:cache_entries", tier=tier) == entries


def test_an_engine_that_has_counted_nothing_shows_zeroes(scripted, scripted_http):
    """O1: as after a restart, from where counters begin anew."""
    scripted.runtime.engine = engine_with(CacheStatus(), {})
    assert metric(scripted_http, "stoker:prompt_tokens_computed_total") == 0
    assert metric(scripted_http, "stoker:cached_tokens_total", source="disk") == 0
    assert metric(scripted_http, "stoker:cache_bytes", tier="ram") == 0


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


@pytest.mark.parametrize("by", ["header", "answer"])
def test_a_live_request_is_paused_and_resumed_by_any_of_its_names(scripted, scripted_http, by):
    """Q17, I4: answers as cancelling does; twice is the same; an unknown one is a 404."""
    scripted.runtime.scripts.append([delta("a"), HOLD, delta("b")])
    body = {"messages": HELLO, "stream": True}
    with scripted_http.stream("POST", CHAT, json=body, headers={"X-Request-Id": "mine"}) as answer:
        lines = answer.iter_lines()
        own = next(lines).split('"id":"')[1].split('"')[0]
        name = "mine" if by == "header" else own
        path = f"/v1/runtime/requests/{name}"
        for _ in range(2):
            assert scripted_http.post(f"{path}/pause").json() == {"id": name, "paused": [own]}
        assert scripted_http.post(f"{path}/resume").json() == {"id": name, "resumed": [own]}
        assert scripted.runtime.steered == [("pause", own), ("pause", own), ("resume", own)]
        scripted.call(scripted.runtime.release)
        list(lines)
    for verb in ("pause", "resume"):
        gone = scripted_http.post(f"{path}/{verb}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")


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


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("starting", 200),
        ("serving", 200),
        ("restarting", 200),
        ("suspended", 200),
        ("closing", 200),
        ("failing", 503),
        ("failed", 503),
        ("closed", 503),
    ],
)
def test_health_tells_the_truth_of_the_engine(scripted, scripted_http, state: str, code: int):
    """S6, L9: 200 while it serves or recovers, 503 where no engine comes; state, reason and next start."""
    scripted.runtime.engine_health = EngineHealth(
        state=state, for_s=2.5, num_failed_starts=4, next_start_s=1.5, reason="Too many open files"
    )
    answer = scripted_http.get("/health")
    shown = {"state": state, "for_s": 2.5, "failed_starts": 4, "next_start_s": 1.5}
    assert answer.status_code == code
    assert answer.json()["status"] == ("ok" if code == 200 else "error")
    assert answer.json()["engine"] == {**shown, "reason": "Too many open files"}


def test_what_is_not_served_says_why_and_when_to_come_again(scripted, scripted_http):
    """S3, L9: 503 with the reason and the time to the next start, for requests and for /ready."""
    scripted.runtime.engine_health = EngineHealth(
        state="failing", for_s=9.0, next_start_s=7.2, reason="no room"
    )
    scripted.runtime.is_ready = False
    try:
        for answer in (
            scripted_http.get("/ready"),
            scripted_http.post("/v1/completions", json={"prompt": "x"}),
        ):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "8")
            assert "no room" in answer.json()["error"]["message"]
    finally:
        scripted.runtime.is_ready = True


def test_a_server_whose_engine_has_gone_for_good_ends_with_the_reason(start_server):
    """L9: it does not linger and refuse everything for ever."""
    server = start_server()
    assert server.ready.result(60)
    server.call(lambda: server.runtime.end(EngineError("the engine's host has failed: a bug")))
    with pytest.raises(EngineError, match="a bug"):
        server.stop()
