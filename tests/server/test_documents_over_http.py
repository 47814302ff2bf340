"""Documents as clients send them: OpenAI's two APIs and Anthropic's, by the official clients."""

from __future__ import annotations

import base64
import http.client
import json
import zlib

import anthropic
import openai
import psutil
import pytest
from stand_in import FINISHED, delta

from pdfs import pdf, stream
from stoker.client.documents import DocumentReader
from stoker.documents.limits import DocumentLimits
from stoker.ipc.request import FinishReason

REPORT = pdf("Rain in Bonn", "Sun in Rome")
DATA = base64.b64encode(REPORT).decode()
URI = f"data:application/pdf;base64,{DATA}"
SHOWN = (
    '<document name="report.pdf" pages="2">\n<page number="1">\nRain in Bonn\n</page>\n'
    '<page number="2">\nSun in Rome\n</page>\n</document>'
)
SLOW = pdf(
    stream(zlib.compress(b"BT " + b"(a) Tj 1 0 0 1 0 9 Tm " * 1_000_000 + b"ET"), "/Filter /FlateDecode")
)
QUESTION = "What is the weather?"
FILE = {"type": "file", "file": {"filename": "report.pdf", "file_data": URI}}
INPUT_FILE = {"type": "input_file", "filename": "report.pdf", "file_data": URI}


@pytest.fixture
def claude(scripted):
    """The official client of the Messages API."""
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def whole(_fake):
    """The official client of a server with a real runtime."""
    with openai.OpenAI(base_url=f"{_fake.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def says(scripted, text="Hi"):
    """The next answer."""
    steps = [delta(text), delta("", finish_reason=FinishReason.STOP), FINISHED]
    scripted.call(lambda: scripted.runtime.scripts.append(steps))


def prompt(scripted):
    """Of the last request."""
    return scripted.runtime.requests[-1].prompt


def test_a_chat_completion_reads_a_file(scripted, scripted_client):
    """V12: beside text, in its place."""
    says(scripted)
    content = [FILE, {"type": "text", "text": QUESTION}]
    scripted_client.chat.completions.create(model="default", messages=[{"role": "user", "content": content}])
    assert f"{SHOWN}\n{QUESTION}" in prompt(scripted)


def test_a_response_reads_a_file(scripted, scripted_client):
    """V12, W10: the form of Open Responses' test `file-input`; the response that goes on from it too."""
    says(scripted)
    content = [{"type": "input_text", "text": QUESTION}, INPUT_FILE]
    asked = {"model": "default", "input": [{"type": "message", "role": "user", "content": content}]}
    first = scripted_client.responses.create(**asked)
    assert (first.status, first.output_text) == ("completed", "Hi")
    assert f"{QUESTION}\n{SHOWN}" in prompt(scripted)
    before = prompt(scripted)
    says(scripted, "Again")
    scripted_client.responses.create(model="default", input="And now?", previous_response_id=first.id)
    assert prompt(scripted).startswith(before[:100])
    assert SHOWN in prompt(scripted)
    output = {"type": "function_call_output", "call_id": "c", "output": [INPUT_FILE]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    says(scripted)
    scripted_client.responses.create(model="default", input=[call, output])
    assert SHOWN in prompt(scripted)


@pytest.mark.parametrize(
    ("source", "body"),
    [
        (
            {"type": "base64", "media_type": "application/pdf", "data": DATA},
            '<page number="1">\nRain in Bonn\n</page>\n<page number="2">\nSun in Rome\n</page>',
        ),
        ({"type": "text", "media_type": "text/plain", "data": "Rain, käse"}, "Rain, käse"),
        ({"type": "content", "content": "Rain"}, "Rain"),
        ({"type": "content", "content": [{"type": "text", "text": "Rain"}]}, "Rain"),
    ],
)
def test_a_message_reads_a_document(scripted, claude, source, body):
    """V12: every source that is one, with title and context; in the result of a tool too."""
    document = {"type": "document", "source": source, "title": "Weather", "context": "Of March."}
    used = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    for messages in (
        [{"role": "user", "content": [document, {"type": "text", "text": QUESTION}]}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ],
    ):
        says(scripted)
        claude.messages.create(model="default", max_tokens=9, messages=messages)
        pages = ' pages="2"' if source["type"] == "base64" else ""
        shown = (
            f'<document name="Weather" title="Weather"{pages}>\n<context>\nOf March.\n</context>\n{body}\n'
        )
        assert shown in prompt(scripted)


@pytest.mark.parametrize(
    ("content", "status", "param", "told"),
    [
        ({"type": "file", "file": {"file_id": "file-1"}}, 400, "file.file_id", "send the file itself"),
        ({"type": "file", "file": {"file_data": "@"}}, 400, "file.file_data", "is not base64"),
        ({"type": "file"}, 400, "file", "no object"),
        ({"type": "file", "file": {"file_data": DATA[:400]}}, 400, "file.file_data", "document"),
    ],
)
def test_an_error_of_a_chat_completion_names_the_part(scripted_client, content, status, param, told):
    """S3: 400, code and place."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, content]}]
    with pytest.raises(openai.APIStatusError) as caught:
        scripted_client.chat.completions.create(model="default", messages=messages)
    assert (caught.value.status_code, caught.value.param) == (status, f"messages.0.content.1.{param}")
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_file", "file_id": "f"}, "file_id"),
        ({"type": "input_file", "file_url": "https://a.example/b.pdf"}, "file_url"),
        ({"type": "input_file", "file_data": "data:;base64,UEsDBA=="}, "file_data"),
        ({"type": "input_file"}, "file_data"),
    ],
)
def test_an_error_of_a_response_names_the_part(scripted_client, part, param):
    """S3: the place in the caller's own body."""
    with pytest.raises(openai.BadRequestError) as caught:
        scripted_client.responses.create(model="default", input=[{"role": "user", "content": [part]}])
    assert caught.value.param == f"input.0.content.0.{param}"
    assert f"input.0.content.0.{param}" in caught.value.message


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"source": {"type": "file", "file_id": "f"}}, "source.file_id"),
        ({"source": {"type": "url", "url": "https://a.example/b.pdf"}}, "source.url"),
        ({"source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}, "source.data"),
        ({"source": {"type": "base64", "media_type": "application/pdf"}}, "source.data"),
        ({"source": {"type": "x"}}, "source"),
        ({"source": {"type": "content", "content": [{"type": "image"}]}}, "source.content.0"),
        ({"source": {"type": "text", "data": "a"}, "citations": {"enabled": True}}, "citations"),
        ({"source": {"type": "text", "data": "a"}, "title": "x" * 999}, "title"),
    ],
)
def test_an_error_of_a_message_names_the_block(scripted_http, block, param):
    """S3: in Anthropic's shape."""
    messages = [{"role": "user", "content": [{"type": "document", **block}]}]
    answer = scripted_http.post("/v1/messages", json={"max_tokens": 9, "messages": messages})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == f"messages.0.content.0.{param}"
    assert error["param"] in error["message"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": [INPUT_FILE]}]}),
        (
            "/v1/messages/count_tokens",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "source": {"type": "base64", "media_type": "application/pdf", "data": DATA},
                            }
                        ],
                    }
                ]
            },
        ),
    ],
)
def test_documents_are_counted(whole, route, body):
    """V12: as they are shown."""
    found = whole.post(route.removeprefix("/v1"), body=body, cast_to=dict)["input_tokens"]
    assert found > len(SHOWN) / 4


def test_a_client_that_leaves_ends_the_reading(scripted, monkeypatch, until):
    """V12: whole or streamed, the process that reads is gone."""
    reader = DocumentReader(DocumentLimits(max_s=600))
    monkeypatch.setattr(scripted.runtime, "documents", reader)
    uri = f"data:application/pdf;base64,{base64.b64encode(SLOW).decode()}"
    part = {"type": "file", "file": {"file_data": uri}}
    stopped, stop = [], reader._pool.stop

    def noted(future):
        stop(future)
        stopped.append(future)

    monkeypatch.setattr(reader._pool, "stop", noted)
    try:
        for is_stream in (False, True):
            body = {"messages": [{"role": "user", "content": [part]}], "stream": is_stream}
            host = scripted.url.removeprefix("http://")
            connection = http.client.HTTPConnection(host)
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            until(lambda: reader.stats()["running"] == 1 and bool(reader._pool.pids()))
            child = psutil.Process(reader._pool.pids()[0])
            connection.close()
            child.wait(60)
            until(lambda: reader.stats()["running"] == 0)
            assert len(stopped) == 1 + is_stream
    finally:
        reader.close()


def test_a_whole_runtime_answers_about_a_file(whole):
    """V12, W10: with the worker processes of a real one; stored, and gone on from."""
    content = [{"type": "input_text", "text": QUESTION}, INPUT_FILE]
    asked = {"model": "default", "input": [{"role": "user", "content": content}], "max_output_tokens": 4}
    first = whole.responses.create(**asked)
    again = whole.responses.create(
        model="default", input="Go on.", previous_response_id=first.id, max_output_tokens=4
    )
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
