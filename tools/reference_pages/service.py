"""docs/routes.md, docs/metrics.md and docs/errors.md: what the server answers, counts and refuses with."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from tools.reference_pages.markdown import MADE, sentence, table

from stoker import Runtime, StokerError
from stoker.errors import CallerError, EngineError, MachineError, ModelError
from stoker.server.app import create_app, server_context
from stoker.settings import ServerSettings

ROUTES = f"""# HTTP routes

{MADE}
On `http://127.0.0.1:8686`, unless set otherwise. Routes of other servers' APIs answer without `/v1` as well.
`/openapi.json` says the same to programs, with types. Who may call what: [keys.md](keys.md); what errors look
like: [errors.md](errors.md).
"""
METRICS = f"""# Metrics

{MADE}
`GET /metrics` is Prometheus' text format; it wakes nothing and needs a key where keys are asked for. A
histogram has `_bucket`, `_sum` and `_count`. What an engine counts begins at 0 when it is started again.

"""
ERRORS = f"""# Errors

{MADE}
Over HTTP an error is `{{"error": {{"message", "type", "code", "param", ...}}}}` with the status below, in the
library an exception of that class (`stoker.errors`), on the command line one line and an
[exit code](exit-codes.md). `param` names the field at fault; the message's numbers are in `details`. What
may be repeated later carries `Retry-After`.
"""
SECTIONS = {
    "generate": "Text",
    "embeddings": "Vectors",
    "rerank": "Rankings",
    "choose": "Choices",
    "states": "States of recurrent models",
    "models": "Models",
    "tokens": "Tokens",
    "ollama": "Ollama's API",
    "runtime": "The runtime",
    "probes": "For supervisors",
}
MEASURED = "stoker:memory_limit_bytes"
WRITTEN_OUTSIDE = {"le", "created"}
"""Labels that the text format adds."""


def routes_page() -> str:
    """Every route with what it does and, of a JSON body, its fields."""
    document = create_app(server_context(Runtime("fake:"), ServerSettings())).openapi()
    by_section: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            row = (
                f"`{method.upper()} {path}`",
                sentence(operation.get("description")),
                _fields(operation, document),
            )
            by_section[operation["tags"][0]].append(row)
    parts = [ROUTES]
    for tag in sorted(
        by_section, key=lambda tag: list(SECTIONS).index(tag) if tag in SECTIONS else len(SECTIONS)
    ):
        parts.append(f"\n## {SECTIONS.get(tag, tag.capitalize())}\n\n")
        parts.append(table(("route", "", "fields of the body"), by_section[tag]))
    return "".join(parts)


def _fields(operation: dict[str, Any], document: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    found = document["components"]["schemas"].get(name, {}).get("properties", {})
    return ", ".join(f"`{field}`" for field in sorted(found))


def metrics_page() -> str:
    """Every family of `/metrics`, as a server shows it after a request of each kind that needs no model."""
    rows = []
    for family in text_string_to_metric_families(asyncio.run(_metrics_text())):
        labels = {label for sample in family.samples for label in sample.labels} - WRITTEN_OUTSIDE
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(
            (
                f"`{name}`",
                family.type,
                ", ".join(f"`{label}`" for label in sorted(labels)),
                family.documentation,
            )
        )
    return METRICS + table(("metric", "type", "labels", "meaning"), rows)


async def _metrics_text() -> str:
    """What a server of the built-in test model shows after it has answered."""
    with tempfile.TemporaryDirectory() as folder:
        async with Runtime("fake:", isolation="thread", cache_dir=folder, run_dir=folder) as runtime:
            app = create_app(server_context(runtime, ServerSettings()))
            async with _client(app) as client:
                for path, body in (
                    ("/v1/completions", {"prompt": "a", "max_tokens": 4}),
                    ("/v1/choose", {"prompt": "a", "choices": ["b", "c"]}),
                ):
                    (await client.post(path, json=body)).raise_for_status()
                while MEASURED not in (text := (await client.get("/metrics")).text):  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.1)
                return text


def _client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def errors_page() -> str:
    """Every error with code and status, by whose fault it is."""
    parts = [ERRORS]
    for base in (CallerError, MachineError, ModelError, EngineError):
        rows = [
            (f"`{kind.code}`", str(kind.http_status), f"`{kind.__name__}`", sentence(kind.__doc__))
            for kind in _tree(base)
        ]
        parts += [f"\n## {sentence(base.__doc__)}\n\n", table(("code", "status", "class", ""), rows)]
    return "".join(parts)


def _tree(base: type[StokerError]) -> Iterator[type[StokerError]]:
    """The class and all below it that `stoker.errors` has."""
    if base.__module__ == "stoker.errors":
        yield base
        for kind in base.__subclasses__():
            yield from _tree(kind)
