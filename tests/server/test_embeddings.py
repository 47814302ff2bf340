"""POST /v1/embeddings in front of a runtime that plays an encoder."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest

from encoding_runtime import ENCODER_INFO, EncodingRuntime
from stoker.backends.fake.encoder import N_EMBD, vector_of
from stoker.ipc.request import Priority
from stoker.runtime import Runtime


@pytest.fixture
def server(start_server: Callable[..., Any]) -> Any:
    """A server with one encoder."""
    server = start_server(EncodingRuntime)
    server.ready.result(60)
    return server


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    """A client of it."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def expected(text: str) -> np.ndarray:
    """The vector of a text, of length 1."""
    vector = vector_of(EncodingRuntime.tokens(text))
    return vector / np.linalg.norm(vector)


def embed(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """An answer that is one."""
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and param of a refusal."""
    found = answer.json()["error"]
    return answer.status_code, found["code"], found["param"]


def test_texts_get_their_vectors_in_order(http: httpx.Client) -> None:
    """SPEC K2: OpenAI's answer; of length 1 by default, with the tokens counted."""
    texts = ["one", "two", "three"]
    found = embed(http, model="encoder", input=texts)
    assert (found["object"], found["model"]) == ("list", "encoder")
    assert [entry["index"] for entry in found["data"]] == [0, 1, 2]
    assert {entry["object"] for entry in found["data"]} == {"embedding"}
    for text, entry in zip(texts, found["data"], strict=True):
        assert np.allclose(entry["embedding"], expected(text), atol=1e-6)
    num_tokens = sum(len(EncodingRuntime.tokens(text)) for text in texts)
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert embed(http, input="one", kind="embedding")["data"] == found["data"][:1]


def test_token_ids_are_taken_as_they_are(http: httpx.Client) -> None:
    """OpenAI's `input` is text, texts, token ids or lists of them; ids are checked."""
    tokens = EncodingRuntime.tokens("one")
    (entry,) = embed(http, input=tokens)["data"]
    assert np.allclose(entry["embedding"], expected("one"), atol=1e-6)
    assert len(embed(http, input=[tokens, tokens])["data"]) == 2
    assert error(http.post("/v1/embeddings", json={"input": [5, 9999]}))[::2] == (400, "input")


def test_vectors_come_as_base64_cut_or_as_they_are(http: httpx.Client) -> None:
    """SPEC K2: `encoding_format`, `dimensions` and `normalize` change how, and nothing else."""
    (entry,) = embed(http, input="one", encoding_format="base64")["data"]
    packed = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    assert np.allclose(packed, expected("one"), atol=1e-6)
    (entry,) = embed(http, input="one", normalize=False)["data"]
    assert np.allclose(entry["embedding"], vector_of(EncodingRuntime.tokens("one")), atol=1e-6)
    (entry,) = embed(http, input="one", dimensions=3)["data"]
    assert len(entry["embedding"]) == 3
    assert np.isclose(np.linalg.norm(entry["embedding"]), 1.0)
    for dimensions in (0, N_EMBD + 1):
        refused = http.post("/v1/embeddings", json={"input": "one", "dimensions": dimensions})
        assert error(refused) == (400, "invalid_request", "dimensions")


def test_class_deadline_and_keep_alive_go_with_the_request(http: httpx.Client, server: Any) -> None:
    """SPEC Q1, I7, R8: embedding carries them too; the header beats the body."""
    embed(http, input="one", service_tier="flex", timeout_s=9.0, keep_alive="10m")
    request = server.runtime.requests[-1]
    assert request.priority is Priority.BACKGROUND
    assert request.timeout_s == pytest.approx(9.0, abs=5.0)
    assert request.keep_alive_s == 600
    http.post("/v1/embeddings", json={"input": "one"}, headers={"X-Stoker-Priority": "background"})
    assert server.runtime.requests[-1].priority is Priority.BACKGROUND


def test_what_makes_no_sense_is_refused(http: httpx.Client) -> None:
    """SPEC S3: 400 or 422 by the ecosystem's shape, naming the field."""
    for body, param in (
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "kind": "image"}, "kind"),
        ({"input": "a", "state": "one"}, "state"),
        ({"input": "a", "kind": "state"}, "kind"),
        ({"input": "a", "kind": "state", "dimensions": 2}, "dimensions"),
        ({"input": "a", "kind": "state", "normalize": True}, "normalize"),
        ({"input": "a", "keep_alive": "soon"}, "keep_alive"),
    ):
        assert error(http.post("/v1/embeddings", json=body))[::2] == (400, param), body
    assert http.post("/v1/embeddings", json={}).status_code == 400
    assert http.post("/v1/embeddings", json={"input": "a", "model": "other"}).status_code == 404


def test_other_models_are_refused_with_the_reason(http: httpx.Client, server: Any) -> None:
    """SPEC K2, K3: a decoder has states, an encoder-decoder reads for its decoder, a reranker scores."""
    for fields, param in (
        ({"model_class": "decoder"}, "model"),
        ({"model_class": "encoder-decoder"}, "model"),
        ({"pooling": "rank"}, "model"),
    ):
        server.runtime.info = msgspec.structs.replace(ENCODER_INFO, **fields)
        assert error(http.post("/v1/embeddings", json={"input": "a"})) == (400, "unsupported", param)


def test_an_error_of_one_text_is_the_answer(http: httpx.Client, server: Any) -> None:
    """SPEC S3, S5: with the text's own code; nothing stays behind."""
    server.runtime.bad_text = "bad"
    refused = http.post("/v1/embeddings", json={"input": ["a", "bad", "b"]})
    assert error(refused) == (400, "invalid_request", "input")
    server.runtime.max_live = 0
    refused = http.post("/v1/embeddings", json={"input": ["a"]})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert server.runtime.num_live == 0


def test_the_official_client_embeds(server: Any) -> None:
    """OpenAI's library asks for base64 and reads the answer."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="encoder", input=["one", "two"], dimensions=4)
    assert [len(entry.embedding) for entry in found.data] == [4, 4]
    assert np.isclose(np.linalg.norm(found.data[0].embedding), 1.0)


def test_an_encoder_in_an_engine_embeds_and_generates_nothing(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    """SPEC K2: the whole way, from HTTP to the engine's loop and back; text is refused with 400."""

    def runtime() -> Runtime:
        return Runtime(
            "fake:encoder=1", isolation="thread", states_dir=tmp_path, cache_dir=tmp_path / "cache"
        )

    server = start_server(runtime)
    server.ready.result(60)
    texts = [f"text {at}" for at in range(100)]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        found = embed(http, input=texts)["data"]
        for text, entry in zip(texts, found, strict=True):
            assert np.allclose(entry["embedding"], expected(text), atol=1e-6)
        refused = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "temperature": 0})
        assert error(refused)[:2] == (400, "unsupported")
        streamed = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True})
        assert error(streamed)[:2] == (400, "unsupported")
        too_long = http.post("/v1/embeddings", json={"input": "x" * 600})
        assert error(too_long)[:2] == (400, "context_length_exceeded")


def test_the_document_describes_the_route(http: httpx.Client) -> None:
    """The OpenAPI document names the body's fields."""
    fields = http.get("/openapi.json").json()["components"]["schemas"]["EmbeddingRequest"]["properties"]
    assert {"input", "dimensions", "normalize", "encoding_format", "kind"} <= set(fields)
