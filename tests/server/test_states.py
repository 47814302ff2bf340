"""/v1/states, `state` in requests and embeddings by state, in front of a runtime with the fake backend."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from stoker.models.states.file import parse_state
from stoker.runtime import Runtime

FIRST, REST = list(range(60, 80)), list(range(80, 100))
LAYOUT = (("layers.0.shift", (4,)), ("layers.0.state", (2, 2)))


@pytest.fixture
def recurrent(start_server: Callable[..., Any], tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a server with a recurrent model whose states lie in the test's folder."""
    with httpx.Client(base_url=_serve(start_server, tmp_path).url, timeout=60) as client:
        yield client


def _serve(start_server: Callable[..., Any], folder: Path, **settings: Any) -> Any:
    def runtime() -> Runtime:
        model = "fake:recurrent=1,eog_period=0"
        return Runtime(model, isolation="thread", slots=2, states_dir=folder, cache_dir=folder / "cache")

    server = start_server(runtime, **settings)
    server.ready.result(60)
    return server


def text(client: httpx.Client, prompt: list[int], **fields: Any) -> str:
    """A greedy continuation."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and param of a refusal."""
    found = answer.json()["error"]
    return answer.status_code, found["code"], found["param"]


def test_a_saved_state_is_begun_from_by_its_id_and_inline(recurrent: httpx.Client) -> None:
    """SPEC K5, I6: after the saved prompt and the rest the answer is that of both; the state is listed."""
    whole = text(recurrent, [*FIRST, *REST])
    saved = recurrent.post("/v1/states", json={"model": "default", "prompt": FIRST, "name": "first"}).json()
    assert (saved["id"], saved["num_tokens"], saved["model"]) == ("first", len(FIRST), "fake")
    assert text(recurrent, REST, state="first") == whole != text(recurrent, REST)
    data = recurrent.get("/v1/states/first/content").content
    assert len(data) == saved["size_bytes"]
    assert [tensor.shape for tensor in parse_state(data, LAYOUT)] == [(4,), (2, 2)]
    inline = {"data": base64.b64encode(data).decode()}
    assert text(recurrent, REST, state=inline) == whole
    assert recurrent.get("/v1/states").json() == {"object": "list", "data": [saved]}
    assert recurrent.get("/v1/states/first").json() == saved


def test_a_state_is_saved_again_under_its_name_with_replace(recurrent: httpx.Client) -> None:
    """SPEC K5: made and uploaded alike; without `replace` the name is taken."""
    recurrent.post("/v1/states", json={"prompt": FIRST, "name": "mine"})
    data = base64.b64encode(recurrent.get("/v1/states/mine/content").content).decode()
    again = {"prompt": [*FIRST, *REST], "name": "mine"}
    assert error(recurrent.post("/v1/states", json=again))[::2] == (400, "name")
    saved = recurrent.post("/v1/states", json={**again, "replace": True}).json()
    assert saved["num_tokens"] == len([*FIRST, *REST])
    assert (
        recurrent.post("/v1/states", json={"data": data, "name": "mine", "replace": True}).status_code == 200
    )
    assert recurrent.get("/v1/states").json()["data"][0]["num_tokens"] == 0


def test_a_state_made_on_a_state_has_seen_both_prompts(recurrent: httpx.Client) -> None:
    """SPEC K5: saving begins from a state as any request does."""
    first = recurrent.post("/v1/states", json={"prompt": FIRST}).json()["id"]
    second = recurrent.post("/v1/states", json={"prompt": REST, "state": first}).json()["id"]
    assert first != second
    assert text(recurrent, [70], state=second) == text(recurrent, [*FIRST, *REST, 70])


def test_an_uploaded_file_is_a_state_like_any_other(recurrent: httpx.Client, tmp_path: Path) -> None:
    """SPEC K5, I6: as base64, as the body itself, or as a file laid into the folder of states."""
    recurrent.post("/v1/states", json={"prompt": FIRST, "name": "own"})
    data = recurrent.get("/v1/states/own/content").content
    encoded = recurrent.post("/v1/states", json={"data": base64.b64encode(data).decode(), "name": "a"})
    binary = recurrent.post(
        "/v1/states?name=b", content=data, headers={"Content-Type": "application/octet-stream"}
    )
    (tmp_path / "laid.safetensors").write_bytes(data)
    laid = recurrent.post("/v1/states", json={"file": "laid.safetensors", "name": "c"})
    for answer in (encoded, binary, laid):
        assert answer.status_code == 200, answer.text
        assert text(recurrent, REST, state=answer.json()["id"]) == text(recurrent, [*FIRST, *REST])
    for foreign in ("/etc/hostname", "../x", "everybody/own.safetensors", "absent"):
        assert error(recurrent.post("/v1/states", json={"file": foreign}))[::2] == (400, "file")


def test_a_conversation_can_be_saved_and_gone_on_with(recurrent: httpx.Client) -> None:
    """SPEC K5: `messages` become the prompt that /apply-template shows, and `state` works in chat."""
    turns = [{"role": "user", "content": "Remember the number 7."}]
    shown = recurrent.post("/apply-template", json={"messages": turns, "add_generation_prompt": False}).json()
    asked = {"content": shown["prompt"], "add_special": True}  # the BOS that the template does not write
    tokens = recurrent.post("/tokenize", json=asked).json()["tokens"]
    saved = recurrent.post("/v1/states", json={"messages": turns, "name": "chat"}).json()
    assert saved["num_tokens"] == len(tokens)
    asked = {"messages": [{"role": "user", "content": "Which?"}], "max_tokens": 8, "temperature": 0}
    plain = recurrent.post("/v1/chat/completions", json=asked).json()
    after = recurrent.post("/v1/chat/completions", json={**asked, "state": "chat"}).json()
    assert plain["choices"][0]["message"] != after["choices"][0]["message"]


def test_a_bad_state_is_refused_and_never_the_default(recurrent: httpx.Client) -> None:
    """SPEC K5: unknown, no base64, no safetensors, of another shape: 400, naming the field."""
    names = struct.pack("<Q", 64) + b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(64)
    for state in ("absent", "", "../own", {"data": "%%"}, {"data": "AAAA"}, {"data": _b64(names + bytes(4))}):
        answer = recurrent.post("/v1/completions", json={"prompt": "x", "state": state})
        assert error(answer) == (400, "invalid_request", "state"), state
    assert recurrent.post("/v1/completions", json={"prompt": "x", "state": 7}).status_code == 400


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_what_cannot_be_saved_is_refused(recurrent: httpx.Client) -> None:
    """SPEC K5, S3: no source or two, a bad name, one that is taken."""
    for body in ({}, {"prompt": "a", "data": "AAAA"}, {"prompt": "a", "name": "no/good"}, {"data": "AAAA"}):
        assert recurrent.post("/v1/states", json=body).status_code == 400, body
    assert recurrent.post("/v1/states", json={"prompt": "a", "name": "one"}).status_code == 200
    assert error(recurrent.post("/v1/states", json={"prompt": "b", "name": "one"}))[::2] == (400, "name")
    assert len(recurrent.get("/v1/states").json()["data"]) == 1


def test_a_deleted_state_is_gone(recurrent: httpx.Client) -> None:
    """SPEC I6: DELETE forgets it; every further question says 404."""
    recurrent.post("/v1/states", json={"prompt": "a", "name": "one"})
    assert recurrent.delete("/v1/states/one").json()["deleted"] is True
    for answer in (
        recurrent.get("/v1/states/one"),
        recurrent.get("/v1/states/one/content"),
        recurrent.delete("/v1/states/one"),
    ):
        assert error(answer) == (404, "state_not_found", "state")
    assert recurrent.get("/v1/states").json()["data"] == []


def test_states_belong_to_the_key_that_made_them(start_server: Callable[..., Any], tmp_path: Path) -> None:
    """SPEC S4, C1: another key sees, uses, overwrites and deletes nothing of it."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    server = _serve(start_server, tmp_path / "states", api_key_file=keys)
    clients = [
        httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key}"})
        for key in ("one", "two")
    ]
    with clients[0] as mine, clients[1] as theirs:
        assert mine.post("/v1/states", json={"prompt": FIRST, "name": "own"}).status_code == 200
        assert theirs.get("/v1/states").json()["data"] == []
        for answer in (theirs.get("/v1/states/own"), theirs.delete("/v1/states/own")):
            assert answer.status_code == 404
        refused = theirs.post("/v1/completions", json={"prompt": REST, "state": "own"})
        assert error(refused)[::2] == (400, "state")
        assert theirs.post("/v1/states", json={"prompt": REST, "name": "own"}).status_code == 200
        assert text(mine, REST, state="own") == text(mine, [*FIRST, *REST])
    assert httpx.get(f"{server.url}/v1/states").status_code == 401


def test_a_prompt_is_embedded_by_the_state_it_leaves(recurrent: httpx.Client) -> None:
    """SPEC D8: layers first in the shape; numbers or base64; the same prompt gives the same."""
    body = {"input": FIRST}
    found = recurrent.post("/v1/states/embeddings", json=body).json()
    assert (found["object"], found["model"], found["shape"]) == ("state_embedding", "fake", [1, 2, 2])
    assert found["usage"] == {"prompt_tokens": len(FIRST), "total_tokens": len(FIRST)}
    packed = recurrent.post("/v1/states/embeddings", json={**body, "encoding_format": "base64"}).json()
    assert list(struct.unpack("<4f", base64.b64decode(packed["data"]))) == found["data"]
    other = recurrent.post("/v1/states/embeddings", json={"prompt": REST}).json()
    assert other["data"] != found["data"]


def test_the_embeddings_route_gives_state_embeddings_of_several(recurrent: httpx.Client) -> None:
    """SPEC I6: `"kind": "state"`, in the order of the inputs; another kind is refused."""
    body = {"kind": "state", "input": [FIRST, REST], "model": "default"}
    found = recurrent.post("/v1/embeddings", json=body).json()
    singles = [
        recurrent.post("/v1/states/embeddings", json={"input": part}).json()["data"] for part in (FIRST, REST)
    ]
    assert [entry["embedding"] for entry in found["data"]] == singles
    assert [(entry["index"], entry["shape"]) for entry in found["data"]] == [(0, [1, 2, 2]), (1, [1, 2, 2])]
    assert found["usage"]["total_tokens"] == len(FIRST) + len(REST)
    assert error(recurrent.post("/v1/embeddings", json={"input": "a"})) == (400, "unsupported", "model")


def test_a_model_without_a_state_embeds_its_last_hidden_state(http: httpx.Client) -> None:
    """SPEC D8: a decoder's width is the shape."""
    found = http.post("/v1/states/embeddings", json={"input": "hello"}).json()
    assert found["shape"] == [len(found["data"])]


def test_a_model_without_a_state_says_so(http: httpx.Client) -> None:
    """SPEC K5: the refusal names the model and what it lacks."""
    for path, body in (
        ("/v1/completions", {"prompt": "x", "state": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "state": "a"}),
        ("/v1/states", {"prompt": "x"}),
        ("/v1/states", {"data": "AAAA"}),
    ):
        answer = http.post(path, json=body)
        assert error(answer) == (400, "unsupported", "state")
        assert "decoder" in answer.json()["error"]["message"]
        assert "no recurrent state" in answer.json()["error"]["message"]


def test_the_official_client_embeds_by_state(client: openai.OpenAI) -> None:
    """SPEC D8, I6: OpenAI's library asks for base64 and reads the answer."""
    found = client.embeddings.create(model="default", input="hello", extra_body={"kind": "state"})
    assert len(found.data[0].embedding) >= 2
