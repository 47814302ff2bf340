"""POST /v1/rerank in front of a runtime that plays a reranker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from encoding_runtime import RERANKER_INFO, EncodingRuntime, score_of
from stoker.backends.fake.vocabulary import FakeVocabulary
from stoker.ipc.request import Priority
from stoker.runtime import Runtime

QUERY = "who waits?"
DOCUMENTS = ["one", "two", "three", "four"]
BEST = sorted(range(4), key=lambda at: -score_of(QUERY, DOCUMENTS[at]))
BODY = {"query": QUERY, "documents": DOCUMENTS}


def reranking_runtime() -> EncodingRuntime:
    """A runtime with one reranker."""
    runtime = EncodingRuntime()
    runtime.info = RERANKER_INFO
    return runtime


@pytest.fixture
def server(start_server: Callable[..., Any]) -> Any:
    """A server with one reranker."""
    server = start_server(reranking_runtime)
    server.ready.result(60)
    return server


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    """A client of it."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and param of a refusal."""
    found = answer.json()["error"]
    return answer.status_code, found["code"], found["param"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_come_best_first(http: httpx.Client, path: str) -> None:
    """SPEC K4: index and raw score of each, by score; tokens of all pairs."""
    found = http.post(path, json={**BODY, "model": "reranker"}).json()
    expected = [{"index": at, "relevance_score": score_of(QUERY, DOCUMENTS[at])} for at in BEST]
    num_tokens = sum(len(FakeVocabulary().pair(QUERY, document)) for document in DOCUMENTS)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert found == {"model": "reranker", "results": expected, "usage": usage, "object": "list"}


def test_the_best_can_come_alone_and_with_their_text(http: httpx.Client) -> None:
    """SPEC K4: `top_n` and `return_documents`; a document may be an object with a text."""
    objects = [{"text": document} for document in DOCUMENTS]
    body = {"query": QUERY, "documents": objects, "top_n": 2, "return_documents": True}
    found = http.post("/v1/rerank", json=body).json()["results"]
    assert [each["index"] for each in found] == BEST[:2]
    assert [each["document"] for each in found] == [objects[at] for at in BEST[:2]]


def test_class_deadline_and_keep_alive_go_with_each_pair(http: httpx.Client, server: Any) -> None:
    """SPEC Q1, I7, R8: as for texts to embed; the header beats the body."""
    http.post("/v1/rerank", json={**BODY, "service_tier": "flex", "timeout_s": 90.0, "keep_alive": "10m"})
    request = server.runtime.requests[-1]
    assert (request.priority, request.keep_alive_s) == (Priority.BACKGROUND, 600)
    assert 0 < request.timeout_s <= 90
    http.post("/v1/rerank", json=BODY, headers={"X-Stoker-Priority": "background"})
    assert server.runtime.requests[-1].priority is Priority.BACKGROUND


def test_what_makes_no_sense_is_refused(http: httpx.Client) -> None:
    """SPEC S3: 400 by the ecosystem's shape, naming the field."""
    for body, param in (
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a"] * 2049}, "documents"),
        ({"query": ["a"], "documents": ["a"]}, "query"),
        ({**BODY, "top_n": 0}, "top_n"),
        ({**BODY, "keep_alive": "soon"}, "keep_alive"),
    ):
        assert error(http.post("/v1/rerank", json=body))[::2] == (400, param), body
    assert http.post("/v1/rerank", json={**BODY, "model": "other"}).status_code == 404


def test_other_models_are_refused_with_the_reason(http: httpx.Client, server: Any) -> None:
    """SPEC K1, K4: a decoder and an encoder without a classifier score nothing."""
    for fields in ({"model_class": "decoder"}, {"model_class": "encoder-decoder"}, {"pooling": "mean"}):
        server.runtime.info = msgspec.structs.replace(RERANKER_INFO, **fields)
        assert error(http.post("/v1/rerank", json=BODY)) == (400, "unsupported", "model")


def test_a_reranker_in_an_engine_scores_and_does_nothing_else(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    """SPEC K4: the whole way, from HTTP to the engine's loop and back."""

    def runtime() -> Runtime:
        path, cache = "fake:encoder=1,pooling=rank", tmp_path / "cache"
        return Runtime(path, isolation="thread", states_dir=tmp_path, cache_dir=cache)

    server = start_server(runtime)
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        found = http.post("/v1/rerank", json=BODY).json()["results"]
        assert [each["index"] for each in found] == BEST
        for each in found:
            assert each["relevance_score"] == score_of(QUERY, DOCUMENTS[each["index"]])
        assert error(http.post("/v1/embeddings", json={"input": "x"})) == (400, "unsupported", "model")
        refused = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "temperature": 0})
        assert error(refused)[:2] == (400, "unsupported")
        too_long = http.post("/v1/rerank", json={"query": "x", "documents": ["x" * 600]})
        assert error(too_long) == (400, "context_length_exceeded", "documents")


def test_the_document_describes_the_route(http: httpx.Client) -> None:
    """The OpenAPI document names the body's fields."""
    fields = http.get("/openapi.json").json()["components"]["schemas"]["RerankRequest"]["properties"]
    assert {"query", "documents", "top_n", "return_documents"} <= set(fields)
