"""/v1/rerank: documents in the order of what they have to say to a query.

What scoring is, is `stoker.tasks.rerank`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.server.headers import header_fields
from stoker.server.inbound.body import described, read_body
from stoker.server.inbound.disconnect import while_connected
from stoker.server.native.rerank_body import RerankRequest
from stoker.server.native.states import json_later
from stoker.tasks.rerank import Reranking

if TYPE_CHECKING:
    from stoker.server.context import ServerContext


def router(context: ServerContext) -> APIRouter:
    """The route of reranking."""
    routes = APIRouter(tags=["rerank"])
    rerank = _RerankRoute(context)
    routes.post("/v1/rerank", openapi_extra=described(RerankRequest))(rerank.rerank)
    return routes


class _RerankRoute:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._reranking = Reranking(context.runtime)

    async def rerank(self, request: Request) -> Response:
        """The documents, the best first; `relevance_score` is what the model gives, the higher the better."""
        body = await read_body(request, RerankRequest)
        texts = body.texts()
        self._context.require_ready()
        fields = {
            **body.fields(request.state.key_digest),
            **header_fields(request),
            "model": "default" if body.model is None else body.model,
        }
        work = self._reranking.rerank(body.query, texts, **fields)
        found = await while_connected(work, request.receive)
        return await json_later(body.answer(found))
