"""Traces of a real server's requests, as a collector of OpenTelemetry gets them over HTTP."""

from __future__ import annotations

import gzip
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stoker.runtime import Runtime

WORDS = "the owl flies at dawn"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
MESSAGES = [{"role": "user", "content": WORDS}]
DIALECTS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": WORDS, "max_tokens": 3},
    "/v1/responses": {"input": WORDS, "max_output_tokens": 16, "store": False},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3, "model": "fake"},
    "/api/chat": {"model": "fake", "messages": MESSAGES, "stream": False, "options": {"num_predict": 3}},
    "/api/generate": {"model": "fake", "prompt": WORDS, "stream": False, "options": {"num_predict": 3}},
    "/v1/choose": {"prompt": WORDS, "choices": [" a", " b"]},
    "/v1/embeddings": {"input": [WORDS, "another"], "kind": "state"},
}


class Collector:
    """Takes what is exported; `bodies` are as they came, decompressed."""

    def __init__(self):
        self.bodies: list[bytes] = []
        self.has_more = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                with collector.has_more:
                    collector.bodies.append(body)
                    collector.has_more.notify_all()
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self):
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def spans(self):
        """All that came so far."""
        exports = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for export in exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector():
    """A collector on a port of its own."""
    found = Collector()
    yield found
    found.close()


def make_runtime() -> Runtime:
    """The fake backend in this process."""
    return Runtime(model="fake:eog_period=0", isolation="thread", slots=2)


def text_of(span, name: str) -> str:
    """An attribute of a span that is a text; empty: it has none of that name."""
    return next((each.value.string_value for each in span.attributes if each.key == name), "")


def test_every_dialect_goes_on_with_the_callers_trace_and_tells_no_text(start_server, collector) -> None:
    """O17: one span of the request with its states below; the end of the server sends what waits."""
    server = start_server(make_runtime, otel_endpoint=collector.url)
    server.ready.result(60)
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as http:
        for path, body in DIALECTS.items():
            assert http.post(path, json=body).status_code == 200, path
    server.stop()
    spans = collector.spans
    roots = {text_of(span, "http.route"): span for span in spans if span.parent_span_id.hex() == PARENT}
    assert roots.keys() == DIALECTS.keys()
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    for path, root in roots.items():
        below = {span.name for span in spans if span.parent_span_id == root.span_id}
        assert {"prepare", "queue", "prefill"} <= below, path
    chat = roots["/v1/chat/completions"]
    assert chat.name == "chat fake"
    below = [span for span in spans if span.parent_span_id == chat.span_id]
    assert {"prefill", "decode"} <= {span.name for span in below}
    for span in below:
        assert chat.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= chat.end_time_unix_nano
    assert WORDS.encode() not in b"".join(collector.bodies)


@pytest.mark.long
def test_a_collector_that_is_away_or_hangs_fails_no_request(start_server) -> None:
    """O17: requests are answered, and the server ends, whatever the collector does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts by its backlog and says nothing
        server = start_server(make_runtime, otel_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        server.ready.result(60)
        body = DIALECTS["/v1/completions"]
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert [http.post("/v1/completions", json=body).status_code for _ in range(5)] == [200] * 5
        server.stop()
