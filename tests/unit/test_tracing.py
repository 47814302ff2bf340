"""Spans of requests: made of moves, below the caller's, bounded, and without any text."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from stoker.errors import ErrorInfo, InvalidRequestError, MachineSetupError
from stoker.ipc.request import GenerateRequest, Priority, Sampling
from stoker.ipc.status import RequestMove, RequestStatus
from stoker.server.tracing.requests import MAX_HEADER, MAX_KNOWN, RequestTracing
from stoker.server.tracing.spans import asked_attributes, spans_of
from stoker.server.tracing.start import traces_url, tracing_to
from stoker.settings import ServerSettings

AT = 1_700_000_000.0
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KNOWN = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}


def move(after_s: float, state: str, index: int | None = 0, **fields) -> RequestMove:
    """A move so long after the arrival."""
    return RequestMove(at=AT + after_s, state=state, index=index, **fields)


MOVES = [
    move(0.0, "preparing", None),
    move(0.1, "queued", None, reason="no free slot"),
    move(1.0, "prefix_wait", reason="waits for a prefix that req-7 computes", by="req-7"),
    move(2.0, "prefill", slot=1),
    move(3.0, "decode", slot=1),
    move(4.0, "parked", reason="gave its slot to req-9 (interactive)", by="req-9"),
    move(6.0, "decode", slot=0),
    move(7.0, "held", None, reason="the engine is restarting"),
    move(8.0, "preparing", None, reason="the engine was restarted: goes on from 48 tokens"),
    move(8.5, "prefill", slot=0),
    move(9.0, "decode", slot=0),
    move(9.5, "ended", None, reason="stop"),
]
ENDED = RequestStatus(
    request_id="req-1",
    model="chat-model",
    priority=Priority.BACKGROUND,
    kind="chat",
    route="/v1/chat/completions",
    arrived_at=AT,
    prompt_tokens=30,
    cached_tokens=12,
    completion_tokens=64,
    max_tokens=100,
    first_token_s=3.0,
    finish_reason="stop",
    end_to_end_s=9.5,
    num_restarts=1,
    moves=MOVES,
    num_moves=len(MOVES),
)


@pytest.fixture
def exported():
    """Tracing whose spans are at hand as they end."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield RequestTracing(provider), exporter
    provider.shutdown()


def test_each_state_is_a_span_from_its_move_to_the_next() -> None:
    """O17: queue, prefix wait, prefill, decode, parked, replayed; nothing is left out between."""
    data = spans_of(ENDED, {})
    assert (data.name, data.begun_at, data.ended_at) == ("chat chat-model", AT, AT + 9.5)
    found = [
        (span.name, round(span.begun_at - AT, 3), round(span.ended_at - AT, 3)) for span in data.children
    ]
    assert found == [
        ("prepare", 0.0, 0.1),
        ("queue", 0.1, 1.0),
        ("prefix wait", 1.0, 2.0),
        ("prefill", 2.0, 3.0),
        ("decode", 3.0, 4.0),
        ("parked", 4.0, 6.0),
        ("decode", 6.0, 7.0),
        ("held", 7.0, 8.0),
        ("replayed", 8.0, 8.5),
        ("prefill", 8.5, 9.0),
        ("decode", 9.0, 9.5),
    ]
    parked = data.children[5]
    assert parked.attributes["stoker.by"] == "req-9"
    assert parked.attributes["stoker.reason"] == "gave its slot to req-9 (interactive)"


def test_no_span_ends_after_the_request() -> None:
    """O17: the last move may be some nanoseconds later than arrival and length are together."""
    moves = [move(0.0, "decode", 0), move(9.5000005, "ended", 0)]
    data = spans_of(msgspec.structs.replace(ENDED, moves=moves, num_moves=2), {})
    assert [span.ended_at for span in data.children] == [data.ended_at]


def test_choices_have_spans_of_their_own_and_wait_together() -> None:
    """O17: what all of them wait for ends when the last one got a slot."""
    moves = [
        move(0.0, "queued", None),
        move(1.0, "prefill", 0, slot=0),
        move(2.0, "decode", 0, slot=0),
        move(2.0, "prefill", 1, slot=1),
        move(3.0, "decode", 1, slot=1),
        move(4.0, "ended", 0, reason="stop"),
    ]
    data = spans_of(msgspec.structs.replace(ENDED, moves=moves, num_moves=6, end_to_end_s=5.0), {})
    found = {
        (span.name, span.attributes.get("stoker.choice")): (span.begun_at - AT, span.ended_at - AT)
        for span in data.children
    }
    assert found == {
        ("queue", None): (0.0, 2.0),
        ("prefill", 0): (1.0, 2.0),
        ("decode", 0): (2.0, 4.0),
        ("prefill", 1): (2.0, 3.0),
        ("decode", 1): (3.0, 5.0),
    }


def test_attributes_have_the_names_of_the_conventions() -> None:
    """O17: every gen_ai name is one that OpenTelemetry's conventions have, or had when they were pinned."""
    request = GenerateRequest(prompt="secret", n=2, sampling=Sampling(temperature=0.5, seed=7))
    data = spans_of(ENDED, asked_attributes(request))
    names = {name for name in data.attributes if name.startswith("gen_ai.")}
    assert names <= KNOWN
    assert data.attributes["gen_ai.operation.name"] == "chat"
    assert data.attributes["gen_ai.usage.input_tokens"] == 30
    assert data.attributes["gen_ai.usage.cache_read.input_tokens"] == 12
    assert data.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert data.attributes["gen_ai.request.seed"] == 7
    assert data.attributes["gen_ai.request.choice.count"] == 2
    assert "secret" not in repr(data)


def test_a_failure_tells_its_code_and_not_its_message(exported) -> None:
    """O17: a message may quote what it was asked."""
    tracing, exporter = exported
    error = ErrorInfo(code="request_timeout", message="secret words", http_status=408)
    tracing.ended(msgspec.structs.replace(ENDED, error=error, finish_reason=None))
    root = next(span for span in exporter.get_finished_spans() if span.parent is None)
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "request_timeout")
    assert root.attributes["error.type"] == "request_timeout"
    assert "secret" not in "".join(span.to_json() for span in exporter.get_finished_spans())


def test_a_trace_goes_on_from_the_callers_span(exported) -> None:
    """O17: W3C traceparent and tracestate; its children are below the request's own span."""
    tracing, exporter = exported
    tracing.comes_from("req-1", {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1"})
    tracing.ended(ENDED)
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.context.trace_state.get("a") == "1"
    below = [span for span in spans if span is not root]
    assert len(below) == 11
    assert {span.parent.span_id for span in below} == {root.context.span_id}
    assert (root.start_time, root.end_time) == (int(AT * 1e9), int((AT + 9.5) * 1e9))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"traceparent": "banana"},
        {"traceparent": f"00-{'0' * 32}-{PARENT}-01"},
        {"traceparent": f"00-{TRACE}-{PARENT}-01" + "x" * MAX_HEADER},
    ],
)
def test_a_parent_that_is_none_begins_a_trace(exported, headers) -> None:
    """O17: what a caller sends fails no request."""
    tracing, exporter = exported
    tracing.comes_from("req-1", headers)
    tracing.ended(ENDED)
    assert any(span.parent is None for span in exporter.get_finished_spans())


def test_a_caller_that_does_not_sample_is_followed(exported) -> None:
    """O17: its trace has no span of ours either."""
    tracing, exporter = exported
    tracing.comes_from("req-1", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    tracing.ended(ENDED)
    assert exporter.get_finished_spans() == ()


def test_what_is_remembered_of_live_requests_is_bounded(exported) -> None:
    """O17: past the bound the oldest begins a trace of its own."""
    tracing, _ = exported
    for number in range(MAX_KNOWN + 10):
        tracing.arrived(f"req-{number}", GenerateRequest(prompt="x"))
    assert repr(tracing) == f"<RequestTracing of {MAX_KNOWN} live requests>"
    tracing.ended(msgspec.structs.replace(ENDED, request_id=f"req-{MAX_KNOWN}"))
    assert repr(tracing) == f"<RequestTracing of {MAX_KNOWN - 1} live requests>"


def test_without_being_asked_there_are_no_traces(monkeypatch) -> None:
    """O17: OpenTelemetry's own variables ask, and turn it off."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert tracing_to(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing_to(None) is None


def test_an_address_without_a_path_gets_the_usual_one() -> None:
    """O17: as OTEL_EXPORTER_OTLP_ENDPOINT does; what is no address is refused."""
    assert traces_url("http://c:4318") == "http://c:4318/v1/traces"
    assert traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"
    with pytest.raises(InvalidRequestError, match="not the address of a collector"):
        ServerSettings(otel_endpoint="localhost:4318")


def test_without_the_extra_it_is_said_at_the_start(monkeypatch) -> None:
    """O17: who asks for traces is told what is missing."""
    monkeypatch.setattr("stoker.server.tracing.start.find_spec", lambda name: None)
    with pytest.raises(MachineSetupError, match=r"stoker\[otel\]"):
        tracing_to("http://127.0.0.1:4318")


def test_nothing_of_the_library_is_loaded_before_somebody_asks() -> None:
    """O17: a server without traces has none of it."""
    program = (
        "import sys, stoker.server.app; print([name for name in sys.modules if name.startswith(sys.argv[1])])"
    )
    command = [sys.executable, "-c", program, "opentelemetry.sdk"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
