"""Callers' strings that become names, paths or keys of a lookup: odd ones are answered, and reach no file."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from stoker.runtime import Runtime
from tiny_models import write_llama

LOAD = "/v1/runtime/models/load"
START_S = 60.0
ODD = {
    "empty": "",
    "blank": " ",
    "nul": "a\0b",
    "newline": "a\nb",
    "long": "x" * 5000,
    "long part": f"x/{'y' * 300}",
    "long file": "y" * 300,
    "dot": ".",
    "dots": "..",
    "deep dots": "../" * 200,
    "slash": "/",
    "absolute": "/etc/passwd",
    "device": "/dev/zero",
    "home": "~root/x",
    "nobody's home": "~no-such-user/x",
    "escape": "\x1b[2J",
    "no character": "\ufffe",
    "turned around": "\u202egguf",
    "drive": "C:\\x.gguf",
    "url": "file:///etc/passwd",
    "colon": "a:b:c",
    "percent": "%00%2e%2e%2f",
}
SOME = [ODD[name] for name in ("blank", "nul", "newline", "long", "dots", "slash", "absolute", "percent")]
LONE = '"\\ud800"'  # half of a character, which JSON can write and UTF-8 cannot
CONVERSATION = [{"role": "user", "content": "hi"}]
BODIES = {
    LOAD: {},
    "/v1/runtime/models/unload": {},
    "/v1/runtime/models/pin": {},
    "/v1/chat/completions": {"messages": CONVERSATION, "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": CONVERSATION, "max_tokens": 1},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/choose": {"prompt": "x", "choices": ["a"]},
    "/v1/states": {"prompt": "x"},
    "/v1/states/embeddings": {"input": "x"},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": CONVERSATION},
}
FIELDS = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 1}, "state"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1}, "lora"),
    ("/v1/states", {}, "file"),
    ("/v1/states", {"prompt": "x"}, "name"),
]
PATHS = [
    ("GET", "/v1/models/{}"),
    ("GET", "/v1/states/{}"),
    ("GET", "/v1/states/{}/content"),
    ("DELETE", "/v1/states/{}"),
    ("GET", "/v1/runtime/requests/{}/stream"),
    ("POST", "/v1/runtime/requests/{}/cancel"),
    ("POST", "/v1/runtime/requests/{}/pause"),
    ("POST", "/v1/runtime/requests/{}/resume"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A models folder with a model in it, one beside it, and links from the one to the other."""
    models = tmp_path_factory.mktemp("models")
    outside = tmp_path_factory.mktemp("outside")
    write_llama(models / "inside.gguf")
    write_llama(outside / "outside.gguf")
    (models / "up").symlink_to(outside)
    return models


@pytest.fixture(scope="module")
def server(_module_servers, folder):
    """A real runtime with the fake recurrent model that is served as `fake`."""
    started = _module_servers(
        lambda: Runtime(
            "fake:eog_period=0,recurrent=1",
            isolation="thread",
            models_dir=folder,
            states_dir=folder / "states",
            image_roots=(str(folder),),
        )
    )
    started.ready.result(START_S)
    return started


@pytest.fixture
def http(server):
    """A client of it."""
    with httpx.Client(base_url=server.url, timeout=START_S) as client:
        yield client


def refused(answer, statuses=(400, 404)):
    """Whether it is one of our errors, with a message that a log can hold."""
    assert answer.status_code in statuses, answer.text
    error = answer.json()["error"]
    assert error["code"]
    assert error["message"]


@pytest.mark.parametrize("name", ODD.values(), ids=ODD.keys())
def test_a_model_of_an_odd_name_is_not_loaded(http, folder, name):
    """S3, S4: not found, without a word of where models lie; the server goes on."""
    answer = http.post(LOAD, json={"model": name})
    refused(answer)
    assert str(folder) not in answer.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["empty", "nul", "long", "dots", "absolute"])
def test_an_odd_name_of_a_model_is_refused(http, path, name):
    """S3: wherever a body names a model."""
    refused(http.post(path, json={**BODIES[path], "model": ODD[name]}))


@pytest.mark.parametrize("path", BODIES)
def test_half_a_character_is_refused(http, path):
    """S3: what JSON can write and no text can hold."""
    body = json.dumps({**BODIES[path], "model": "MODEL"}).replace('"MODEL"', LONE)
    refused(http.post(path, content=body))


@pytest.mark.parametrize(("path", "body", "field"), FIELDS)
@pytest.mark.parametrize("name", SOME)
def test_an_odd_name_in_another_field_is_refused(http, path, body, field, name):
    """K5, K6, S3: of a state, an adapter or a file laid ready."""
    refused(http.post(path, json={**body, field: name}))


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("name", SOME)
def test_an_odd_name_in_a_path_is_not_found(http, method, path, name):
    """S3: nothing live, kept, saved or served is called so."""
    answer = http.request(method, path.format(quote(name, safe="").replace(".", "%2E")))
    assert answer.status_code in {400, 404, 405, 307} or answer.json().get("object") == "list", answer.text


@pytest.mark.parametrize("name", ODD.values(), ids=ODD.keys())
def test_an_odd_path_of_a_picture_is_refused(http, name):
    """V2, S4: and so is a file that lies outside the folders of pictures."""
    part = {"type": "image_url", "image_url": {"url": f"file://{name}"}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    refused(http.post("/v1/chat/completions", json=body))


FAKES = ["fake:", "fake:id=fake", "fake:id=inside,abort_tokens=1", "fake:load_s=60", "fake:encoder=1"]


@pytest.mark.parametrize("name", [*FAKES, "FAKE:", " fake:", "./fake:", "fake:x/y", "fake:../inside.gguf"])
@pytest.mark.parametrize("path", [LOAD, "/v1/chat/completions"])
def test_nothing_over_http_leads_to_the_test_backend(http, path, name):
    """S4, R7: it is not found, and what is served stays as it is."""
    before = http.get("/v1/models").json()
    refused(http.post(path, json={**BODIES[path], "model": name}))
    assert http.get("/v1/models").json() == before


@pytest.mark.parametrize("name", ["up/outside.gguf", "up/outside", "../outside/outside.gguf", "owner/repo"])
def test_nothing_outside_the_folder_is_loaded_and_nothing_is_downloaded(http, folder, name):
    """S4, R7, L7: not through links either; a hub is not asked unless the owner allows it."""
    refused(http.post(LOAD, json={"model": name}), (403, 404))
    outside = Path(folder / "up").resolve() / "outside.gguf"
    refused(http.post(LOAD, json={"model": str(outside)}), (404,))
    assert [entry["id"] for entry in http.get("/v1/models").json()["data"]] == ["fake"]
