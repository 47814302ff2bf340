"""/v1/embeddings (SPEC K2, I6): vectors of texts, or with `"kind": "state"` the states that prompts leave.

What embedding is, is `stoker.tasks.embed`'s; states are `native.states`'.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import UnsupportedError
from stoker.ipc.status import CallKind
from stoker.server.fields import Int, header_fields, present
from stoker.server.inbound.body import Described, read_body
from stoker.server.native.states import StateEmbeddingRequest, embedded_by_state
from stoker.server.reply import InputUsage, json_response, large_json_response
from stoker.server.streaming import in_one_call
from stoker.tasks.embed import embed_texts, require_embedding
from stoker.tasks.fields import keep_alive_seconds

if TYPE_CHECKING:
    from stoker.server.context import ServerContext
    from stoker.tasks.embed import TextEmbeddings


MAX_TEXTS = 2048
"""As many as OpenAI takes."""
_KINDS = (None, "embedding", "state")


class EmbeddingRequest(StateEmbeddingRequest):
    """Texts to embed; with `"kind": "state"` prompts to embed by the state they leave."""

    dimensions: Int | None = None
    normalize: bool | None = None
    keep_alive: float | str | None = None

    @property
    def is_by_state(self) -> bool:
        """Whether the state after each prompt is wanted. Raises UnsupportedError for an unknown kind."""
        if self.kind not in _KINDS:
            raise UnsupportedError(
                f"embeddings of the kind {(self.kind or '')[:40]!r} are not served;"
                ' "embedding" and "state" are',
                param="kind",
            )
        return self.kind == "state"

    def refuse_text_fields(self) -> None:
        """Raise UnsupportedError for what is done with vectors of texts and not with states."""
        for name in ("dimensions", "normalize"):
            if getattr(self, name) is not None:
                raise UnsupportedError(f'{name} is for vectors of texts, not for "kind": "state"', param=name)

    def fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of the request, but for the texts and what is done with their vectors."""
        return super().fields(key_digest) | present(keep_alive_s=keep_alive_seconds(self.keep_alive))

    def text_fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of `Runtime.embed`, but for the texts.

        Raises:
            UnsupportedError: a text is to begin from a state.
        """
        if self.state is not None:
            raise UnsupportedError('a text begins from no state; "kind": "state" takes one', param="state")
        is_normal = True if self.normalize is None else self.normalize
        return {**self.fields(key_digest), "normalize": is_normal, "dimensions": self.dimensions}

    def texts(self, n_vocab: int) -> list[str | tuple[int, ...]]:
        """Every text: as it is, or as token ids of a vocabulary of `n_vocab`. Raises InvalidRequestError."""
        return self.inputs(n_vocab, MAX_TEXTS)


class EmbeddingEntry(msgspec.Struct, frozen=True):
    """One entry of a list of embeddings; `shape` is that of a state."""

    index: int
    embedding: list[float] | str
    shape: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    """A list of embeddings."""

    data: list[EmbeddingEntry]
    model: str
    usage: InputUsage
    object: str = "list"


FEW_VECTORS = 4
"""So many are written in less time than a thread takes to be asked for it."""


def router(context: ServerContext) -> APIRouter:
    """The route of embeddings."""
    routes = APIRouter(tags=["embeddings"])

    @routes.post("/v1/embeddings", openapi_extra=Described(EmbeddingRequest))
    async def embed(request: Request) -> Response:
        """One vector a text, in the order of the texts: each of length 1 unless `normalize` is false.

        They come as numbers or as base64, little-endian float32; `dimensions` keeps the first so many.
        """
        body = await read_body(request, EmbeddingRequest)
        if body.is_by_state:
            return await _by_state(context, request, body)
        context.require_ready()
        info = context.runtime.resolve(body.model)
        require_embedding(info)
        fields = body.text_fields(request.state.key_digest) | header_fields(request)
        texts = body.texts(info.n_vocab)
        work = partial(embed_texts, context.runtime, texts, model=info.id, **fields)
        found = await in_one_call(request, CallKind.EMBED, work)
        if len(found.vectors) <= FEW_VECTORS:
            return _written(body, found)
        return await asyncio.to_thread(_written, body, found)

    return routes


async def _by_state(context: ServerContext, request: Request, body: EmbeddingRequest) -> Response:
    body.refuse_text_fields()
    found = await embedded_by_state(context, request, body)
    entries = [
        EmbeddingEntry(index, await asyncio.to_thread(body.encoded, embedding), embedding.shape)
        for index, embedding in enumerate(found)
    ]
    num_tokens = sum(embedding.usage.prompt_tokens for embedding in found)
    return await large_json_response(
        EmbeddingList(entries, found[0].model, InputUsage(num_tokens, num_tokens))
    )


def _written(body: EmbeddingRequest, found: TextEmbeddings) -> Response:
    entries = [EmbeddingEntry(index, body.written(data)) for index, data in enumerate(found.vectors)]
    return json_response(EmbeddingList(entries, found.model, InputUsage.of(found.usage)))
