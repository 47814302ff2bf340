"""Errors as statuses, bodies and exception classes of the official client."""

from __future__ import annotations

import gzip
import json
import logging
import socket

import openai
import pytest
from stand_in import HOLD, delta

from stoker import errors

HELLO = [{"role": "user", "content": "Say hello"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "case",
    [
        (errors.InvalidRequestError("bad", param="stop"), openai.BadRequestError, "invalid_request_error"),
        (
            errors.ContextLengthError("900 of 512", num_tokens=900),
            openai.BadRequestError,
            "invalid_request_error",
        ),
        (errors.UnsupportedError("no"), openai.BadRequestError, "invalid_request_error"),
        (errors.ModelNotFoundError("none"), openai.NotFoundError, "not_found_error"),
        (errors.QueueFullError("full", retry_after_s=2.5), openai.RateLimitError, "rate_limit_error"),
        (errors.RequestTimeoutError("late"), openai.APIStatusError, "timeout_error"),
        (errors.NotReadyError("loading"), openai.InternalServerError, "server_error"),
        (errors.ModelFileError("broken"), openai.UnprocessableEntityError, "invalid_request_error"),
        (errors.EngineCrashedError("thrice"), openai.InternalServerError, "server_error"),
        (errors.StepFailedError("step"), openai.InternalServerError, "server_error"),
    ],
    ids=lambda case: type(case[0]).__name__,
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_error_becomes_the_clients_exception(scripted, scripted_client, case, stream):
    """S3: status, type, code and param, the same before a stream's first byte as without one."""
    error, expected, kind = case
    scripted.runtime.scripts.append([error])
    with pytest.raises(expected) as caught:
        scripted_client.chat.completions.create(model="default", messages=HELLO, stream=stream)
    assert caught.value.status_code == error.http_status
    body = caught.value.response.json()["error"]
    details = {"details": error.details} if error.details else {}
    assert (
        body == {"message": error.message, "type": kind, "code": error.code, "param": error.param} | details
    )
    assert caught.value.response.headers["x-request-id"]
    if error.http_status in (429, 503):
        assert int(caught.value.response.headers["retry-after"]) == (3 if error.retry_after_s else 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_unforeseen_failure_is_a_typed_500_without_its_text(scripted, scripted_http, stream, caplog):
    """S3: what we did not think of is logged, not shown."""
    scripted.runtime.scripts.append([ZeroDivisionError("secret")])
    answer = scripted_http.post(CHAT, json={"messages": HELLO, "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret" in caplog.text


def test_what_a_client_got_wrong_is_in_the_log_where_that_is_asked_for(scripted_http, caplog):
    """T13: whoever looks for the fault of a client finds it at level debug, in one line."""
    with caplog.at_level(logging.DEBUG, "stoker.server.errors"):
        scripted_http.post(CHAT, json={"messages": HELLO, "temperature": "hot\ner"})
    (record,) = [each for each in caplog.records if each.name == "stoker.server.errors"]
    assert record.getMessage().startswith(f"POST {CHAT}: 400 invalid_request: 'temperature: ")
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("content", "param", "says"),
    [
        ([{"type": "text", "text": 5}], ".0.text", "valid string"),
        (["x"], ".0", "an object"),
        ([{"type": "text", "text": "a"}, {"type": "file", "file": "x"}], ".1.file", "an object"),
        (5, "", "valid string"),
        (None, "", "needs content"),
    ],
)
def test_a_fault_inside_of_a_content_is_told_at_its_own_place(scripted_http, content, param, says):
    """S3: though a content may be a text too."""
    answer = scripted_http.post(CHAT, json={"messages": [{"role": "user", "content": content}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"messages.0.content{param}")
    assert error["message"].startswith(f"messages.0.content{param}: ")
    assert says in error["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"messages": "ab\xffc"}', "byte 0xff is no UTF-8 (byte 16)"),
        (rb'{"messages": "a\ud800b"}', r"\ud800 is half of a surrogate pair (byte 15)"),
        (rb'{"messages": "\\\ud83d\ude00\udc00"}', r"\udc00 is half of a surrogate pair (byte 28)"),
        (rb'{"messages": "\\ud800', "truncated"),
    ],
)
def test_what_makes_a_body_no_json_is_told_with_its_place(scripted_http, body, says):
    """S3: counted from the beginning of the body."""
    answer = scripted_http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_a_compressed_body_is_refused_by_name(scripted_http):
    """S3: it was read as if it were none; `identity` says that it is none."""
    body = json.dumps({"messages": HELLO}).encode()
    answer = scripted_http.post(CHAT, content=gzip.compress(body), headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    assert "'gzip'" in answer.json()["error"]["message"]
    wrong = scripted_http.post(CHAT, content=b"{}", headers={"Content-Encoding": "identity"})
    assert wrong.status_code == 400


def test_models_and_probes_answer_head_as_get_without_a_body(scripted_http):
    """S6: for what only looks whether they are there."""
    for path in ("/v1/models", "/models", "/v1/models/default", "/health", "/ready"):
        answer = scripted_http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
    assert scripted_http.head("/v1/models/no-such-model").status_code == 404
    assert scripted_http.head(CHAT).status_code == 405


def test_an_unknown_model_is_not_found(client):
    """S3: 404 `model_not_found`."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


def test_an_unknown_route_and_a_wrong_method_answer_in_the_one_shape(http):
    """S3: 404 and 405 are JSON errors too."""
    missing = http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = http.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"messages": "\xc3\x28"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 400 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": -Infinity}}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"messages": [{"role": "king", "content": "x"}]}',
        b'{"messages": []}',
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}',
    ],
    ids=lambda body: body[:60].decode("latin-1"),
)
def test_a_malformed_body_is_a_400(http, body):
    """S3: whatever the bytes, a typed 400 and never a 500."""
    answer = http.post(CHAT, content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_broken_http_request_harms_nobody(http, server):
    """S3: bytes that are not HTTP close their own connection only."""
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"\x00\xff nonsense\r\n\r\n")
        assert b"400" in raw.recv(4096)
    assert http.get("/health").status_code == 200


def test_an_error_after_the_stream_began_is_in_band(scripted, scripted_client, scripted_http):
    """S2: an error frame, then [DONE]; the official client raises it."""
    script = [delta("one"), errors.StepFailedError("the step failed")]
    scripted.runtime.scripts.extend([script, script])
    answer = scripted_http.post(CHAT, json={"messages": HELLO, "stream": True})
    assert answer.status_code == 200
    frames = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert json.loads(frames[-2])["error"]["code"] == "step_failed"
    assert frames[-1] == "[DONE]"
    with pytest.raises(openai.APIError, match="the step failed"):
        list(scripted_client.chat.completions.create(model="default", messages=HELLO, stream=True))


def test_one_failing_prompt_fails_its_request_and_ends_the_others(scripted, scripted_http, until):
    """L6, S5: the error is the answer, and no other prompt runs on."""
    scripted.runtime.scripts.extend([[HOLD], [errors.StepFailedError("second")], [HOLD]])
    answer = scripted_http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "second")
    until(lambda: scripted.call(lambda: not scripted.runtime.live))
    assert len(scripted.runtime.abandoned) == 2
