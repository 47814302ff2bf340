"""/v1/rerank (SPEC K4): documents in the order of what they have to say to a query.

Body and answer are those of Jina, Cohere and llama-server. What scoring is, is `stoker.tasks.rerank`'s.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError
from stoker.ipc.status import CallKind
from stoker.server.fields import Int, RequestFields, header_fields, present
from stoker.server.inbound.body import Body, Described, Many, read_body
from stoker.server.reply import InputUsage, large_json_response
from stoker.server.streaming import in_one_call
from stoker.tasks.fields import keep_alive_seconds
from stoker.tasks.rerank import rank_documents

if TYPE_CHECKING:
    from stoker.server.context import ServerContext
    from stoker.tasks.rerank import Ranking

MAX_DOCUMENTS = 2048
"""As many as texts to embed."""


class DocumentField(Body):
    """A document that is written as an object."""

    text: str


class RerankRequest(RequestFields):
    """A query and the documents to be put in order for it."""

    query: str
    documents: Many[str | DocumentField] = Field(min_length=1)
    top_n: Int | None = None
    output: Int | None = None
    return_documents: bool | None = None
    keep_alive: float | str | None = None

    def texts(self) -> list[str]:
        """Every document. Raises InvalidRequestError where there are too many."""
        if len(self.documents) > MAX_DOCUMENTS:
            raise InvalidRequestError(
                f"{len(self.documents)} documents; 1 to {MAX_DOCUMENTS} are taken", param="documents"
            )
        return [given if isinstance(given, str) else given.text for given in self.documents]

    def fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of `Runtime.rerank`, but for query, documents and model."""
        seconds = keep_alive_seconds(self.keep_alive)
        given = present(top_n=self.top_n, output=self.output, keep_alive_s=seconds)
        return super().fields(key_digest) | given

    def answer(self, found: Ranking) -> RerankAnswer:
        """The ranking, with the documents where they are wanted."""
        texts = self.texts() if self.return_documents else None
        results = [
            RerankResult(each.index, each.score, DocumentText(texts[each.index]) if texts else msgspec.UNSET)
            for each in found.results
        ]
        return RerankAnswer(found.model, results, InputUsage.of(found.usage))


class DocumentText(msgspec.Struct, frozen=True):
    """A document as it was given."""

    text: str


class RerankResult(msgspec.Struct, frozen=True):
    """One document's place; `relevance_score` is the model's own number, no probability."""

    index: int
    relevance_score: float
    document: DocumentText | msgspec.UnsetType = msgspec.UNSET


class RerankAnswer(msgspec.Struct, frozen=True):
    """The documents, the best first."""

    model: str
    results: list[RerankResult]
    usage: InputUsage
    object: str = "list"


def router(context: ServerContext) -> APIRouter:
    """The route of reranking."""
    routes = APIRouter(tags=["rerank"])

    @routes.post("/v1/rerank", openapi_extra=Described(RerankRequest))
    async def rerank(request: Request) -> Response:
        """The documents, the best first; `relevance_score` is what the model gives, the higher the better."""
        body = await read_body(request, RerankRequest)
        texts = body.texts()
        context.require_ready()
        fields = {
            **body.fields(request.state.key_digest),
            **header_fields(request),
            "model": "default" if body.model is None else body.model,
        }
        work = partial(rank_documents, context.runtime, body.query, texts, **fields)
        found = await in_one_call(request, CallKind.RERANK, work)
        return await large_json_response(body.answer(found))

    return routes
