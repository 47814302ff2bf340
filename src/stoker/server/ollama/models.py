"""What clients of Ollama ask before they use it: whether it runs, its version, which models there are.

None of it wakes or loads anything (SPEC S6).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from stoker.chat.reasoning import reasoning_tags_of
from stoker.images.turns import can_hear, can_see
from stoker.ipc.model import ModelClass, ModelInfo, Pooling
from stoker.server.context import ServerContext, models_now
from stoker.server.inbound.body import Described, Name, read_body
from stoker.server.ollama.lines import time_text
from stoker.server.ollama.names import OllamaBody, asked_model, listed_name, offered
from stoker.server.reply import json_response
from stoker.wording import params_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.ipc.status import EngineStatus, ModelStatus

    Json = dict[str, Any]

VERSION = "0.12.11"
"""Of Ollama's API as it is spoken here. Clients read three numbers and want at least 0.6.4."""
_RUNNING = "Ollama is running"
_FOR_PEOPLE = "Stoker is running. What it answers is told at /openapi.json."
_FOR_GOOD_S = 100 * 365 * 86_400.0
"""Until a model is unloaded that stays for good: clients want a time."""


class OllamaModelRequest(OllamaBody):
    """A model by its name."""

    model: Name = Field(validation_alias=AliasChoices("model", "name"))


class OllamaShowRequest(OllamaModelRequest):
    """A model to describe; there is no more to tell where `verbose` asks for it."""

    verbose: bool | None = None


def router(context: ServerContext) -> APIRouter:
    """Probes and lists."""
    routes = APIRouter(tags=["ollama"])
    runtime = context.runtime

    @routes.head("/", include_in_schema=False)
    @routes.get("/")
    async def root(request: Request) -> Response:
        """That it runs, in Ollama's words; a browser is sent to the page."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(_RUNNING)
        return RedirectResponse("/ui", 302) if context.settings.ui else PlainTextResponse(_FOR_PEOPLE)

    @routes.head("/api/version", include_in_schema=False)
    @routes.get("/api/version")
    async def version() -> Response:
        """The version of Ollama whose API this is."""
        return json_response({"version": VERSION})

    @routes.head("/api/tags", include_in_schema=False)
    @routes.get("/api/tags")
    async def tags(request: Request) -> Response:
        """Every served model and adapter that the key may use, the default model first."""
        permit = request.state.identity.permit
        found = [info for info in offered(runtime) if permit.may_use(info)]
        changed = await asyncio.to_thread(lambda: [_changed_at(info, context) for info in found])
        rows = zip(found, changed, strict=True)
        return json_response({"models": [_listed(info) | {"modified_at": at} for info, at in rows]})

    @routes.post("/api/show", openapi_extra=Described(OllamaShowRequest))
    async def show(request: Request) -> Response:
        """What a model is and what it can do."""
        body = await read_body(request, OllamaShowRequest)
        info = asked_model(runtime, request, body.model)
        changed = await asyncio.to_thread(_changed_at, info, context)
        return json_response(_shown(info) | {"modified_at": changed})

    @routes.get("/api/ps")
    async def ps(request: Request) -> Response:
        """The models in memory that the key may use, and until when they stay if nobody asks for them."""
        status = await runtime.status()
        permit = request.state.identity.permit
        infos = {info.id: info for info in runtime.models if permit.may_use(info)}
        ready = [one for one in models_now(status, runtime.model_states()) if one.state == "ready"]
        share = _share_on_devices(status.engine, ready)
        rows = [_running(infos[one.id], one, share) for one in ready if one.id in infos]
        return json_response({"models": rows})

    return routes


# ------------------------------------------------------------ what is told of a model


def _listed(info: ModelInfo) -> Json:
    name = listed_name(info)
    row = {"name": name, "model": name, "size": info.size_bytes, "digest": _digest(info)}
    return row | {"details": _details(info)}


def _share_on_devices(engine: EngineStatus, models: Sequence[ModelStatus]) -> float:
    """How much of what models hold lies on accelerators, 0 to 1: it is not known of each."""
    in_all = sum(sum(model.bytes.values()) for model in models)
    on_devices = sum(device.own or 0 for device in engine.devices if not device.is_integrated)
    return min(1.0, on_devices / in_all) if in_all else 0.0


def _running(info: ModelInfo, status: ModelStatus, share: float) -> Json:
    left_s = status.unload_in_s
    if left_s is None:
        left_s = status.keep_alive_s if status.keep_alive_s >= 0 and not status.is_pinned else _FOR_GOOD_S
    size_bytes = sum(status.bytes.values())
    return _listed(info) | {
        "size": size_bytes,
        "size_vram": round(size_bytes * share),
        "expires_at": time_text(time.time() + left_s),
        "context_length": info.n_ctx,
    }


def _shown(info: ModelInfo) -> Json:
    return {
        "license": "",
        "modelfile": f"FROM {info.id}\n",
        "parameters": "",
        "template": info.chat_template or "",
        "details": _details(info),
        "model_info": _model_info(info),
        "capabilities": capabilities_of(info),
    }


def capabilities_of(info: ModelInfo) -> list[str]:
    """What a model can do, in Ollama's words.

    Tools are for every model that takes conversations: where its template knows none they are told in text.
    """
    if info.model_class == ModelClass.ENCODER:
        return [] if info.pooling == Pooling.RANK else ["embedding"]
    able = {
        "completion": True,
        "tools": info.takes_conversations,
        "vision": can_see(info),
        "audio": can_hear(info),
        "thinking": reasoning_tags_of(info.chat_template) is not None,
    }
    return [name for name, is_able in able.items() if is_able]


def _model_info(info: ModelInfo) -> Json:
    """As a GGUF file has it; the context is what a request may use, which clients fill."""
    name = info.architecture or "unknown"
    n_ctx = min(filter(None, (info.n_ctx, info.n_ctx_train)), default=0)
    return {
        "general.architecture": name,
        "general.basename": info.asked_as,
        "general.name": info.description or info.id,
        "general.parameter_count": info.num_params,
        f"{name}.context_length": n_ctx,
        f"{name}.vocab_size": info.n_vocab,
        **({f"{name}.embedding_length": info.n_embd} if info.n_embd else {}),
    }


def _details(info: ModelInfo) -> Json:
    family = info.architecture or "unknown"
    return {
        "parent_model": info.id if info.adapter else "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": params_text(info.num_params),
        "quantization_level": info.quantisation or "unknown",
    }


def _digest(info: ModelInfo) -> str:
    """The same for the same model; of what is known of it, as its file is not read for this."""
    known = f"{info.asked_as}\n{info.architecture}\n{info.size_bytes}\n{info.num_params}\n{info.quantisation}"
    return hashlib.sha256(known.encode()).hexdigest()


def _changed_at(info: ModelInfo, context: ServerContext) -> str:
    """When its file was changed; of what is no file, when the server was started."""
    try:
        return time_text(Path(info.path).stat().st_mtime)
    except (OSError, ValueError):
        return time_text(context.started_at)
