"""Suspend and resume over HTTP and by signals, requests that outlived a program, and who may read them."""

from __future__ import annotations

import json

import httpx
import pytest
from stand_in import FINISHED, HOLD, delta

from stoker.client.store.file import KeptRequest
from stoker.errors import NotReadyError, StepFailedError
from stoker.ipc.events import Paused, Queued
from stoker.ipc.request import FinishReason
from stoker.server.signals import SleepSwitch

REQUESTS = "/v1/runtime/requests"
HELLO = [{"role": "user", "content": "Say hello"}]
STORY = [
    Queued("x", 0),
    delta("Once "),
    Paused("x"),
    delta("upon", finish_reason=FinishReason.STOP),
    FINISHED,
]


def chunks(answer):
    """The documents of a stream, and whether it came to its end."""
    lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def keep(scripted, *requests, script=STORY):
    """Let the runtime keep these, all with the same script."""
    scripted.runtime.kept_requests.extend(requests)
    scripted.runtime.kept_scripts.update({request.id: script for request in requests})


def test_suspend_and_resume_answer_when_they_are_through(scripted, scripted_http):
    """SPEC L2, I4: with reason and grace; suspended is idle, not an error: /ready still says yes."""
    assert scripted_http.post("/v1/runtime/suspend").json() == {"suspended": True}
    body = {"reason": "background", "grace_s": 2}
    assert scripted_http.post("/v1/runtime/suspend", json=body).json() == {"suspended": True}
    ready = scripted_http.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "suspended"})
    assert scripted_http.get("/metrics").status_code == 200
    assert scripted_http.post("/v1/runtime/resume").json() == {"suspended": False}
    assert scripted_http.get("/ready").json() == {"status": "ready"}
    assert scripted.runtime.calls == [
        ("suspend", "request", None),
        ("suspend", "background", 2.0),
        ("resume",),
    ]


@pytest.mark.parametrize("body", [{"grace_s": -1}, {"grace_s": 1e9}, {"reason": 5}, {"reason": ""}])
def test_a_malformed_suspend_is_refused(scripted, scripted_http, body):
    """SPEC S3: and nothing is suspended."""
    refused = scripted_http.post("/v1/runtime/suspend", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(body)))
    assert scripted.runtime.calls == []


def test_the_runtime_is_told_every_name_of_a_request_and_whose_it_is(scripted, scripted_http):
    """SPEC L2: X-Request-Id and the answer's id, to be found by after a restart."""
    headers = {"X-Request-Id": "mine"}
    chat = scripted_http.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers).json()
    text = scripted_http.post("/v1/completions", json={"prompt": ["a", "b"]}, headers=headers).json()
    assert scripted.runtime.named == [
        (("mine", chat["id"]), ""),
        (("mine", text["id"]), ""),
        (("mine", text["id"]), ""),
    ]


@pytest.mark.parametrize("name", ["chatcmpl-1", "mine"])
def test_a_kept_conversation_is_read_from_its_first_token(scripted, scripted_http, name):
    """SPEC L2: in the form it was asked for in, by any of its names, as often as wanted."""
    keep(scripted, KeptRequest(id="chatcmpl-1", names=["mine", "chatcmpl-1"], is_chat=True, model="m"))
    for _ in range(2):
        with scripted_http.stream("GET", f"{REQUESTS}/{name}/stream") as answer:
            found = chunks(answer)
        assert {chunk["id"] for chunk in found} == {"chatcmpl-1"}
        assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
        texts = [c["choices"][0]["delta"].get("content", "") for c in found if c["choices"]]
        assert "".join(texts) == "Once upon"
        assert found[-1]["usage"]["completion_tokens"] == FINISHED.usage.completion_tokens
    assert scripted.runtime.abandoned == []


def test_the_prompts_of_a_kept_completion_come_as_one_answer(scripted, scripted_http):
    """SPEC L2: choice j of prompt i has the index it had, with more than nine prompts too.

    An id that its client has sent twice means the last answer.
    """
    keep(scripted, KeptRequest(id="cmpl-0", names=["mine", "cmpl-0"], model="m"))
    names = ["mine", "cmpl-1"]
    prompts = [KeptRequest(id=f"cmpl-1-{i}", names=names, model="m", n=2) for i in (10, *range(10))]
    keep(scripted, *prompts, KeptRequest(id="cmpl-2", names=["other", "cmpl-2"], model="m"))
    for i, kept in enumerate(sorted(prompts, key=lambda kept: int(kept.id.split("-")[-1]))):
        both = [delta(f"{i}.{j}", index=j, finish_reason=FinishReason.STOP) for j in range(2)]
        scripted.runtime.kept_scripts[kept.id] = [*both, FINISHED]
    with scripted_http.stream("GET", f"{REQUESTS}/mine/stream") as answer:
        found = chunks(answer)
    texts: dict[int, str] = {}
    for choice in (choice for chunk in found for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {2 * i + j: f"{i}.{j}" for i in range(11) for j in range(2)}
    assert {chunk["id"] for chunk in found} == {"cmpl-1"}


def test_a_kept_request_that_failed_says_so_in_its_stream(scripted, scripted_http):
    """SPEC L6, S2: in band once there was text."""
    keep(scripted, KeptRequest(id="a", model="m"), script=[delta("x"), StepFailedError("it failed")])
    with scripted_http.stream("GET", f"{REQUESTS}/a/stream") as answer:
        found = chunks(answer)
    assert found[-1]["error"]["code"] == "step_failed"


def test_only_the_key_that_made_a_request_finds_it(start_server, tmp_path):
    """SPEC S4, L2: for another key it is not there, neither in the list nor by its id."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    server = start_server(api_key_file=keys)
    server.ready.result(60)
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with httpx.Client(base_url=server.url) as http:
        assert http.post("/v1/completions", json={"prompt": "x"}, headers=one).is_success
        owner = server.runtime.named[0][1]
        assert owner
        keep(server, KeptRequest(id="a", model="m", owner=owner))
        assert http.get(f"{REQUESTS}/a/stream").status_code == 401
        hidden = http.get(f"{REQUESTS}/a/stream", headers=two)
        assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "request_not_found")
        assert http.get(REQUESTS, headers=two).json()["data"] == []
        for action in ("pause", "resume", "cancel"):
            assert http.post(f"{REQUESTS}/a/{action}", headers=two).status_code == 404
        assert [found["id"] for found in http.get(REQUESTS, headers=one).json()["data"]] == ["a"]
        with http.stream("GET", f"{REQUESTS}/a/stream", headers=one) as answer:
            assert chunks(answer)
        assert server.runtime.calls == [("attach", "a", owner)]


def test_the_list_shows_live_and_kept_requests(scripted, scripted_http):
    """SPEC I4, L2: ids, names, kind, state and tokens."""
    keep(scripted, KeptRequest(id="a", names=["b"], model="m", state="ended", num_tokens=9))
    scripted.runtime.scripts.append([delta("a"), HOLD, delta("b"), FINISHED])
    body = {"messages": HELLO, "stream": True}
    headers = {"X-Request-Id": "mine"}
    with scripted_http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        own = next(lines).split('"id":"')[1].split('"')[0]
        live, kept = scripted_http.get(REQUESTS).json()["data"]
        scripted.call(scripted.runtime.release)
        list(lines)
    assert live == {
        "id": own,
        "names": ["mine", own],
        "kind": "chat",
        "priority": "interactive",
        "class": "interactive",
        "model": "stand-in",
        "state": "decode",
        "position": None,
        "eta_s": None,
        "num_tokens": 1,
        "is_kept": False,
    }
    assert kept == {
        "id": "a",
        "names": ["b"],
        "kind": "completion",
        "priority": "interactive",
        "class": "interactive",
        "model": "m",
        "state": "ended",
        "position": None,
        "eta_s": None,
        "num_tokens": 9,
        "is_kept": True,
    }
    assert [found["id"] for found in scripted_http.get(REQUESTS).json()["data"]] == ["a"]


def test_a_kept_request_is_cancelled_by_any_of_its_names(scripted, scripted_http):
    """SPEC I4, L2: as one with a client is, and together with one that is called the same."""
    keep(scripted, KeptRequest(id="a", names=["mine"], model="m"))
    scripted.runtime.scripts.append([delta("x"), HOLD, FINISHED])
    body = {"messages": HELLO, "stream": True}
    headers = {"X-Request-Id": "mine"}
    with scripted_http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        own = next(lines).split('"id":"')[1].split('"')[0]
        assert scripted_http.post(f"{REQUESTS}/mine/cancel").json()["cancelled"] == [own, "a"]
        list(lines)
    ended = scripted_http.post(f"{REQUESTS}/mine/cancel")
    assert ended.json() == {"id": "mine", "cancelled": ["a"]}
    assert scripted.runtime.cancelled == [own, "a", "a"]
    assert scripted_http.get(f"{REQUESTS}/none/stream").status_code == 404


class Refusing:
    """A runtime that can do neither."""

    is_suspended = False

    def __init__(self, error):
        self.error = error

    async def suspend(self, reason="sleep", *, grace_s=None):
        """Fail."""
        raise self.error

    async def resume(self):
        """Fail."""
        raise self.error


@pytest.mark.parametrize("error", [NotReadyError("not started"), RuntimeError("a bug")])
async def test_a_signal_that_cannot_be_obeyed_goes_to_the_log(caplog, error):
    """SPEC L2: nobody waits for it, and the server lives."""
    switch = SleepSwitch(Refusing(error))
    switch.suspend()
    switch.resume()
    for act in list(switch._acts):
        await act
    assert "could not suspend" in caplog.text
    assert "could not resume" in caplog.text
    assert str(error) in caplog.text
