"""The ASGI application: routes, error shape and gate around one runtime.

Composition only. It does not start or stop the runtime and binds no port; `serve` does.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from stoker.server.anthropic import messages
from stoker.server.anthropic.messages import MessagesRequest
from stoker.server.context import ServerContext
from stoker.server.errors import install_error_handlers
from stoker.server.inbound.body import body_schemas
from stoker.server.inbound.gate import WorkGate
from stoker.server.inbound.origins import Origins
from stoker.server.inbound.security import Access, HostList, KeyRing
from stoker.server.metrics import Metrics
from stoker.server.native import choose, requests, rerank, runtime, states, tokens
from stoker.server.native import models as residency
from stoker.server.native.choose import ChooseRequest
from stoker.server.native.models import (
    LoadModelRequest,
    ModelRequest,
    PinModelRequest,
    SuspendRequest,
)
from stoker.server.native.rerank import RerankRequest
from stoker.server.native.states import SaveStateRequest, StateEmbeddingRequest
from stoker.server.native.tokens import DetokenizeRequest, TokenizeRequest
from stoker.server.openai import chat, completions, embeddings, models, responses
from stoker.server.openai.completions import CompletionRequest
from stoker.server.openai.conversation import ChatRequest, ConversationFields
from stoker.server.openai.embeddings import EmbeddingRequest
from stoker.server.openai.responses import ResponsesRequest

if TYPE_CHECKING:
    from stoker.runtime import Runtime
    from stoker.settings import ServerSettings

_BODIES = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    ConversationFields,
    TokenizeRequest,
    DetokenizeRequest,
    SaveStateRequest,
    StateEmbeddingRequest,
    EmbeddingRequest,
    RerankRequest,
    ChooseRequest,
    LoadModelRequest,
    ModelRequest,
    PinModelRequest,
    SuspendRequest,
)
_ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    messages.router,
    states.router,
    embeddings.router,
    rerank.router,
    choose.router,
    models.router,
    tokens.router,
    runtime.router,
    residency.router,
    requests.router,
)
_VERSION = "/v1"
_KNOWN_ELSEWHERE = frozenset({"generate", "embeddings", "rerank", "models"})  # tags of routes


def create_app(context: ServerContext) -> FastAPI:
    """The application around `context`.

    Raises:
        MachineSetupError: the API key file cannot be read.
    """
    app = FastAPI(title="Stoker", version=version("stoker"), docs_url=None, redoc_url=None)
    for router in _ROUTERS:
        _include(app, router(context))
    install_error_handlers(app)
    settings = context.settings
    app.add_middleware(
        WorkGate,
        hosts=HostList([settings.host, *settings.allowed_hosts]),
        origins=Origins(settings.cors_origins),
        access=Access(KeyRing.read(settings.api_key_file), KeyRing.read(settings.admin_key_file)),
        bodies=context.bodies,
    )
    _describe(app)
    return app


def _include(app: FastAPI, routes: APIRouter) -> None:
    """Add routes; what other servers answer too is answered without /v1 as well, as those do."""
    app.include_router(routes)
    for route in routes.routes:
        if isinstance(route, APIRoute) and _KNOWN_ELSEWHERE.intersection(route.tags):
            path, methods = route.path.removeprefix(_VERSION), sorted(route.methods or ())
            app.add_api_route(path, route.endpoint, methods=methods, include_in_schema=False)


def server_context(runtime: Runtime, settings: ServerSettings) -> ServerContext:
    """A context of its own for one server."""
    return ServerContext(runtime=runtime, settings=settings, metrics=Metrics())


def _describe(app: FastAPI) -> None:
    """OpenAPI with the bodies, which the routes read by themselves."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(body_schemas(_BODIES))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # the way FastAPI documents
