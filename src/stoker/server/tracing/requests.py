"""Traces of requests by OpenTelemetry's library: where they come from, and when they are sent.

Owns the parents that callers named and what the library is given. Spans are made when a request has ended;
they wait in the library's bounded queue, whose own thread sends them: nothing here waits for a collector,
and no request fails by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stoker.server.tracing.spans import asked_attributes, spans_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.trace import Span

    from stoker.ipc.request import GenerateRequest
    from stoker.ipc.status import RequestStatus
    from stoker.server.tracing.spans import Attribute, SpanData

log = logging.getLogger(__name__)

MAX_KNOWN = 8192
"""Live requests whose parents are remembered; past this the oldest of them begins a trace of its own."""
MAX_QUEUED = 2048
"""Spans that wait for the collector; past this the library drops the oldest, and says so."""
FLUSH_S = 3.0
"""How long the end of the server waits for the collector."""
MAX_HEADER = 512
"""Characters of a header that names a parent; a longer one is ignored."""
_CARRIED = ("traceparent", "tracestate")
_NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class _Known:
    """What is known of a request before it ends: the headers that name its parent, what it asks for."""

    headers: dict[str, str] = field(default_factory=dict)
    asked: dict[str, Attribute] = field(default_factory=dict)


class RequestTracing:
    """The traces of one server's requests.

    Args:
        provider: of OpenTelemetry's library; closed here.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("stoker")
        self._propagator = TraceContextTextMapPropagator()
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RequestTracing of {len(self._known)} live requests>"

    def comes_from(self, request_id: str, headers: Mapping[str, str]) -> None:
        """Remember the parent that the headers of a request name, if they name one."""
        carried = {name: headers[name] for name in _CARRIED if 0 < len(headers.get(name, "")) <= MAX_HEADER}
        if "traceparent" in carried:
            self._of(request_id).headers = carried

    def arrived(self, request_id: str, request: GenerateRequest) -> None:
        """Remember what a request asks for, but for its text."""
        self._of(request_id).asked = asked_attributes(request)

    def _of(self, request_id: str) -> _Known:
        known = self._known.setdefault(request_id, _Known())
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def ended(self, status: RequestStatus) -> None:
        """Give the library the spans of a request that has ended."""
        known = self._known.pop(status.request_id, None) or _Known()
        data = spans_of(status, known.asked)
        self._give(data, self._propagator.extract(known.headers), is_root=True)

    def _give(self, data: SpanData, context: Context, *, is_root: bool) -> None:
        span: Span = self._tracer.start_span(
            data.name,
            context=context,
            kind=SpanKind.SERVER if is_root else SpanKind.INTERNAL,
            attributes=dict(data.attributes),
            start_time=int(data.begun_at * _NANOSECONDS),
        )
        if data.error_code:
            span.set_status(Status(StatusCode.ERROR, data.error_code))
        if span.is_recording():
            below = set_span_in_context(span, context)
            for child in data.children:
                self._give(child, below, is_root=False)
        span.end(end_time=int(data.ended_at * _NANOSECONDS))

    async def close(self) -> None:
        """Send what waits, for at most FLUSH_S; what is left then is lost."""
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._provider.force_flush()
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(is_done.set)

        # Of its own, as the library waits longer than it is told to and the program's end waits for pools.
        threading.Thread(target=flush, name="traces", daemon=True).start()
        try:
            await asyncio.wait_for(is_done.wait(), FLUSH_S)
        except TimeoutError:
            log.warning("the collector of traces did not take the last ones within %.0f s", FLUSH_S)


def provider_for(url: str | None) -> TracerProvider:
    """A provider that sends spans to that URL in batches; None: where OTEL_EXPORTER_OTLP_* say."""
    own = Resource.create({"service.name": "stoker", "service.version": version("stoker")})
    resource = own.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME and the like win
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url), max_queue_size=MAX_QUEUED))
    return provider
