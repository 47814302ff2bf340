"""The Messages API through its official client: errors, counts, formats, the vendor's tools, a slow start."""

from __future__ import annotations

import json

import anthropic
import msgspec
import pydantic
import pytest
import stand_in
from stand_in import FINISHED, HOLD, INFO, delta

from stoker.ipc.events import Admitted, PrefillProgress, Queued
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import CacheSource

HELLO = [{"role": "user", "content": "Hi"}]
ASK = {"model": "default", "max_tokens": 99, "messages": HELLO}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
HOSTED = {"type": "web_search_20250305", "name": "web_search"}
STOP = delta("", finish_reason=FinishReason.STOP)


@pytest.fixture
def claude(scripted):
    """The official client of the Messages API."""
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as found:
        yield found


def says(scripted, *steps):
    """The next answer."""
    scripted.call(lambda: scripted.runtime.scripts.append(list(steps)))


def frames(text):
    """(name of the event, its data) of a stream."""
    found = []
    for frame in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.splitlines() if line[:1] != ":")
        if lines:
            found.append((lines.get("event"), json.loads(lines["data"])))
    return found


@pytest.mark.parametrize(
    ("asked", "body", "error", "kind"),
    [
        ("post /v1/messages", b"{", anthropic.BadRequestError, "invalid_request_error"),
        ("post /v1/messages", b"{}", anthropic.BadRequestError, "invalid_request_error"),
        ("post /v1/messages/nothing", b"{}", anthropic.NotFoundError, "not_found_error"),
        ("get /v1/messages", b"", anthropic.APIStatusError, "invalid_request_error"),
        (
            "post /v1/messages",
            json.dumps({**ASK, "model": "nobody"}).encode(),
            anthropic.NotFoundError,
            "not_found_error",
        ),
        ("post /v1/messages/count_tokens", b"[]", anthropic.BadRequestError, "invalid_request_error"),
    ],
)
def test_every_error_has_the_shape_of_the_api(claude, asked, body, error, kind):
    """S3: whoever refuses it: the route, the router or the body's reader."""
    headers = {"X-Request-Id": "mine-1", "Content-Type": "application/json"}
    call = getattr(claude, asked.split()[0])
    more = {"content": body} if body else {}
    with pytest.raises(error) as caught:
        call(asked.split()[1], cast_to=object, options={"headers": headers}, **more)
    found = caught.value.body
    assert (found["type"], found["error"]["type"], found["request_id"]) == ("error", kind, "mine-1")
    assert caught.value.response.headers["x-request-id"] == caught.value.request_id == "mine-1"


def test_errors_of_the_gate_have_the_shape_of_the_api(start_server, tmp_path):
    """S3, S4: a key that is wrong, a body that is too large."""
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    server = start_server(api_key_file=keys, max_body_bytes=2000)
    server.ready.result(60)
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**ASK)
        assert caught.value.body["error"]["type"] == "authentication_error"
    with anthropic.Anthropic(base_url=server.url, api_key="right", max_retries=0) as client:
        assert client.messages.create(**ASK).type == "message"
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**{**ASK, "system": "x" * 3000})
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (413, "request_too_large")
    assert caught.value.body["type"] == "error"


def test_ids_are_the_vendors(scripted, claude):
    """S1: `msg_`."""
    assert claude.messages.create(**ASK).id.startswith("msg_")


def test_a_stream_begins_with_the_cost_of_its_prompt(scripted, claude):
    """S1: pings while it waits, then the true number of tokens, then the text."""
    steps = [Queued("x", 1), HOLD, Admitted("x", 3, CacheSource.RAM, 10), delta("So."), STOP, FINISHED]
    says(scripted, *steps)
    with claude.messages.with_streaming_response.create(**ASK, stream=True) as answer:
        lines = answer.iter_lines()
        while next(lines) != "event: ping":
            pass
        scripted.call(scripted.runtime.release)
        rest = [line.removeprefix("event: ") for line in lines if line.startswith(("event: ", "data: "))]
    start = json.loads(rest[rest.index("message_start") + 1].removeprefix("data: "))
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (7, 3)
    assert "content_block_delta" in rest


def test_progress_of_the_prompt_is_sent_where_it_is_asked_for(scripted, scripted_http, claude):
    """S2: within a ping, which every client passes over."""
    progress = PrefillProgress(request_id="x", total=9, cached=0, processed=5, time_ms=1.0)
    steps = [Admitted("x", 0, None, 9), progress, delta("So."), STOP, FINISHED]
    says(scripted, *steps)
    with claude.messages.stream(**ASK, extra_headers={"X-Stoker-Progress": "Yes"}) as stream:
        assert stream.get_final_text() == "So."
    says(scripted, *steps)
    answer = scripted_http.post("/v1/messages", json={**ASK, "stream": True, "return_progress": True})
    told = [data["prompt_progress"] for name, data in frames(answer.text) if name == "ping" and len(data) > 1]
    assert told == [{"total": 9, "cache": 0, "processed": 5, "time_ms": 1.0}]
    assert scripted.runtime.requests[-1].return_progress


def test_progress_is_an_event_of_its_own_name_where_that_is_asked_for(scripted, scripted_http, claude):
    """S2: `X-Stoker-Progress: event`, as in chat completions; the official client passes over it."""
    progress = PrefillProgress(request_id="x", total=9, cached=0, processed=5, time_ms=1.0)
    steps = [Admitted("x", 0, None, 9), progress, delta("So."), STOP, FINISHED]
    headers = {"X-Stoker-Progress": "Event"}
    says(scripted, *steps)
    with claude.messages.stream(**ASK, extra_headers=headers) as stream:
        assert stream.get_final_text() == "So."
    says(scripted, *steps)
    answer = scripted_http.post("/v1/messages", json={**ASK, "stream": True}, headers=headers)
    told = [data for name, data in frames(answer.text) if name == "prefill_progress"]
    assert [data["prompt_progress"]["processed"] for data in told] == [5]


def test_the_official_client_gets_the_times_of_a_message(scripted, claude):
    """O2: in a whole message, and in a stream beside the usage; as in chat completions."""
    says(scripted, delta("So."), STOP, FINISHED)
    whole = claude.messages.create(**ASK).timings
    says(scripted, delta("So."), STOP, FINISHED)
    events = list(claude.messages.create(**ASK, stream=True))
    (last,) = [event for event in events if event.type == "message_delta"]
    assert (whole["queue_ms"], whole["prompt_ms"], whole["predicted_ms"]) == (500.0, 250.0, 125.0)
    assert (whole["cache_n"], whole["prompt_n"], whole["predicted_n"]) == (1, 2, 2)
    assert last.timings == whole
    assert not any("timings" in event.model_dump() for event in events if event is not last)


def test_tools_of_the_vendor_are_left_out_and_named(scripted, claude, monkeypatch):
    """S1: the answer's header says which; a forced one is a 400."""
    monkeypatch.setattr(
        stand_in, "INFO", msgspec.structs.replace(INFO, chat_template="{{ tools }}<tool_call>")
    )
    says(scripted, delta("So."), STOP, FINISHED)
    raw = claude.messages.with_raw_response.create(**ASK, tools=[TOOL, HOSTED])
    assert raw.headers["X-Stoker-Ignored"] == "tools.1 (web_search_20250305)"
    assert "web_search" not in scripted.runtime.requests[-1].prompt
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        claude.messages.create(
            **ASK, tools=[TOOL, HOSTED], tool_choice={"type": "tool", "name": "web_search"}
        )


class Person(pydantic.BaseModel):
    """What is to be read."""

    name: str
    age: int


def test_a_parsed_message_is_of_its_type(scripted, claude):
    """D2: `messages.parse`; the answer is held to the schema."""
    says(scripted, delta('{"name": "Ada", "age": 36}'), STOP, FINISHED)
    message = claude.messages.parse(**ASK, output_format=Person)
    assert message.parsed_output == Person(name="Ada", age=36)
    constraint = scripted.runtime.requests[-1].constraint
    assert set(json.loads(constraint.source)["properties"]) == {"name", "age"}


def test_a_prompt_is_counted_as_it_would_be_computed(scripted, claude):
    """S1: with its system prompt and tools; nothing is generated."""
    counted = claude.messages.count_tokens(
        model="default", messages=HELLO, system="Be brief.", tools=[TOOL, HOSTED]
    )
    claude.messages.create(**ASK, system="Be brief.", tools=[TOOL, HOSTED])
    counting, generating = scripted.runtime.requests
    assert counting.prompt == generating.prompt
    assert counted.input_tokens == len(generating.prompt)


def test_an_error_names_the_block_that_was_sent(scripted_http):
    """S3: not the place in the chat completion that it becomes; in the message too."""
    blocks = [{"type": "text", "text": "a"}, {"type": "search_result", "source": {}}]
    body = {**ASK, "system": "s", "messages": [*HELLO, {"role": "user", "content": blocks}]}
    error = scripted_http.post("/v1/messages", json=body).json()["error"]
    assert error["param"] == "messages.1.content.1"
    assert error["message"].startswith("messages.1.content.1:")
    error = scripted_http.post("/v1/messages", json={**ASK, "stop_sequences": [""]}).json()["error"]
    assert error["param"] == "stop_sequences"
    error = scripted_http.post("/v1/messages", json={**ASK, "max_tokens": -1}).json()["error"]
    assert (error["param"], "max_tokens" in error["message"]) == ("max_tokens", True)
