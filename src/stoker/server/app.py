"""The ASGI application: routes, error shape and gate around one runtime.

Composition only. It does not start or stop the runtime and binds no port; `serve` does.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, APIWebSocketRoute

from stoker.server.anthropic import messages
from stoker.server.context import ServerContext
from stoker.server.errors import install_error_handlers
from stoker.server.inbound.body import Body, body_schemas, described_bodies
from stoker.server.inbound.gate import CallerRules, WorkGate
from stoker.server.inbound.security import HostList, Origins
from stoker.server.metrics.metrics import Metrics
from stoker.server.native import choose, events, handover, library, requests, rerank, runtime, states, tokens
from stoker.server.native import models as residency
from stoker.server.ollama import chat as ollama_chat
from stoker.server.ollama import generate as ollama_generate
from stoker.server.ollama import library as ollama_library
from stoker.server.ollama import models as ollama_models
from stoker.server.ollama import vectors as ollama_vectors
from stoker.server.openai import chat, completions, embeddings, models, transcriptions
from stoker.server.openai.responses import routes as responses
from stoker.server.openai.responses import socket as responses_socket
from stoker.server.ui import routes as ui

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.runtime import Runtime
    from stoker.settings import ServerSettings

_APIS = (
    chat,
    completions,
    responses,
    responses_socket,
    transcriptions,
    messages,
    states,
    embeddings,
    rerank,
    choose,
    models,
    tokens,
    runtime,
    events,
    residency,
    requests,
    library,
    handover,
    ollama_models,
    ollama_chat,
    ollama_generate,
    ollama_vectors,
    ollama_library,
    ui,
)
_VERSION = "/v1"
_KNOWN_ELSEWHERE = frozenset({"generate", "embeddings", "rerank", "models"})  # tags of routes


_LOOKED_AT = frozenset({"models", "probes"})  # tags of routes whose GET answers HEAD too


def create_app(context: ServerContext) -> FastAPI:
    """The application around `context`."""
    app = FastAPI(title="Stoker", version=version("stoker"), docs_url=None, redoc_url=None)
    app.state.tracing = context.tracing
    routers = [api.router(context) for api in _APIS]
    for router in routers:
        _include(app, router)
    install_error_handlers(app)
    settings = context.settings
    app.add_middleware(
        WorkGate,
        hosts=HostList([settings.host, *settings.allowed_hosts]),
        origins=Origins(settings.cors_origins),
        callers=CallerRules(context.access, context.quotas, context.runtime.resolve),
        bodies=context.bodies,
    )
    _describe(app, described_bodies(route for router in routers for route in router.routes))
    return app


def _include(app: FastAPI, routes: APIRouter) -> None:
    """Add routes; what other servers answer too is answered without /v1 as well, as those do."""
    for each in [one for one in routes.routes if isinstance(one, APIRoute)]:
        if "GET" in (each.methods or ()) and _LOOKED_AT.intersection(each.tags):
            routes.add_api_route(each.path, each.endpoint, methods=["HEAD"], include_in_schema=False)
    app.include_router(routes)
    for route in routes.routes:
        if isinstance(route, APIRoute) and _KNOWN_ELSEWHERE.intersection(route.tags):
            path, methods = route.path.removeprefix(_VERSION), sorted(route.methods or ())
            app.add_api_route(path, route.endpoint, methods=methods, include_in_schema=False)
        elif isinstance(route, APIWebSocketRoute):
            app.add_api_websocket_route(route.path.removeprefix(_VERSION), route.endpoint)


def server_context(runtime: Runtime, settings: ServerSettings) -> ServerContext:
    """A context of its own for one server. Raises MachineSetupError: a key file cannot be read."""
    return ServerContext(runtime=runtime, settings=settings, metrics=Metrics())


def _describe(app: FastAPI, bodies: Sequence[type[Body]]) -> None:
    """OpenAPI with the bodies, which the routes read by themselves."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(body_schemas(bodies))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # the way FastAPI documents
