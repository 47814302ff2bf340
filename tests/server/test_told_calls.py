"""Calls of several requests, as others are told of them: what they go through, and why they wait."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager

import httpx
import pytest
from test_runtime_events import samples
from test_told_moves import EVENTS, Story

from stoker.runtime import Runtime

SLOW = "step_delay_s=0.02"
MODELS = [f"fake:id=writer,eog_period=0,{SLOW}", f"fake:id=embedder,encoder=1,{SLOW}"]
MODELS += [f"fake:id=ranker,encoder=1,pooling=rank,{SLOW}", f"fake:id=recurrent,recurrent=1,{SLOW}"]
TEXTS = [f"text number {number}" for number in range(6)]
PROMPT = "word " * 100
MANY = [f"answer {number}" for number in range(60)]
CALLS = {
    "embed": ("/v1/embeddings", {"model": "embedder", "input": TEXTS}),
    "rerank": ("/v1/rerank", {"model": "ranker", "query": "q", "documents": TEXTS}),
    "choose": ("/v1/choose", {"model": "writer", "prompt": PROMPT, "choices": TEXTS}),
    "state": ("/v1/embeddings", {"model": "recurrent", "input": TEXTS, "kind": "state"}),
}


@pytest.fixture(scope="module")
def several(_module_servers):
    """A server of a model of each class, with slow steps."""
    server = _module_servers(lambda: Runtime(models=MODELS, isolation="thread", slots=2, ctx_size=2048))
    server.ready.result(60)
    return server


@contextmanager
def reading(server, **more):
    """A client of a server, and what its reader of events is told after the snapshot."""
    with httpx.Client(base_url=server.url, timeout=60) as http, http.stream("GET", EVENTS, **more) as answer:
        story = Story(answer)
        story.until(lambda event: event["event"] == "snapshot")
        yield http, story


def asked(http, path, body, **more):
    """A call that another thread waits for."""
    asking = threading.Thread(target=lambda: http.post(path, json=body, **more).raise_for_status())
    asking.start()
    return asking


def is_call(event, kind=None):
    """Whether an event is of a call as a whole."""
    return event["event"] == "request" and event.get("num_members") and kind in {None, event.get("kind")}


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_and_each_request_of_it_are_told_with_what_they_go_through(several, kind):
    """O20: both have an id and moves with reasons; its end is in the status, and its states are counted."""
    path, body = CALLS[kind]
    with reading(several) as (http, story):
        asking = asked(http, path, body)
        arrived = story.until(lambda event: is_call(event, kind) and event["what"] == "arrived")
        end = story.until(lambda event: is_call(event, kind) and event["what"] == "finished")
        asking.join()
        recent = http.get("/v1/runtime").json()["recent"][-1]
        seconds = samples(http, "stoker:ended_state_seconds_total")
    name = arrived["request_id"]
    own = [event["move"] for event in story.all if event.get("request_id") == name and event.get("move")]
    assert [move["state"] for move in own] == [move["state"] for move in end["moves"]]
    assert [own[0]["state"], own[-1]["state"], own[-1]["reason"]] == ["preparing", "ended", "stop"]
    assert "prefill" in [move["state"] for move in own]
    assert (recent["request_id"], recent["moves"]) == (name, end["moves"])
    assert (end["num_members"], end["num_done"]) == (len(TEXTS) if kind != "choose" else 1,) * 2
    members = {event["request_id"] for event in story.all if event.get("group") == name}
    assert len(members) == end["num_members"]
    for member in members:
        moves = [
            event["move"] for event in story.all if event.get("request_id") == member and event.get("move")
        ]
        assert {"preparing", "queued", "prefill"} <= {move["state"] for move in moves}
        assert all(move["reason"] for move in moves if move["state"] != "preparing")
    assert seconds[body["model"], "interactive", "prefill"] > 0


def test_one_that_chooses_waits_for_another_by_name(several):
    """O20: with the reason, in events, status and metrics; what is computed does not wait."""
    path, body = CALLS["choose"]
    with reading(several) as (http, story):
        first = asked(http, path, {**body, "prompt": f"first {PROMPT}", "choices": MANY})
        story.until(lambda event: event.get("what") == "admitted" and not event.get("group"))
        second = asked(http, path, {**body, "prompt": f"second {PROMPT}"})
        waiting = story.until(lambda event: event.get("what") == "waiting" and not event.get("group"))
        status, causes = http.get("/v1/runtime").json(), samples(http, "stoker:requests_waiting_for")
        story.until(lambda event: is_call(event, "choose") and event["what"] == "finished")
        first.join()
        second.join()
    reason = f"{waiting['move']['by']} is computed first"
    assert waiting["move"]["reason"] == reason
    rows = {row["request_id"]: row for row in status["groups"]}
    assert [row["waits_for"] for row in rows.values()] == ["", reason]
    assert [row["moves"][-1]["state"] for row in rows.values()] == ["prefill", "queued"]
    assert [entry["reason"] for entry in status["queue"]] == [reason]
    assert causes["slot",] == 1


def test_a_call_that_is_paused_is_told_to_stand_still_and_to_go_on(several):
    """O20, Q17: at once, however long the step of a request of it takes."""
    path, body = CALLS["state"]
    with reading(several) as (http, story):
        asking = asked(http, path, {**body, "input": [f"{text} {PROMPT}" for text in TEXTS]})
        name = story.until(lambda event: is_call(event) and event["what"] == "arrived")["request_id"]
        http.post(f"/v1/runtime/requests/{name}/pause").raise_for_status()
        http.post(f"/v1/runtime/requests/{name}/resume").raise_for_status()
        end = story.until(lambda event: is_call(event) and event["what"] == "finished")
        asking.join()
    moves = [(move["state"], move["reason"]) for move in end["moves"]]
    assert ("paused", "asked to") in moves
    assert moves[-1] == ("ended", "stop")
    assert "prefill" in [state for state, _ in moves[moves.index(("paused", "asked to")) :]]


def test_a_call_is_not_told_which_request_of_another_key_it_waits_for(start_server, tmp_path):
    """O20, S4: neither in its moves nor in its reason, in events, snapshots and status."""
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("key-one\nkey-two\n", encoding="utf-8")
    admins.write_text("key-admin\n", encoding="utf-8")
    make = lambda: Runtime(model=MODELS[0], isolation="thread", slots=2, ctx_size=2048)  # noqa: E731
    server = start_server(make, api_key_file=keys, admin_key_file=admins)
    server.ready.result(60)
    one, two, admin = ({"Authorization": f"Bearer key-{name}"} for name in ("one", "two", "admin"))
    path, body = CALLS["choose"]
    with reading(server, headers=one) as (http, story), reading(server, headers=admin) as (_, whole):
        secret = asked(http, path, {**body, "prompt": f"theirs {PROMPT}", "choices": MANY}, headers=two)
        name = whole.until(lambda event: event.get("what") == "admitted")["request_id"]
        mine = asked(http, path, body, headers=one)
        waiting = story.until(lambda event: event.get("what") == "waiting" and not event.get("group"))
        status = http.get("/v1/runtime", headers=one).json()
        with http.stream("GET", EVENTS, headers=one) as late:
            snapshot = Story(late).until(lambda event: event["event"] == "snapshot")
        secret.join()
        mine.join()
        story.until(lambda event: is_call(event, "choose") and event["what"] == "finished")
    assert (waiting["move"]["by"], waiting["move"]["reason"]) == (None, "another request is computed first")
    assert name not in json.dumps([story.all, status, snapshot])
    (unnamed, own) = status["groups"]
    assert (unnamed["request_id"], unnamed["moves"], unnamed["waits_for"]) == (None, [], "")
    assert own["waits_for"] == "another request is computed first"


def test_models_without_slots_have_no_lanes_in_events_either(several):
    """O20: a reader makes lanes of `num_slots`; what encoders compute at once are no slots."""
    with reading(several) as (http, _), http.stream("GET", EVENTS) as late:
        snapshot = Story(late).until(lambda event: event["event"] == "snapshot")
    slots = {model["model"]: model["num_slots"] for model in snapshot["models"]}
    assert slots == {"writer": 2, "embedder": 0, "ranker": 0, "recurrent": 2}
    assert len(snapshot["slots"]) == 4
