"""What callers say of the cache, who shares it with whom, and what answers tell of it."""

from __future__ import annotations

import json

import httpx
import pytest
from stand_in import HOLD, delta

from stoker.errors import QueueFullError
from stoker.ipc.events import Admitted, Finished, Queued
from stoker.ipc.request import MAX_SALT_CHARS, FinishReason
from stoker.ipc.usage import CacheSource, Timings, Usage, total_usage
from stoker.server import sse
from stoker.server.inbound.security import KeyRing, salt_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
BODY = {"messages": [{"role": "user", "content": "Say hello"}], "prompt": "x", "max_tokens": 1}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
END = delta("a", finish_reason=FinishReason.STOP)


def finished(**usage):
    """The terminal event with this usage."""
    return Finished(request_id="x", usage=Usage(**usage), timings=Timings())


def frames(text):
    """The JSON of every data frame but [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def _no_hurry(monkeypatch):
    """Nothing but a frame of data begins a stream."""
    monkeypatch.setattr(sse, "GRACE_S", 60.0)


# ---------------------------------------------------------------- fields


@BOTH
def test_a_request_says_what_it_wants_of_the_cache(scripted, scripted_http, path):
    """C1, C10, C12: the switch by our name and llama-server's, the salt, the shift; null is the default."""
    for fields in (
        {"cache": False, "cache_salt": "mine", "context_shift": True},
        {"cache_prompt": False, "context_shift": False},
        {"cache": None, "cache_salt": None, "context_shift": None},
        {"cache_prompt": True, "cache_salt": "s" * MAX_SALT_CHARS},
    ):
        answer = scripted_http.post(path, json=BODY | fields)
        assert answer.status_code == 200, answer.text
    assert [(asked.cache, asked.cache_salt, asked.context_shift) for asked in scripted.runtime.requests] == [
        (False, "mine", True),
        (False, "", False),
        (True, "", False),
        (True, "s" * MAX_SALT_CHARS, False),
    ]


@BOTH
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"cache": "no"}, "cache"),
        ({"cache": 1}, "cache"),
        ({"cache_prompt": 0}, "cache_prompt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": ["a"]}, "cache_salt"),
        ({"cache_salt": "s" * (MAX_SALT_CHARS + 1)}, "cache_salt"),
        ({"context_shift": "yes"}, "context_shift"),
        ({"context_shift": {}}, "context_shift"),
    ],
)
def test_a_wrong_word_about_the_cache_is_named(scripted, scripted_http, path, change, param):
    """S3, C10: 400 with the field as the caller spelled it; nothing is run."""
    answer = scripted_http.post(path, json=BODY | change)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["param"] == param
    assert scripted.runtime.requests == []


# ---------------------------------------------------------------- who shares with whom


@pytest.fixture
def keyed(start_server, tmp_path):
    """A server that knows two keys."""
    path = tmp_path / "keys"
    path.write_text("first-key\nsecond-key\n", encoding="utf-8")
    server = start_server(api_key_file=path)
    server.ready.result(60)
    return server


def test_callers_of_different_keys_never_share(keyed):
    """C1: a salt is bound to the key it came with, however that was sent; the key is not in it."""

    def salt(path, headers, **fields):
        assert http.post(path, json=BODY | fields, headers=headers).status_code == 200
        return keyed.runtime.requests[-1].cache_salt

    first, second = {"Authorization": "Bearer first-key"}, {"Authorization": "Bearer second-key"}
    with httpx.Client(base_url=keyed.url, timeout=60) as http:
        plain = salt(COMPLETIONS, first)
        salted = salt(COMPLETIONS, first, cache_salt="a")
        assert plain == salt(CHAT, first) == salt(CHAT, {"X-Api-Key": "first-key"}, cache_salt="")
        assert salted == salt(CHAT, {"X-Api-Key": "first-key"}, cache_salt="a")
        others = [
            salt(COMPLETIONS, second),
            salt(COMPLETIONS, second, cache_salt="a"),
            salt(COMPLETIONS, second, cache_salt=plain),  # the salt of another is no way in
            salt(COMPLETIONS, first, cache_salt="b"),
        ]
        assert len({plain, salted, *others}) == 6
        too_long = http.post(CHAT, json=BODY | {"cache_salt": "s" * (MAX_SALT_CHARS + 1)}, headers=first)
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "cache_salt")
    for found in (plain, salted, *others):
        assert 0 < len(found) <= MAX_SALT_CHARS
        assert "key" not in found


def test_without_keys_the_salt_alone_counts():
    """C1: and with one it fits, however long the key and the salt are."""
    assert KeyRing().check(b"Bearer anything", None) == ""
    assert salt_of("", "mine") == "mine"
    key = "k" * 5000
    digest = KeyRing([key]).check(None, key.encode())
    assert len(salt_of(digest, "s" * MAX_SALT_CHARS)) <= MAX_SALT_CHARS
    assert digest not in salt_of(digest, "")


def test_every_prompt_of_a_request_has_its_salt(keyed):
    """C1: prompts of one list share, as they are one caller's."""
    with httpx.Client(base_url=keyed.url, timeout=60) as http:
        body = {"prompt": ["a", "b"], "max_tokens": 1}
        assert http.post(COMPLETIONS, json=body, headers={"X-Api-Key": "first-key"}).status_code == 200
    one, two = keyed.runtime.requests
    assert one.cache_salt == two.cache_salt != ""


# ---------------------------------------------------------------- what answers tell


@BOTH
def test_a_whole_answer_tells_what_the_cache_gave(scripted, scripted_http, path):
    """C13, I8: tokens and source in the usage and in the header."""
    for source in CacheSource:
        usage = finished(prompt_tokens=700, completion_tokens=1, cached_tokens=640, cache_source=source)
        scripted.runtime.scripts.append([Admitted("x", 640, source), END, usage])
        answer = scripted_http.post(path, json=BODY)
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": 640, "cache_source": source.value}
        assert answer.headers["x-stoker-cache"] == f"{source.value}; tokens=640"


@BOTH
def test_a_whole_answer_tells_that_the_cache_had_nothing(scripted, scripted_http, path):
    """C13, I8: no source is named, and what a full context cost is not there where it cost nothing."""
    scripted.runtime.scripts.append([Admitted("x"), END, finished(prompt_tokens=7)])
    answer = scripted_http.post(path, json=BODY)
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert answer.headers["x-stoker-cache"] == "miss; tokens=0"
    assert "context_shift" not in answer.json()


@BOTH
def test_a_stream_tells_before_its_first_frame(scripted, scripted_http, path):
    """C13, I8: the header is there while the prompt is still read; the usage chunk says it again."""
    usage = finished(prompt_tokens=700, cached_tokens=640, cache_source=CacheSource.DISK)
    scripted.runtime.scripts.append([Admitted("x", 640, CacheSource.DISK), HOLD, END, usage])
    with scripted_http.stream("POST", path, json=BODY | WITH_USAGE) as answer:
        assert answer.headers["x-stoker-cache"] == "disk; tokens=640"
        scripted.call(scripted.runtime.release)
        last = frames(answer.read().decode())[-1]
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 640, "cache_source": "disk"}
    assert "context_shift" not in last


@pytest.mark.usefixtures("_no_hurry")
@pytest.mark.parametrize("position", [0, 3])
def test_a_request_that_is_admitted_at_once_has_all_its_headers(scripted, scripted_http, position):
    """C13, Q14: its place in the line and what the cache gave; a later admission changes nothing."""
    script = [Queued("x", position), Admitted("x"), Admitted("x", 64, CacheSource.LIVE), END, finished()]
    scripted.runtime.scripts.append(script)
    answer = scripted_http.post(COMPLETIONS, json=BODY | {"stream": True})
    assert answer.headers["x-stoker-queue-position"] == str(position)
    assert answer.headers["x-stoker-cache"] == "miss; tokens=0"
    comments = [line for line in answer.text.split("\n\n") if line.startswith(":")]
    assert comments == ([": queued position=3"] if position else [])


def test_a_stream_that_began_while_it_waited_goes_on_without_the_header(scripted, scripted_http):
    """C13, Q14: the client learns its place first; the usage still tells."""
    usage = finished(prompt_tokens=99, cached_tokens=64, cache_source=CacheSource.SHARED)
    script = [Queued("x", 2), HOLD, Admitted("x", 64, CacheSource.SHARED), END, usage]
    scripted.runtime.scripts.append(script)
    with scripted_http.stream("POST", CHAT, json=BODY | WITH_USAGE) as answer:
        assert answer.headers["x-stoker-queue-position"] == "2"
        assert "x-stoker-cache" not in answer.headers
        scripted.call(scripted.runtime.release)
        text = answer.read().decode()
    assert frames(text)[-1]["usage"]["prompt_tokens_details"]["cache_source"] == "shared"
    assert ": admitted" not in text


@pytest.mark.usefixtures("_no_hurry")
def test_an_error_right_behind_the_place_in_the_line_has_its_status(scripted, scripted_http):
    """S3: nothing was sent yet, so it is an ordinary error."""
    scripted.runtime.scripts.append([Queued("x", 3), Admitted("x"), QueueFullError("full")])
    answer = scripted_http.post(CHAT, json=BODY | {"stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")


def test_prompts_of_a_list_are_summed_and_the_largest_names_the_source(scripted, scripted_http):
    """C13: one usage an answer."""
    for tokens, source in ((32, CacheSource.RAM), (640, CacheSource.SHARED), (0, None)):
        usage = finished(prompt_tokens=700, cached_tokens=tokens, cache_source=source)
        scripted.runtime.scripts.append([Admitted("x", tokens, source), END, usage])
    answer = scripted_http.post(COMPLETIONS, json=BODY | {"prompt": ["a", "b", "c"]})
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 672, "cache_source": "shared"}
    assert answer.headers["x-stoker-cache"] == "shared; tokens=672"


def test_a_total_keeps_every_count():
    """C12, C13: over no prompt, too."""
    assert total_usage([]) == Usage()
    one = Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=4, dropped_tokens=5)
    two = Usage(prompt_tokens=1, completion_tokens=1, dropped_tokens=1)
    assert total_usage([one, two]) == Usage(
        prompt_tokens=10, completion_tokens=3, cached_tokens=4, dropped_tokens=6
    )


@BOTH
def test_an_answer_says_what_a_full_context_cost(scripted, scripted_http, path):
    """C12: whole; in the usage chunk; and for who did not ask for usage, in a chunk that adds no text."""
    usage = finished(prompt_tokens=50, completion_tokens=1, dropped_tokens=40)
    scripted.runtime.scripts.extend([[END, usage]] * 3)
    whole = scripted_http.post(path, json=BODY | {"context_shift": True}).json()
    counted = frames(scripted_http.post(path, json=BODY | WITH_USAGE).text)[-1]
    bare = frames(scripted_http.post(path, json=BODY | {"stream": True}).text)
    assert whole["context_shift"] == counted["context_shift"] == {"dropped_tokens": 40}
    assert (counted["choices"], counted["usage"]["prompt_tokens"]) == ([], 50)
    assert bare[-1]["context_shift"] == {"dropped_tokens": 40}
    assert "usage" not in bare[-1]
    nothing = {"index": 0, "logprobs": None, "finish_reason": None}
    assert bare[-1]["choices"] == [nothing | ({"delta": {}} if path == CHAT else {"text": ""})]
    assert bare[-2]["choices"][0]["finish_reason"] == "stop"


def test_the_official_client_reads_the_cached_tokens(scripted, scripted_client):
    """C13: where OpenAI puts them; what it does not know does not disturb it."""
    usage = finished(prompt_tokens=9, cached_tokens=4, cache_source=CacheSource.RAM, dropped_tokens=2)
    scripted.runtime.scripts.extend([[Admitted("x", 4, CacheSource.RAM), END, usage]] * 2)
    asked = {"model": "default", "messages": BODY["messages"], "extra_body": {"cache": True}}
    whole = scripted_client.chat.completions.create(**asked)
    assert whole.usage.prompt_tokens_details.cached_tokens == 4
    chunks = list(
        scripted_client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 4
