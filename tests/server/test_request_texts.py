"""Texts of requests by their ids: who reads them, how much of them, and where they are not."""

from __future__ import annotations

import json

import httpx
import pytest
from test_told_moves import SLOW, posted

from stoker.client.requests.texts import MAX_TEXT_CHARS, TextEnd
from stoker.runtime import Runtime

REQUESTS = "/v1/runtime/requests"
ONE, TWO, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("key-one", "key-two", "key-admin"))


@pytest.fixture(scope="module")
def server(_module_servers, tmp_path_factory):
    """A server of keys that shows texts."""
    folder = tmp_path_factory.mktemp("keys")
    keys, admins = folder / "keys", folder / "admins"
    keys.write_text("key-one\nkey-two\n", encoding="utf-8")
    admins.write_text("key-admin\n", encoding="utf-8")

    def made():
        return Runtime(SLOW, models=("fake:id=enc,encoder=1",), isolation="thread", request_texts=True)

    started = _module_servers(made, api_key_file=keys, admin_key_file=admins)
    started.ready.result(60)
    return started


@pytest.fixture
def http(server):
    """A client of it."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def read(http, request_id, headers, status=200):
    """The answer of the route."""
    answer = http.get(f"{REQUESTS}/{request_id}/text", headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def refused(http, request_id, headers, status):
    """The code of its refusal."""
    return read(http, request_id, headers, status)["error"]["code"]


def ended(http, body, path="/v1/completions"):
    """The id and the document of a request that has ended."""
    document = http.post(path, json=body, headers=ONE).raise_for_status().json()
    recent = http.get("/v1/runtime", headers=ADMIN).json()["recent"]
    return recent[-1]["request_id"], document


def test_a_request_that_has_ended_is_read_by_its_key_and_by_operators(http):
    """U7: what it read and what each choice wrote, whole."""
    name, answer = ended(http, {"prompt": "It is said:", "max_tokens": 5, "n": 2, "model": "fake"})
    for headers in (ONE, ADMIN):
        found = read(http, name, headers)
        assert (found["id"], found["is_ended"]) == (name, True)
        assert found["prompt"] == {"text": "It is said:", "num_chars": 11, "num_left_out": 0}
        assert [one["text"] for one in found["choices"]] == [one["text"] for one in answer["choices"]]
        assert all(one["num_left_out"] == 0 < one["num_chars"] for one in found["choices"])


def test_a_live_request_is_read_as_far_as_it_is(http):
    """U7: and nobody keeps a copy on the way."""
    asking = posted(http, "live", 3000, **ONE)
    found = {"choices": [{"num_chars": 0}]}
    while not found["choices"][0]["num_chars"]:
        answer = http.get(f"{REQUESTS}/live/text", headers=ADMIN)
        found = answer.json() if answer.is_success else found
    assert not found["is_ended"]
    assert answer.headers["cache-control"] == "no-store"
    http.post(f"{REQUESTS}/live/cancel", headers=ONE).raise_for_status()
    asking.join(60)
    assert read(http, "live", ONE)["is_ended"]


def test_another_keys_request_is_as_if_it_were_not_there(http):
    """U7, S4: the same words as of an id that nobody has."""
    name, _ = ended(http, {"prompt": "mine", "max_tokens": 1, "model": "fake"})
    other, none = (read(http, one, TWO, 404)["error"] for one in (name, "no-such"))
    assert other["code"] == none["code"] == "request_not_found"
    assert other["message"].replace(name, "no-such") == none["message"]
    assert refused(http, name, {}, 401) == "invalid_api_key"


def test_what_has_no_text_says_so(http):
    """U7: a call of several requests; to another key not even that."""
    name, _ = ended(http, {"input": ["a", "b"], "model": "enc"}, "/v1/embeddings")
    assert refused(http, name, ONE, 409) == "text_not_kept"
    assert refused(http, name, TWO, 404) == "request_not_found"


def test_token_ids_are_no_text_and_of_a_long_prompt_the_end_is_shown(http):
    """U7: with the number of characters before it."""
    name, _ = ended(http, {"prompt": [5, 6, 7], "max_tokens": 1, "model": "fake"})
    assert read(http, name, ONE)["prompt"] is None
    prompt = "x" * 40_000 + "the end"
    http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "model": "fake"}, headers=ONE)
    name = http.get("/v1/runtime", headers=ADMIN).json()["recent"][-1]["request_id"]
    found = read(http, name, ONE)["prompt"]
    assert found["text"] == prompt[-MAX_TEXT_CHARS:]
    assert (found["num_chars"], found["num_left_out"]) == (40_007, 40_007 - MAX_TEXT_CHARS)


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ([], ("", 0, 0)),
        (["abc"], ("abc", 3, 0)),
        (["ab", "cd", "e"], ("cde", 5, 2)),
        (["abcdef"], ("def", 6, 3)),
        (["a", "", "bcd"], ("bcd", 4, 1)),
    ],
)
def test_the_end_of_a_text_is_counted(pieces, wanted):
    """U7: in pieces as they came."""
    found = TextEnd.of(pieces, 3)
    assert (found.text, found.num_chars, found.num_left_out) == wanted


def test_texts_are_told_to_nobody_unless_the_setting_says_so(start_server):
    """U7: neither shown nor kept; the snapshot says so, for pages to know."""
    server = start_server(lambda: Runtime("fake:", isolation="thread"))
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).raise_for_status()
        name = http.get("/v1/runtime").json()["recent"][-1]["request_id"]
        error = read(http, name, {}, 403)["error"]
        assert (error["code"], "--request-texts" in error["message"]) == ("texts_off", True)
        assert server.runtime._client.running().requests.history.texts is None


def test_the_last_that_ended_are_kept_and_no_more(http):
    """U7: as many as `recent` shows."""
    first, _ = ended(http, {"prompt": "first", "max_tokens": 1, "model": "fake"})
    assert read(http, first, ONE)["prompt"]["text"] == "first"
    for _ in range(64):
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "model": "fake"}, headers=ONE)
    assert refused(http, first, ONE, 404) == "request_not_found"


@pytest.mark.parametrize("headers", [ONE, ADMIN])
def test_no_other_route_tells_a_text(http, headers):
    """U7, O3: neither events, status nor metrics, and a snapshot says that texts may be asked for."""
    _, answer = ended(http, {"prompt": "a secret that nobody tells", "max_tokens": 8, "model": "fake"})
    told = http.get("/v1/runtime", headers=headers).text + http.get("/metrics", headers=headers).text
    with http.stream("GET", "/v1/runtime/events", headers=headers) as stream:
        snapshot = next(line for line in stream.iter_lines() if line.startswith("data: "))
    assert json.loads(snapshot.removeprefix("data: "))["may"]["texts"]
    for text in ("a secret", answer["choices"][0]["text"]):
        assert text not in told + snapshot
