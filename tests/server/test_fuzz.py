"""Whatever fits the published schema, and much that does not, is answered without a server error."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis

SETTINGS = hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
# What cannot be called with anything, and why; the tests of these routes are elsewhere.
LEFT_OUT = {
    "/v1/runtime/events": "it never ends",
    "/v1/runtime/suspend": "nothing would be answered after it",
    "/api/copy": "it is a 501, always",
    "/api/create": "likewise",
    "/api/push": "likewise",
}


@pytest.mark.long
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_no_request_makes_a_server_error(server, http, mode):
    """S3: examples of every route, right and wrong ones; the length is bounded so that each ends soon."""
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    statuses = set()
    found = [operation.ok() for operation in schema.get_all_operations()]
    operations = [operation for operation in found if operation.path not in LEFT_OUT]
    assert len(found) - len(operations) == len(LEFT_OUT)
    if mode is schemathesis.GenerationMode.NEGATIVE:  # the others have nothing to get wrong
        operations = [operation for operation in operations if operation.body]
    for operation in operations:

        @SETTINGS
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int | None):
                case.body["max_tokens"] = 2
            if case.path in {"/api/chat", "/api/generate"} and isinstance(case.body, dict):
                case.body["options"] = {"num_predict": 2}
            answer = case.call(base_url=server.url)
            statuses.add(answer.status_code)
            assert answer.status_code < 500, answer.text

        check()
    assert (200 if mode is schemathesis.GenerationMode.POSITIVE else 400) in statuses


def test_every_route_is_published(http):
    """S1: the fuzzed schema is the whole server."""
    paths = set(http.get("/openapi.json").json()["paths"])
    assert paths == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/audio/transcriptions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/responses/input_tokens",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/runtime/handover",
        "/v1/runtime/handover/state",
        "/v1/runtime/handover/state/{request_id}",
        "/v1/states",
        "/v1/states/{state_id}",
        "/v1/states/{state_id}/content",
        "/v1/states/embeddings",
        "/v1/embeddings",
        "/v1/runtime/overview",
        "/v1/runtime/status",
        "/v1/runtime/requests/count_tokens",
        "/v1/runtime/requests/{request_id}/events",
        "/v1/rerank",
        "/v1/choose",
        "/v1/models",
        "/v1/models/{model_id}",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/health",
        "/ready",
        "/metrics",
        "/v1/runtime",
        "/v1/runtime/events",
        "/v1/runtime/log",
        "/v1/runtime/prefixes",
        "/v1/runtime/models/load",
        "/v1/runtime/models/pin",
        "/v1/runtime/models/unload",
        "/v1/runtime/suspend",
        "/v1/runtime/resume",
        "/v1/runtime/requests",
        "/v1/runtime/requests/{request_id}/stream",
        "/v1/runtime/requests/{request_id}/text",
        "/v1/runtime/requests/{request_id}/cancel",
        "/v1/runtime/requests/{request_id}/pause",
        "/v1/runtime/requests/{request_id}/resume",
        "/",
        "/api/version",
        "/api/tags",
        "/api/show",
        "/api/ps",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/pull",
        "/api/delete",
        "/api/copy",
        "/api/create",
        "/api/push",
    }
