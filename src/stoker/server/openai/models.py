"""GET /v1/models: what is served. Never wakes or loads anything (SPEC S6).

Apart because it is an API of its own among those that `app` serves.
"""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.images.turns import can_hear, can_see
from stoker.ipc.model import ModelInfo
from stoker.server.context import ServerContext
from stoker.server.inbound.named_keys import Permit
from stoker.server.reply import json_response


def router(context: ServerContext) -> APIRouter:
    """The list of models and each of them."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        """Every model that the caller may use, the default one first, each with its adapters and aliases."""
        permit: Permit = request.state.identity.permit
        data = [
            _entry(context, each)
            for info in context.runtime.models
            for each in (info, *(msgspec.structs.replace(info, adapter=a.name) for a in info.adapters))
            if permit.may_use(each)
        ]
        data += [
            _entry(context, info) | {"id": alias, "parent": info.id}
            for info in context.runtime.models
            for alias in info.aliases
            if permit.may_use(info)
        ]
        return json_response({"object": "list", "data": data})

    @routes.get("/v1/models/{model_id:path}")
    async def model(model_id: str, request: Request) -> Response:
        """One model; "default" is the first."""
        info = context.runtime.resolve(model_id)
        request.state.identity.permit.check_model(info)
        return json_response(_entry(context, info))

    return routes


def _entry(context: ServerContext, info: ModelInfo) -> dict[str, Any]:
    meta = {
        "architecture": info.architecture,
        "class": info.model_class,
        "description": info.description,
        "label": info.label,
        "backend": info.backend,
        "backend_reason": info.backend_reason or None,
        "n_ctx": info.n_ctx,
        "n_ctx_train": info.n_ctx_train,
        "n_vocab": info.n_vocab,
        "num_params": info.num_params,
        "num_slots": info.num_slots,
        "size_bytes": info.size_bytes,
        "pictures": (info.pairing or None) if can_see(info) or not can_hear(info) else None,
        "pictures_reason": info.pairing_reason or None,
        "audio": can_hear(info),
        "pooling": info.pooling or None,
        "has_chat_template": bool(info.chat_template),
        "kv_type": info.kv_type if info.num_cells else None,
        "kv_layout": info.kv_layout or None,
        "flash_attention": info.flash_attention or None,
        "repeatable": info.is_repeatable if info.num_cells else None,
    }
    entry = {
        "id": info.asked_as,
        "object": "model",
        "created": int(context.started_at),
        "owned_by": "stoker",
        "meta": meta,
    }
    return entry | ({"parent": info.id} if info.adapter else {})
