"""What models of each class refuse over HTTP: a typed 400 that names the model and the reason."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from every_class import DECODER, ENCODER, RECURRENT, RERANKER, SEQ2SEQ, runtime_of

HELLO = [{"role": "user", "content": "hello"}]
INLINE_STATE = {"data": base64.b64encode(b"0" * 64).decode()}
TEXTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
}
GENERATES_NONE = "embeds texts and generates none"
NO_STATE = "no recurrent state"


def picture() -> list[dict[str, Any]]:
    """A turn that shows one."""
    data = BytesIO()
    Image.new("RGB", (16, 16)).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


Case = tuple[str, str, dict[str, Any], str]
REFUSED: list[Case] = [
    *((ENCODER, path, body, GENERATES_NONE) for path, body in TEXTS.items() if "messages" not in body),
    (RERANKER, "/v1/completions", TEXTS["/v1/completions"], GENERATES_NONE),
    (ENCODER, "/v1/completions", {"prompt": "hello", "stream": True}, GENERATES_NONE),
    (SEQ2SEQ, "/v1/embeddings", {"input": "hello"}, "for its decoder to read"),
    (SEQ2SEQ, "/v1/embeddings", {"input": "hello", "kind": "state"}, "for its decoder to read"),
    (DECODER, "/v1/embeddings", {"input": "hello"}, "no encoder"),
    (RECURRENT, "/v1/embeddings", {"input": "hello"}, "no encoder"),
    (RERANKER, "/v1/embeddings", {"input": "hello"}, "it scores"),
    (ENCODER, "/v1/embeddings", {"input": "hello", "kind": "state"}, "no state"),
    (ENCODER, "/v1/states/embeddings", {"input": "hello"}, "no state"),
    (DECODER, "/v1/rerank", {"query": "a", "documents": ["b"]}, "scored by an encoder"),
    (SEQ2SEQ, "/v1/rerank", {"query": "a", "documents": ["b"]}, "scored by an encoder"),
    (ENCODER, "/v1/rerank", {"query": "a", "documents": ["b"]}, "without a classifier"),
    (SEQ2SEQ, "/v1/runtime/models/load", {"slots": 4}, "takes 1 slot, not 4"),
    (SEQ2SEQ, "/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1}, "gives no probabilities"),
    (DECODER, "/v1/completions", {"prompt": "hello", "state": INLINE_STATE}, NO_STATE),
    (SEQ2SEQ, "/v1/completions", {"prompt": "hello", "state": INLINE_STATE}, NO_STATE),
    (DECODER, "/v1/states", {"prompt": "hello"}, NO_STATE),
    (ENCODER, "/v1/states", {"prompt": "hello"}, NO_STATE),
    (ENCODER, "/v1/choose", {"prompt": "hello", "choices": ["a", "b"]}, "continues no prompt"),
    (SEQ2SEQ, "/v1/choose", {"prompt": "hello", "choices": ["a", "b"]}, "continues no prompt"),
    (DECODER, "/v1/chat/completions", {"messages": picture()}, "no pictures"),
    (SEQ2SEQ, "/v1/chat/completions", {"messages": picture()}, "no pictures"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models and their smoke verdicts are."""
    return tmp_path_factory.mktemp("classes")


@pytest.fixture
def http(start_server: Callable[..., Any], folder: Path) -> Iterator[httpx.Client]:
    """A client of a server with a model of every class."""
    server = start_server(lambda: runtime_of(folder))
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.long
def test_what_a_class_cannot_do_is_a_400_that_says_why(http: httpx.Client) -> None:
    """SPEC K2, K3, K4, K5, S3, V2: never a 404, 422 or 500, and the server serves on."""
    wrong = []
    for model, path, body, why in REFUSED:
        answer = http.post(path, json={"model": model, **body})
        error = answer.json().get("error", {})
        told = str(error.get("message"))
        found = (answer.status_code, error.get("code"), error.get("type"))
        if found != (400, "unsupported", "invalid_request_error") or model not in told or why not in told:
            wrong.append((model, path, body.keys(), found, told))
    assert not wrong


def test_an_encoder_decoder_answers_over_http(http: httpx.Client) -> None:
    """SPEC K3, K7: as any model does; its one slot is shown; without a template there is no chat."""
    body = {"model": SEQ2SEQ, "prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    tokens = http.post("/tokenize", json={"model": SEQ2SEQ, "content": "hello", "add_special": True}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens["tokens"])
    assert answer["usage"]["completion_tokens"] == 5
    meta = http.get(f"/v1/models/{SEQ2SEQ}").json()["meta"]
    assert (meta["class"], meta["num_slots"]) == ("encoder-decoder", 1)
    chat = http.post("/v1/chat/completions", json={"model": SEQ2SEQ, "messages": HELLO})
    assert chat.status_code == 400
    assert "without a chat template" in chat.json()["error"]["message"]
