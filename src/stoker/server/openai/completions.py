"""POST /v1/completions."""

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.ipc.request import GenerateRequest
from stoker.server.context import ServerContext
from stoker.server.fields import tier_of
from stoker.server.headers import header_fields
from stoker.server.inbound.body import described, read_body
from stoker.server.native.states import initial_state
from stoker.server.openai.completion_body import CompletionRequest
from stoker.server.openai.completion_writer import TextChunks, WholeText
from stoker.server.streaming.delivery import collected, streamed
from stoker.server.streaming.generation import Caller, GenerationCall
from stoker.server.streaming.head import Head


def router(context: ServerContext) -> APIRouter:
    """The completions route."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        body = await read_body(request, CompletionRequest)
        context.require_ready()
        info = context.runtime.resolve(body.model)
        shared = await asyncio.to_thread(body.to_shared, info.n_vocab, request.state.key_digest)
        shared |= header_fields(request) | await initial_state(context, request, body.state, info.id)
        prompts = await asyncio.to_thread(body.prompts, info.n_vocab)
        asked = [GenerateRequest(prompt=prompt, model=info.asked_as, **shared) for prompt in prompts]
        generation = GenerationCall(context, "cmpl-", Caller.of(request), asked)
        tier = tier_of(asked[0].priority)
        head = Head(generation.id, info.asked_as, asked[0].n, body.wants_usage, tier)
        if body.stream:
            return streamed(generation, TextChunks(head, len(asked)), context.settings.keepalive_s)
        return await collected(generation, WholeText(head, len(asked)), request)

    return routes
