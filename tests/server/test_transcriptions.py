"""Recordings in requests: transcripts by the official client, parts of two APIs, forms that are refused."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs

from recordings import tone, wav_of
from stoker import Audio, Runtime, sync

HEARING = "fake:id=ears,hearing=3,eog_period=0"
DEAF = "fake:id=deaf,vision=3,eog_period=0"
SAID = wav_of(tone(1.0))
OTHER = wav_of(tone(1.0, hertz=500.0))
MAX_BODY_BYTES = 2**21
URL = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def served(_module_servers):
    """A server of a model that hears and of one that only sees."""

    def models() -> Runtime:
        return Runtime(HEARING, models=(DEAF,), isolation="thread", ctx_size=2048, slots=4, drain_s=0.0)

    server = _module_servers(models, max_body_bytes=MAX_BODY_BYTES)
    server.ready.result(60.0)
    return server


@pytest.fixture
def web(served):
    """A plain client of it."""
    with httpx.Client(base_url=served.url, timeout=60.0) as found:
        yield found


@pytest.fixture
def client(served):
    """The official client of it."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def part(data: bytes = SAID) -> dict[str, Any]:
    """A recording as chat completions take it."""
    told = {"data": base64.b64encode(data).decode(), "format": "wav"}
    return {"type": "input_audio", "input_audio": told}


def asked(model: str, *parts: Any) -> dict[str, Any]:
    """A body with one user turn."""
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": "What is said?"}]}
    return {"model": model, "messages": [turn], "max_tokens": 8, "temperature": 0}


def test_a_transcript_is_made_and_streamed_by_the_official_client(client):
    """SPEC V11: the streamed pieces are the whole text; another recording is another text."""
    whole = client.audio.transcriptions.create(model="ears", file=("said.wav", SAID))
    assert whole.text
    assert whole.usage.input_tokens > 10
    assert whole.usage.output_tokens == 64 + 16
    stream = client.audio.transcriptions.create(model="ears", file=("said.wav", SAID), stream=True)
    events = list(stream)
    assert [event.type for event in events[-2:]] == ["transcript.text.delta", "transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == whole.text
    assert events[-1].usage.to_dict() == whole.usage.to_dict()
    other = client.audio.transcriptions.create(model="ears", file=("said.wav", OTHER))
    assert other.text != whole.text


def test_transcripts_come_as_text_and_with_what_is_known_of_the_recording(client, web):
    """SPEC V11: `text` is plain text; `verbose_json` tells language and duration."""
    how = {"model": "ears", "file": ("said.wav", SAID), "language": "de"}
    whole = client.audio.transcriptions.create(**how)
    assert client.audio.transcriptions.create(**how, response_format="text") == whole.text + "\n"
    told = client.audio.transcriptions.create(**how, response_format="verbose_json")
    assert (told.text, told.language, told.duration) == (whole.text, "de", 1.0)
    answer = web.post(URL, files={"file": SAID}, data={"model": "ears", "response_format": "text"})
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


def test_language_and_prompt_are_told_to_the_model(client):
    """SPEC V11: with either the prompt is another."""
    how = {"model": "ears", "file": ("said.wav", SAID)}
    counts = [
        client.audio.transcriptions.create(**how, **more).usage.input_tokens
        for more in ({}, {"language": "de"}, {"prompt": "Stoker"})
    ]
    assert len(set(counts)) == 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "[INST]<__media__>[/INST][TRANSCRIBE]"),
        ({"language": "de"}, "[INST]<__media__>[/INST]lang:de[TRANSCRIBE]"),
        ({"language": "de-AT"}, None),
        ({"language": "de", "prompt": "Stoker"}, None),
    ],
)
def test_a_model_that_has_learned_a_form_of_its_own_to_transcribe_gets_it(
    served, web, monkeypatch, fields, expected
):
    """SPEC V11: by the kind of its projector; what that has no place for is asked in a conversation."""
    runtime, seen = served.runtime, []
    plain = runtime.resolve
    monkeypatch.setattr(runtime, "resolve", lambda name: structs.replace(plain(name), hearing="voxtral"))
    monkeypatch.setattr(runtime, "on_arrival", lambda _id, _owner, request, _num: seen.append(request.prompt))
    answer = web.post(URL, files={"file": SAID}, data={"model": "ears", **fields})
    assert answer.json()["text"]
    (prompt,) = seen
    assert (prompt == expected) is (expected is not None)
    assert ("Transcribe audio to text" in prompt) is (expected is None)


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"response_format": "srt"}, "unsupported", "response_format", "srt needs to know when each word"),
        ({"response_format": "vtt"}, "unsupported", "response_format", "vtt needs to know when each word"),
        ({"response_format": "verbose_json", "stream": "true"}, "unsupported", "stream", "not streamed"),
        ({"timestamp_granularities[]": "word"}, "unsupported", "timestamp_granularities", "which these"),
        ({"response_format": "html"}, "invalid_request", "response_format", "json"),
        ({"temperature": "warm"}, "invalid_request", "temperature", "number"),
        ({"stream": "perhaps"}, "invalid_request", "stream", "boolean"),
        ({"model": "deaf"}, "unsupported", "file", "deaf takes no recordings: its projector sees"),
        ({"prompt": "x" * 9000}, "invalid_request", "prompt", "8192"),
    ],
)
def test_what_cannot_be_made_of_a_recording_is_refused(web, fields, code, param, words):
    """SPEC V11, V9: a 400 that names the field."""
    answer = web.post(URL, files={"file": ("said.wav", SAID)}, data={"model": "ears", **fields})
    told = answer.json()["error"]
    assert (answer.status_code, told["code"], told["param"]) == (400, code, param)
    assert words in told["message"]


def test_a_recording_longer_than_the_context_is_told_of_as_the_file(web):
    """SPEC V11: 300 seconds are 3,000 tokens, and the context has 2,048."""
    quiet = wav_of(tone(300.0, rate_hz=4_000, hertz=50.0), rate_hz=4_000, num_bits=8)
    answer = web.post("/v1/audio/transcriptions", files={"file": quiet}, data={"model": "ears"})
    told = answer.json()["error"]
    assert (answer.status_code, told["code"], told["param"]) == (400, "context_length_exceeded", "file")


def form(*parts: bytes, end: bytes = b"--B--\r\n") -> bytes:
    """A form of these parts; heads and bodies as they are."""
    return b"".join(b"--B\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + end


FILE = b'name="file"; filename="a.wav"\r\n\r\n' + SAID
FORM = "multipart/form-data; boundary=B"


@pytest.mark.parametrize(
    ("body", "declared", "status", "words"),
    [
        (b"{}", "application/json", 400, "has to be a form"),
        (form(FILE), "multipart/form-data", 400, "has to be a form"),
        (form(FILE, end=b""), FORM, 400, "ends too early"),
        (b"nothing of the kind", FORM, 400, "the form is broken"),
        (form(b'name="model"\r\n\r\nears'), FORM, 400, "the form has 0 files"),
        (form(FILE, FILE), FORM, 400, "the form has 2 files"),
        (form(FILE, b'name="model"\r\n\r\nears', b'name="model"\r\n\r\nears'), FORM, 400, "given twice"),
        (form(FILE, b'name="prompt"\r\n\r\n\xff'), FORM, 400, "prompt is not UTF-8"),
        (form(b"\r\n\r\nx", FILE), FORM, 400, "a part has no name"),
        (form(FILE, b'name="prompt"\r\n\r\n' + b"x" * 70_000), FORM, 413, "over 65536 bytes"),
        (form(*[b'name="a"\r\n\r\nx'] * 65, FILE), FORM, 413, "over 64 parts"),
        (form(b'name="file"\r\n\r\nno sound'), FORM, 400, "file: this is no recording that is taken"),
    ],
)
def test_forms_that_are_wrong_are_refused(web, body, declared, status, words):
    """SPEC V11, S4: by what is wrong with them."""
    answer = web.post(URL, content=body, headers={"content-type": declared})
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


def test_a_form_is_as_large_as_any_body(web):
    """SPEC V11, S4: more than `max_body_bytes` is refused, declared or in pieces."""
    body = form(b'name="file"\r\n\r\n' + b"x" * MAX_BODY_BYTES)
    for content in (body, iter([body])):
        answer = web.post(URL, content=content, headers={"content-type": FORM})
        assert answer.status_code == 413


def test_fields_that_are_not_known_are_named(web):
    """SPEC V11: in a header of the answer, as those of other routes."""
    answer = web.post(URL, files={"file": SAID}, data={"model": "ears", "chunking_strategy": "auto"})
    assert answer.status_code == 200
    assert answer.headers["x-stoker-ignored"] == "chunking_strategy"


def test_recordings_are_heard_in_chat_completions_and_responses(web):
    """SPEC V9, S1: `input_audio`; the same answer to the same recording, from the cache the second time."""
    first = web.post("/v1/chat/completions", json=asked("ears", part())).json()
    again = web.post("/v1/chat/completions", json=asked("ears", part())).json()
    other = web.post("/v1/chat/completions", json=asked("ears", part(OTHER))).json()
    texts = [each["choices"][0]["message"]["content"] for each in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 10
    turn = {"role": "user", "content": [part(), {"type": "input_text", "text": "What is said?"}]}
    body = {"model": "ears", "input": [turn], "max_output_tokens": 8, "temperature": 0}
    answer = web.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == texts[0]


@pytest.mark.parametrize(
    ("given", "code", "param", "words"),
    [
        ({"data": "!", "format": "wav"}, "invalid_request", "messages.0.content.0.input_audio", "not base64"),
        ({"format": "wav"}, "invalid_request", "messages.0.content.0.input_audio", "has no data"),
        ({"data": "AAAA"}, "invalid_request", "messages.0.content.0.input_audio", "no recording"),
    ],
)
def test_parts_that_are_no_recordings_are_refused(web, given, code, param, words):
    """SPEC V10: a 400 at the part's place."""
    body = asked("ears", {"type": "input_audio", "input_audio": given})
    answer = web.post("/v1/chat/completions", json=body)
    told = answer.json()["error"]
    assert (answer.status_code, told["code"], told["param"]) == (400, code, param)
    assert words in told["message"]


def test_a_model_that_does_not_hear_says_so(web):
    """SPEC V9: in chat completions; and `/v1/models` and `/api/show` tell which does."""
    answer = web.post("/v1/chat/completions", json=asked("deaf", part()))
    told = answer.json()["error"]
    assert (answer.status_code, told["code"], told["param"]) == (400, "unsupported", "messages.0.content.0")
    shown = {each["id"]: each["meta"] for each in web.get("/v1/models").json()["data"]}
    assert (shown["ears"]["audio"], shown["ears"]["pictures"]) == (True, None)
    assert (shown["deaf"]["audio"], shown["deaf"]["pictures"]) == (False, "ready")
    able = {name: web.post("/api/show", json={"model": name}).json()["capabilities"] for name in shown}
    assert ("audio" in able["ears"], "vision" in able["ears"]) == (True, False)
    assert ("audio" in able["deaf"], "vision" in able["deaf"]) == (False, True)


def test_the_library_asks_a_server_about_a_recording(served, web):
    """SPEC V9, I11: an `Audio` travels as it is; the answer is that of the HTTP API."""
    expected = web.post("/v1/chat/completions", json=asked("ears", part())).json()
    with sync.Runtime.connect(served.url) as runtime:
        turn = {"role": "user", "content": [Audio(SAID), "What is said?"]}
        pieces = list(runtime.chat([turn], model="ears", max_tokens=8, temperature=0))
    assert "".join(piece.text for piece in pieces) == expected["choices"][0]["message"]["content"]
