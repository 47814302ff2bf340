"""/v1/embeddings: vectors of texts from an encoder, or with `"kind": "state"` the states that prompts leave.

What embedding is, is `stoker.tasks.embed`'; states are `routes.states`'.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.server.headers import header_fields
from stoker.server.inbound.body import described, read_body
from stoker.server.inbound.disconnect import while_connected
from stoker.server.native.states import embedded_by_state, json_later, usage_of
from stoker.server.native.states_body import EmbeddingEntry, EmbeddingList
from stoker.server.openai.embeddings_body import EmbeddingRequest, TextEmbeddingList
from stoker.tasks.embed import Embeddings, require_embedding

if TYPE_CHECKING:
    from stoker.server.context import ServerContext
    from stoker.tasks.embed import TextEmbeddings


FEW_VECTORS = 4
"""So many are written in less time than a thread takes to be asked for it."""


def router(context: ServerContext) -> APIRouter:
    """The route of embeddings."""
    routes = APIRouter(tags=["embeddings"])
    embeddings = _EmbeddingRoutes(context)
    routes.post("/v1/embeddings", openapi_extra=described(EmbeddingRequest))(embeddings.embed)
    return routes


class _EmbeddingRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._embeddings = Embeddings(context.runtime)

    async def embed(self, request: Request) -> Response:
        """One vector a text, in the order of the texts: each of length 1 unless `normalize` is false.

        They come as numbers or as base64, little-endian float32; `dimensions` keeps the first so many.
        """
        body = await read_body(request, EmbeddingRequest)
        if body.is_by_state:
            return await self._by_state(request, body)
        self._context.require_ready()
        info = self._context.runtime.resolve(body.model)
        require_embedding(info)
        fields = body.text_fields(request.state.key_digest) | header_fields(request)
        work = self._embeddings.embed(body.texts(info.n_vocab), model=info.id, **fields)
        found = await while_connected(work, request.receive)
        if len(found.vectors) <= FEW_VECTORS:
            return _written(body, found)
        return await asyncio.to_thread(_written, body, found)

    async def _by_state(self, request: Request, body: EmbeddingRequest) -> Response:
        body.refuse_text_fields()
        found = await embedded_by_state(self._context, request, body)
        entries = [
            EmbeddingEntry(index, embedding.shape, await asyncio.to_thread(body.encoded, embedding))
            for index, embedding in enumerate(found)
        ]
        num_tokens = sum(embedding.usage.prompt_tokens for embedding in found)
        return await json_later(EmbeddingList(entries, found[0].model, usage_of(num_tokens)))


def _written(body: EmbeddingRequest, found: TextEmbeddings) -> Response:
    usage = usage_of(found.usage.prompt_tokens)
    answer = TextEmbeddingList(body.entries(found), found.model, usage)
    return Response(msgspec.json.encode(answer), media_type="application/json")
