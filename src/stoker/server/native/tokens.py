"""POST /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from fastapi import APIRouter
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from stoker.server.context import ServerContext
from stoker.server.fields import check_tokens
from stoker.server.inbound.body import VALUES_WITH_TOKENS, Body, Described, Name, TokenIds, read_body
from stoker.server.openai.chat import prepared_chat
from stoker.server.openai.conversation import ConversationFields
from stoker.server.reply import json_response


class TokenizeRequest(Body):
    """Text to turn into token ids; as with llama-server no special tokens are added unless asked for."""

    content: str = Field(validation_alias=AliasChoices("content", "prompt", "text"))
    model: Name | None = None
    add_special: bool = Field(
        default=False, validation_alias=AliasChoices("add_special", "add_special_tokens")
    )
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    max_values: ClassVar[int] = VALUES_WITH_TOKENS

    tokens: TokenIds
    model: Name | None = None


class TemplateRequest(ConversationFields):
    """A conversation to lay out; `with_plan` tells how the answer is to be constrained and read as well."""

    with_plan: bool = False


def router(context: ServerContext) -> APIRouter:
    """Text, tokens and templates of the served models."""
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokenize", openapi_extra=Described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, with their pieces on request."""
        body = await read_body(request, TokenizeRequest)
        context.require_ready()
        info = context.runtime.resolve(body.model)
        tokens, pieces = await context.runtime.tokenize(
            body.content, model=info.id, add_special=body.add_special, parse_special=body.parse_special
        )
        return await asyncio.to_thread(_tokens, tokens, pieces if body.with_pieces else None)

    @routes.post("/detokenize", openapi_extra=Described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(request, DetokenizeRequest)
        context.require_ready()
        info = context.runtime.resolve(body.model)
        if body.tokens:
            check_tokens(body.tokens, info.n_vocab, "tokens")
        return json_response({"content": await context.runtime.detokenize(body.tokens, model=info.id)})

    @routes.post("/apply-template", openapi_extra=Described(TemplateRequest))
    async def apply_template(request: Request) -> Response:
        """The prompt that a conversation becomes."""
        body = await read_body(request, TemplateRequest)
        context.require_ready()
        info = context.runtime.resolve(body.model)
        plan = await prepared_chat(context, request, body, info)
        return json_response({"prompt": plan.prompt} | ({"plan": plan.layout} if body.with_plan else {}))

    return routes


def _tokens(tokens: Sequence[int], pieces: Sequence[bytes] | None) -> Response:
    """The ids, each with its piece where there are some."""
    if pieces is None:
        return json_response({"tokens": tokens})
    pairs = zip(tokens, pieces, strict=True)
    return json_response({"tokens": [{"id": token, "piece": _piece(piece)} for token, piece in pairs]})


def _piece(piece: bytes) -> str | list[int]:
    """The piece as text, or its bytes where they are no text of their own."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
