"""What happens to requests, as others than their clients are told it over HTTP."""

from __future__ import annotations

import json
import os
import signal
import threading

import httpx
import pytest

from stoker.runtime import Runtime

EVENTS, REQUESTS = "/v1/runtime/events", "/v1/runtime/requests"
SLOW = "fake:eog_period=0,step_delay_s=0.02"


class Story:
    """The events of a server, as one reader gets them."""

    def __init__(self, answer):
        self._lines = answer.iter_lines()
        self.all = []

    def until(self, is_it):
        """The events up to the one that it is, which comes last."""
        for line in self._lines:
            if line.startswith("data: {"):
                self.all.append(json.loads(line.removeprefix("data: ")))
                if is_it(self.all[-1]):
                    return self.all[-1]
        raise AssertionError("the stream has ended")

    def whats(self, request_id):
        """What happened to a request."""
        return [each["what"] for each in self.all if each.get("request_id") == request_id]


def happens(request_id, what):
    """Whether an event is that of that request."""
    return lambda event: (event.get("request_id"), event.get("what")) == (request_id, what)


def posted(http, request_id, num_tokens, priority="interactive", **headers):
    """A request that another thread reads to its end."""
    fields = {"max_tokens": num_tokens, "priority": priority, "model": "fake"}
    body = {"prompt": request_id, "request_id": request_id, "request": fields}
    asking = threading.Thread(target=lambda: http.post(REQUESTS, json=body, headers=headers))
    asking.start()
    return asking


@pytest.fixture(scope="module")
def one_slot(_module_servers):
    """A server of one slot and slow steps."""
    server = _module_servers(lambda: Runtime(model=SLOW, isolation="thread", slots=1, ctx_size=2048))
    server.ready.result(60)
    return server


def test_who_gives_its_slot_away_is_told_with_who_got_it_and_when_it_goes_on(one_slot):
    """SPEC O20, Q3: parked, by whom, and decode again; the lanes of a snapshot agree."""
    with (
        httpx.Client(base_url=one_slot.url, timeout=60) as http,
        http.stream("GET", EVENTS) as answer,
    ):
        story = Story(answer)
        story.until(lambda event: event["event"] == "snapshot")
        job = posted(http, "job", 60, "background")
        story.until(happens("job", "decoding"))
        posted(http, "person", 8).join()
        end = story.until(happens("job", "finished"))
        job.join()
    parked = next(event for event in story.all if event.get("what") == "parked")
    assert parked["request_id"] == "job"
    assert parked["move"]["by"] == "person"
    assert parked["move"]["reason"] == "gave its slot to person (interactive)"
    states = [move["state"] for move in end["moves"]]
    assert states == ["preparing", "queued", "prefill", "decode", "parked", "prefill", "decode", "ended"]
    assert [move["slot"] for move in end["moves"] if move["state"] == "decode"] == [0, 0]
    assert (end["num_moves"], end["num_parks"]) == (8, 1)
    assert end["itl_ms"]["p50"] <= end["itl_ms"]["max"]
    assert end["itl_ms"]["max"] < end["parked_s"] * 1000 + end["end_to_end_s"] * 1000
    assert story.whats("person")[0] == "arrived"


def test_who_waits_is_told_why_and_a_reader_who_comes_late_sees_it(one_slot):
    """SPEC O20: no free slot; lanes and rows of the snapshot are those of that moment."""
    with (
        httpx.Client(base_url=one_slot.url, timeout=60) as http,
        http.stream("GET", EVENTS) as answer,
    ):
        story = Story(answer)
        first = posted(http, "first", 60)
        story.until(happens("first", "decoding"))
        second = posted(http, "second", 2)
        waiting = story.until(happens("second", "waiting"))
        with http.stream("GET", EVENTS) as late:
            snapshot = Story(late).until(lambda event: event["event"] == "snapshot")
        story.until(happens("second", "finished"))
        first.join()
        second.join()
    assert (waiting["move"]["reason"], waiting["waits_for"]) == ("no free slot", "no free slot")
    (lane,) = snapshot["slots"]
    assert (lane["slot"], lane["request_id"], lane["index"], lane["state"]) == (0, "first", 0, "decode")
    rows = {row["request_id"]: row for row in snapshot["requests"]}
    assert (rows["second"]["state"], rows["second"]["waits_for"]) == ("queued", "no free slot")
    assert rows["first"]["waits_for"] == ""
    assert snapshot["schema"] == 2
    assert snapshot["memory"]["limit"] > 0
    assert snapshot["cache"]["live"]["cells_total"] > 0


@pytest.mark.long
def test_an_engine_that_is_killed_leaves_requests_that_are_told_to_go_on(start_server):
    """SPEC O20, L3: held, then replayed from the tokens there were; status keeps its figures meanwhile."""
    server = start_server(lambda: Runtime(model=SLOW, slots=1, ctx_size=2048))
    server.ready.result(60)
    with (
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("GET", EVENTS) as answer,
    ):
        story = Story(answer)
        pid = story.until(lambda event: event["event"] == "snapshot")["engine"]["pid"]
        before = http.get("/v1/runtime").json()
        asking = posted(http, "one", 40)
        story.until(happens("one", "decoding"))
        os.kill(pid, signal.SIGKILL)
        held = story.until(happens("one", "held"))
        status = http.get("/v1/runtime").json()
        replayed = story.until(happens("one", "replayed"))
        end = story.until(happens("one", "finished"))
        asking.join()
        steps = story.until(lambda event: event["event"] == "steps")
    assert held["move"]["reason"] == "the engine is restarting"
    assert status["memory"]["limit"] == before["memory"]["limit"]
    assert len(status["slots"]) == 1
    assert replayed["move"]["reason"].startswith("the engine was restarted: goes on from ")
    assert (end["num_restarts"], end["completion_tokens"]) == (1, 40)
    assert steps["model"] == "fake"


def test_other_keys_are_not_named_in_what_a_key_is_told(start_server, tmp_path):
    """SPEC O20, S4: neither as a cause, nor in a reason, nor in a story, nor in a lane."""
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("key-one\nkey-two\n", encoding="utf-8")
    admins.write_text("key-admin\n", encoding="utf-8")
    server = start_server(
        lambda: Runtime(model=SLOW, isolation="thread", slots=1, ctx_size=2048),
        api_key_file=keys,
        admin_key_file=admins,
    )
    server.ready.result(60)
    one, two, admin = ({"Authorization": f"Bearer key-{name}"} for name in ("one", "two", "admin"))
    with (
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("GET", EVENTS, headers=one) as answer,
        http.stream("GET", EVENTS, headers=admin) as all_of_it,
    ):
        story, whole = Story(answer), Story(all_of_it)
        job = posted(http, "job", 60, "background", **one)
        story.until(happens("job", "decoding"))
        secret = posted(http, "secret", 20, **two)
        parked = story.until(happens("job", "parked"))
        statuses = [http.get("/v1/runtime", headers=caller).json() for caller in (one, admin)]
        with http.stream("GET", EVENTS, headers=one) as again:
            snapshot = Story(again).until(lambda event: event["event"] == "snapshot")
        story.until(happens("job", "finished"))
        seen = whole.until(happens("job", "parked"))
        job.join()
        secret.join()
    assert parked["move"]["by"] is None
    assert parked["move"]["reason"] == "gave its slot to another request (interactive)"
    assert seen["move"]["by"] == "secret"
    assert "secret" not in json.dumps([story.all, snapshot, statuses[0]])
    assert "secret" in json.dumps(statuses[1])
    assert (snapshot["may"], snapshot["slots"][0]["request_id"]) == (
        {"administrate": False, "texts": False},
        None,
    )


def test_kinds_leave_out_all_else_and_a_wrong_one_is_named(one_slot):
    """SPEC O3: a log or a mirror makes the engine do nothing."""
    with httpx.Client(base_url=one_slot.url, timeout=60) as http:
        wrong = http.get(EVENTS, params={"kinds": "request,stpes"})
        assert (wrong.status_code, "'stpes'" in wrong.text) == (400, True)
        with http.stream("GET", EVENTS, params={"kinds": "request"}) as answer:
            story = Story(answer)
            story.until(lambda event: event["event"] == "snapshot")
            posted(http, "mine", 30).join()
            story.until(happens("mine", "finished"))
    assert {event["event"] for event in story.all} == {"snapshot", "request"}
