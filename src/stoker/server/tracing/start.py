"""Whether requests are traced: what asks for it, and whether the extra `otel` is there.

Apart because nothing of OpenTelemetry's library is imported before somebody asks for traces.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stoker.errors import MachineSetupError
from stoker.settings import is_tracing_asked

if TYPE_CHECKING:
    from stoker.server.tracing.requests import RequestTracing

_EXTRA = (
    "opentelemetry",
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "opentelemetry.exporter.otlp",
    "opentelemetry.exporter.otlp.proto",
    "opentelemetry.exporter.otlp.proto.http",
)
_PATH = "/v1/traces"


def tracing_to(endpoint: str | None) -> RequestTracing | None:
    """Traces to a collector: at that address, or where OpenTelemetry's variables say; None: nobody asked.

    Raises:
        MachineSetupError: the extra `otel` is not installed.
    """
    if endpoint is None and not is_tracing_asked():
        return None
    if not all(find_spec(part) for part in _EXTRA):  # in this order: to ask for a part of none raises
        text = "traces need the extra otel: pip install 'stoker[otel]'"
        raise MachineSetupError(text, param="otel_endpoint")
    from stoker.server.tracing.requests import RequestTracing, provider_for  # noqa: PLC0415 - before that it may not be there

    return RequestTracing(provider_for(None if endpoint is None else traces_url(endpoint)))


def traces_url(endpoint: str) -> str:
    """Where traces go, of a collector's address: as it is with a path of its own, else the usual one."""
    is_bare = urlsplit(endpoint).path in {"", "/"}
    return endpoint.rstrip("/") + _PATH if is_bare else endpoint
