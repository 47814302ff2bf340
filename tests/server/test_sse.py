"""Server-sent events on the wire, and what a client that leaves frees."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading

import pytest
from stand_in import FINISHED, HOLD, delta

from stoker.errors import ModelTooLargeError
from stoker.ipc.events import Parked, Paused, PrefillProgress, Queued, Resumed
from stoker.ipc.request import FinishReason
from stoker.server import streaming as delivery

HELLO = [{"role": "user", "content": "Say hello"}]
CHAT = "/v1/chat/completions"
LLAMA_TIMINGS = {
    "cache_n": 1,
    "prompt_n": 2,
    "prompt_ms": 250.0,
    "prompt_per_token_ms": 125.0,
    "prompt_per_second": 8.0,
    "predicted_n": 2,
    "predicted_ms": 125.0,
    "predicted_per_token_ms": 125.0,
    "predicted_per_second": 8.0,
}
PROGRESS = PrefillProgress(request_id="x", total=100, cached=20, processed=60, time_ms=5.5)


def frames(text):
    """The JSON of every data frame but [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_wire_is_data_frames_and_done(scripted, scripted_http):
    """S2: the exact bytes of a stream's frames."""
    scripted.runtime.scripts.append([delta("Hi"), delta("", finish_reason=FinishReason.STOP), FINISHED])
    answer = scripted_http.post(
        CHAT, json={"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    role, text, end, usage = frames(answer.text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"] == [
        {"index": 0, "delta": {"content": "Hi"}, "logprobs": None, "finish_reason": None}
    ]
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert role["usage"] is None
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize("reason", ["cancelled", "preempted", "length"])
def test_finish_reasons_are_passed_on(scripted, scripted_http, reason):
    """D4, Q4: whole and streamed, chat and text."""
    script = [delta("a", finish_reason=FinishReason(reason)), FINISHED]
    scripted.runtime.scripts.extend([script] * 4)
    for stream in (False, True):
        text = scripted_http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        last = frames(text.text)[-1] if stream else text.json()
        shown = "" if stream else "a"  # in a stream the reason comes by itself
        assert last["choices"][0] == {"index": 0, "text": shown, "logprobs": None, "finish_reason": reason}
    whole = scripted_http.post(CHAT, json={"messages": HELLO}).json()
    assert whole["choices"][0]["finish_reason"] == reason
    assert whole["timings"] == {
        "queue_ms": 500.0,
        "prefill_ms": 250.0,
        "decode_ms": 125.0,
        "num_preemptions": 2,
        **LLAMA_TIMINGS,
    }
    streamed = scripted_http.post(CHAT, json={"messages": HELLO, "stream": True})
    assert frames(streamed.text)[-1]["choices"][0]["finish_reason"] == reason


def test_silence_is_broken_by_comments(scripted, scripted_http):
    """S2: with nothing to say the stream begins and a comment comes every `keepalive_s`."""
    scripted.runtime.scripts.append([HOLD, delta("late"), FINISHED])
    with scripted_http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        comments = [line for line in (next(lines) for _ in range(4)) if line]
        assert comments == [": keep-alive", ": keep-alive"]
        scripted.call(scripted.runtime.release)
        assert any("late" in line for line in lines)


def test_a_waiting_client_learns_its_place_at_once(scripted, scripted_http):
    """Q14, I8: headers come with the queue position, before any token."""
    scripted.runtime.scripts.append([Queued("x", 7), HOLD, delta("a"), FINISHED])
    with scripted_http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as answer:
        assert answer.headers["x-stoker-queue-position"] == "7"
        scripted.call(scripted.runtime.release)
        answer.read()


@pytest.mark.parametrize("state", ["ready", "loading"])
def test_a_stream_whose_model_is_refused_while_it_is_loaded_is_an_http_error(
    scripted, scripted_http, until, monkeypatch, state
):
    """S3, R1: it begins later where a model has to come first; else an error comes in the stream."""
    status = {"ready": 200, "loading": 422}[state]
    monkeypatch.setattr(delivery, "GRACE_S", 0.0)
    monkeypatch.setattr(delivery, "LOADING_GRACE_S", 60.0)
    refused = ModelTooLargeError("it needs 9 MiB", needed=9)
    scripted.runtime.model_state = state
    scripted.runtime.scripts.append([Queued("x", 0), HOLD, refused])
    answers, opened = [], threading.Event()

    def ask():
        with scripted_http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as answer:
            opened.set()
            answers.append((answer.status_code, answer.read()))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: scripted.call(lambda: len(scripted.runtime.live) == 1))
    if status == 200:
        opened.wait()
    assert opened.is_set() == (status == 200)
    scripted.call(scripted.runtime.release)
    asking.join()
    assert answers[0][0] == status
    assert b"model_too_large" in answers[0][1]


def comments_of(text):
    """The comment lines, without their colons."""
    return [line.removeprefix(": ") for line in text.split("\n\n") if line.startswith(":")]


def test_headers_tell_the_seconds_to_go_where_they_are_known(scripted, scripted_http):
    """Q14, I8: position and estimate at arrival; the next in line gets no comment, and no guess."""
    scripted.runtime.scripts.append([Queued("x", 3, 4.25), delta("a"), FINISHED])
    scripted.runtime.scripts.append([Queued("x", 0), delta("a"), FINISHED])
    known, unknown = (
        scripted_http.post("/v1/completions", json={"prompt": "x", "stream": True}) for _ in range(2)
    )
    assert (known.headers["x-stoker-queue-position"], known.headers["x-stoker-eta"]) == ("3", "4.2")
    assert unknown.headers["x-stoker-queue-position"] == "0"
    assert "x-stoker-eta" not in unknown.headers
    assert (comments_of(known.text), comments_of(unknown.text)) == (["queued position=3 eta_s=4.2"], [])


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_waiting_and_interruptions_are_told_in_comments(scripted, scripted_http, path):
    """Q4, Q14, Q17: each in its place between the tokens; clients that know of none skip them."""
    parked = Parked(request_id="x", index=0, form="cells", reason="interactive")
    scripted.runtime.scripts.append(
        [
            Queued("x", 3, 4.2),
            Queued("x", 1),
            delta("a"),
            parked,
            Queued("x", 0, 0.5),
            delta("b"),
            Paused("x"),
            Resumed("x"),
            delta("c", finish_reason=FinishReason.STOP),
            FINISHED,
        ]
    )
    answer = scripted_http.post(path, json={"messages": HELLO, "prompt": "x", "stream": True})
    assert comments_of(answer.text) == [
        "queued position=3 eta_s=4.2",
        "queued position=1",
        "parked",
        "queued position=0 eta_s=0.5",
        "paused",
        "resumed",
    ]
    assert len(frames(answer.text)) == (5 if path == CHAT else 4)  # a chat names the role first
    assert answer.text.index(": parked") < answer.text.index('"b"') < answer.text.index(": paused")


def test_a_whole_answer_says_nothing_of_interruptions(scripted, scripted_http):
    """Q4: only what was written counts."""
    parked = Parked(request_id="x", index=0, form="tokens", reason="interactive")
    script = [delta("a"), parked, Queued("x", 0), Paused("x"), Resumed("x"), delta("b"), FINISHED]
    scripted.runtime.scripts.append(script)
    answer = scripted_http.post(CHAT, json={"messages": HELLO}).json()
    assert answer["choices"][0]["message"]["content"] == "ab"


def test_the_official_client_skips_comments(scripted, scripted_client):
    """Q14, S2: a stream that waited and was paused reads like any other."""
    scripted.runtime.scripts.append(
        [Queued("x", 3, 4.2), delta("a"), Paused("x"), Resumed("x"), delta("b"), FINISHED]
    )
    chunks = scripted_client.chat.completions.create(model="default", messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_prefill_progress_shows_real_counts(scripted, scripted_http, path):
    """S2: a chunk a report, with llama-server's shape."""
    scripted.runtime.scripts.append([PROGRESS, delta("a"), FINISHED])
    body = {"messages": HELLO, "prompt": "x", "stream": True, "return_progress": True}
    first = frames(scripted_http.post(path, json=body).text)[0]
    assert first["prompt_progress"] == {"total": 100, "cache": 20, "processed": 60, "time_ms": 5.5}
    assert scripted.runtime.requests[0].return_progress


def test_text_held_back_makes_no_frame(scripted, scripted_http):
    """D3: a token whose text waits behind a possible stop string is not an empty chunk."""
    scripted.runtime.scripts.append([delta("a"), delta(""), delta("b"), FINISHED])
    answer = scripted_http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert [frame["choices"][0]["text"] for frame in frames(answer.text)] == ["a", "b"]


def request_bytes(server, *, stream):
    """A chat request as it goes over the wire."""
    body = json.dumps({"messages": HELLO, "stream": stream, "max_tokens": 4000}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_byte_frees_the_request(scripted, until, stream):
    """S5: the runtime's stream is closed although nothing was ever sent."""
    scripted.runtime.scripts.append([HOLD])
    with socket.create_connection(("127.0.0.1", scripted.port)) as raw:
        raw.sendall(request_bytes(scripted, stream=stream))
        until(lambda: scripted.call(lambda: len(scripted.runtime.live) == 1))
    until(lambda: scripted.call(lambda: not scripted.runtime.live))
    assert len(scripted.runtime.abandoned) == 1
    until(lambda: scripted.call(scripted.runtime.with_client) == [])


def test_leaving_a_list_of_prompts_frees_them_all(scripted, scripted_http, until):
    """S5: every prompt of the request is closed."""
    scripted.runtime.scripts.extend([[delta("a"), HOLD], [HOLD], [delta("b"), HOLD]])
    body = {"prompt": ["a", "b", "c"], "stream": True}
    with scripted_http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    until(lambda: scripted.call(lambda: not scripted.runtime.live))
    assert len(scripted.runtime.abandoned) == 3


def idle(http):
    """Whether the runtime says that nothing runs or waits."""
    status = http.get("/v1/runtime").json()
    return not status["queue"] and all(slot["request_id"] is None for slot in status["slots"])


def leave_at_random(server, seed):
    """Ask, read a random amount, leave."""
    chance = random.Random(seed)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            request_bytes(server, stream=chance.random() < 0.7)[: None if chance.random() < 0.9 else 150]
        )
        if chance.random() < 0.7:
            raw.settimeout(chance.choice([0.001, 0.01, 0.05]))
            with contextlib.suppress(TimeoutError):
                raw.recv(chance.choice([1, 200, 4000]))


def test_leaving_in_the_middle_of_the_body_is_no_failure(scripted, until, caplog):
    """S5: half a request is dropped without a word in the log."""
    with socket.create_connection(("127.0.0.1", scripted.port)) as raw:
        raw.sendall(request_bytes(scripted, stream=True)[:-5])
        until(lambda: scripted.call(lambda: len(scripted.service.server.server_state.tasks)) > 0)
    until(lambda: scripted.call(lambda: len(scripted.service.server.server_state.tasks)) == 0)
    assert scripted.call(scripted.runtime.with_client) == []
    assert not caplog.records


def test_two_hundred_clients_that_leave_at_random_leave_nothing(server, http, until):
    """S5: no slot, queue entry, stream or name is left behind."""
    threads = [
        threading.Thread(target=lambda first=first: [leave_at_random(server, first + i) for i in range(20)])
        for first in range(0, 200, 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not server.call(lambda: server.service.server.server_state.tasks))  # of templates too
    until(lambda: idle(http))
    until(lambda: server.call(server.runtime.with_client) == [])
    answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
