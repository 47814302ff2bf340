"""GET /v1/models: what is served. Never wakes or loads anything (SPEC S6).

Apart because it is an API of its own among those that `app` serves.
"""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from stoker.ipc.model import ModelInfo
from stoker.server.context import ServerContext
from stoker.server.reply import json_response


def router(context: ServerContext) -> APIRouter:
    """The list of models and each of them."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models")
    async def models() -> Response:
        """Every model that is served, the default one first, each followed by its adapters."""
        data = [
            _entry(context, each)
            for info in context.runtime.models
            for each in (info, *(msgspec.structs.replace(info, adapter=a.name) for a in info.adapters))
        ]
        return json_response({"object": "list", "data": data})

    @routes.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """One model; "default" is the first."""
        return json_response(_entry(context, context.runtime.resolve(model_id)))

    return routes


def _entry(context: ServerContext, info: ModelInfo) -> dict[str, Any]:
    meta = {
        "architecture": info.architecture,
        "class": info.model_class,
        "description": info.description,
        "label": info.label,
        "n_ctx": info.n_ctx,
        "n_ctx_train": info.n_ctx_train,
        "n_vocab": info.n_vocab,
        "num_params": info.num_params,
        "num_slots": info.num_slots,
        "size_bytes": info.size_bytes,
        "pictures": info.pairing or None,
        "pooling": info.pooling or None,
        "has_chat_template": bool(info.chat_template),
    }
    entry = {
        "id": info.asked_as,
        "object": "model",
        "created": int(context.started_at),
        "owned_by": "stoker",
        "meta": meta,
    }
    return entry | ({"parent": info.id} if info.adapter else {})
