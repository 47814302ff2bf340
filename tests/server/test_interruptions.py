"""Pausing, preempting and refusing over HTTP, with a real engine behind it and the fake model."""

from __future__ import annotations

import contextlib
import json

import httpx
import pytest

from stoker.runtime import Runtime

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Once", "max_tokens": 100, "seed": 7, "stream": True}
BACKGROUND = {"X-Stoker-Priority": "background"}


def make_runtime():
    """One slot, a hundredth of a second a step, two that may wait."""
    fake = "fake:eog_period=0,step_delay_s=0.01"
    return Runtime(model=fake, isolation="thread", slots=1, max_queue=2, drain_s=0.0)


@pytest.fixture(scope="module")
def slow(_module_servers):
    """A server in front of it that breaks silence often."""
    server = _module_servers(make_runtime, keepalive_s=0.02)
    server.ready.result(60)
    return server


@pytest.fixture
def slow_http(slow):
    """A plain client of it."""
    with httpx.Client(base_url=slow.url, timeout=60) as client:
        yield client


class Reader:
    """One stream, line by line: text and what its comments say."""

    def __init__(self, answer):
        self._lines = (line for line in answer.iter_lines() if line and line != "data: [DONE]")
        self.texts = []
        self.comments = []
        self.reasons = []

    def read(self):
        """The next line."""
        line = next(self._lines)
        if line.startswith(": "):
            self.comments.append(line.removeprefix(": "))
            return
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        self.texts.append(choice["text"])
        self.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []

    def read_until(self, holds):
        """Lines until something holds."""
        while not holds():
            self.read()

    def read_all(self):
        """To the end; the whole text."""
        with contextlib.suppress(StopIteration):
            self.read_until(lambda: False)
        return "".join(self.texts)


def text_of(http):
    """What the long request says when nobody disturbs it."""
    whole = http.post(COMPLETIONS, json={**LONG, "stream": False})
    return whole.json()["choices"][0]["text"]


def request_ids(http, place):
    """Whom /v1/runtime shows there."""
    return [waiting["request_id"] for waiting in http.get("/v1/runtime").json()[place]]


def test_a_paused_stream_stands_still_and_goes_on_to_the_same_text(slow_http):
    """Q17: no token after `: paused`; the status shows it; `: resumed`, then the rest."""
    expected = text_of(slow_http)
    with slow_http.stream("POST", COMPLETIONS, json=LONG, headers={"X-Request-Id": "mine"}) as answer:
        reader = Reader(answer)
        reader.read_until(lambda: len(reader.texts) == 5)
        (own,) = slow_http.post("/v1/runtime/requests/mine/pause").json()["paused"]
        reader.read_until(lambda: "paused" in reader.comments)
        num_before = len(reader.texts)
        for _ in range(5):
            reader.read()
        assert reader.comments[-5:] == ["keep-alive"] * 5
        assert len(reader.texts) == num_before
        assert request_ids(slow_http, "paused") == [own]
        assert slow_http.post("/v1/runtime/requests/mine/resume").json()["resumed"] == [own]
        assert reader.read_all() == expected
        assert reader.comments.count("resumed") == 1
    assert request_ids(slow_http, "paused") == []


def test_a_paused_stream_leaves_its_slot_to_others_and_can_be_cancelled(slow_http):
    """Q17: there is one slot; another request runs to its end meanwhile."""
    with slow_http.stream("POST", COMPLETIONS, json=LONG, headers={"X-Request-Id": "mine"}) as answer:
        reader = Reader(answer)
        reader.read_until(lambda: len(reader.texts) == 2)
        slow_http.post("/v1/runtime/requests/mine/pause")
        other = slow_http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3})
        assert other.json()["usage"]["completion_tokens"] == 3
        slow_http.post("/v1/runtime/requests/mine/cancel")
        reader.read_all()
        assert reader.reasons == ["cancelled"]


def test_background_work_is_parked_for_a_person_and_goes_on_to_the_same_text(slow_http):
    """Q3, Q4: the stream tells of it, and loses nothing."""
    expected = text_of(slow_http)
    with slow_http.stream("POST", COMPLETIONS, json=LONG, headers=BACKGROUND) as answer:
        reader = Reader(answer)
        reader.read_until(lambda: len(reader.texts) == 5)
        person = slow_http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3})
        assert person.json()["usage"]["completion_tokens"] == 3
        assert reader.read_all() == expected
        assert "parked" in reader.comments
        assert reader.reasons == ["length"]


def test_work_that_would_rather_end_than_wait_ends_as_preempted(slow_http):
    """Q4: `preempt: cancel` keeps the partial text."""
    body = {**LONG, "preempt": "cancel"}
    with slow_http.stream("POST", COMPLETIONS, json=body, headers=BACKGROUND) as answer:
        reader = Reader(answer)
        reader.read_until(lambda: len(reader.texts) == 5)
        slow_http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3})
        assert reader.read_all()
        assert reader.reasons == ["preempted"]


def test_a_full_line_answers_429_to_background_first(slow_http):
    """Q11, S3: one runs; at one that waits a job is refused, at two a person, with Retry-After."""
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(slow_http.stream("POST", COMPLETIONS, json=LONG))
        job = slow_http.post(COMPLETIONS, json=LONG, headers=BACKGROUND)
        stack.enter_context(slow_http.stream("POST", COMPLETIONS, json=LONG))
        person = slow_http.post(COMPLETIONS, json=LONG)
        for refused in (job, person):
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1


def test_a_waiting_stream_tells_its_place(start_server):
    """Q14: by header at its arrival, before it has a slot; and by the status."""
    server = start_server(make_runtime)
    server.ready.result(60)
    with (
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", COMPLETIONS, json=LONG) as running,
    ):
        reader = Reader(running)
        reader.read_until(lambda: len(reader.texts) == 1)
        with http.stream("POST", COMPLETIONS, json={**LONG, "max_tokens": 2}) as waiting:
            assert waiting.headers["x-stoker-queue-position"] == "0"
            (place,) = http.get("/v1/runtime").json()["queue"]
            assert (place["class"], place["position"], place["index"]) == ("interactive", 0, 0)
