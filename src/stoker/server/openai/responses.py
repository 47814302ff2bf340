"""POST /v1/responses: OpenAI's Responses API over the same core as chat completions, and its token count."""

from __future__ import annotations

import asyncio
import time

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.server.context import ServerContext
from stoker.server.headers import ignored_header
from stoker.server.inbound.body import described, read_body
from stoker.server.openai.chat import prompt_tokens, translated_turn
from stoker.server.openai.responses_body import InputTokensRequest, ResponsesRequest
from stoker.server.openai.responses_writer import ResponseChunks, ResponseHead, WholeResponse
from stoker.server.streaming.delivery import collected, streamed
from stoker.server.streaming.sse import Ending


def router(context: ServerContext) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/responses", openapi_extra=described(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer an input."""
        body = await read_body(request, ResponsesRequest)
        turn = await translated_turn(context, request, body, "resp_")
        echo = await asyncio.to_thread(body.echo, turn.request, ignored_header(turn.left_out))
        head = ResponseHead(turn.id, turn.request.model, int(time.time()), echo, body.namespaces())
        is_stream = body.stream
        del body  # its pictures are megabytes, and it may wait for long
        if not is_stream:
            return turn.tell(await collected(turn.source, WholeResponse(head, turn.form), request))
        writer = ResponseChunks(head, turn.form)
        ending = Ending(b"", writer.fail)
        return turn.tell(streamed(turn.source, writer, context.settings.keepalive_s, ending))

    @routes.post("/v1/responses/input_tokens", openapi_extra=described(InputTokensRequest))
    async def input_tokens(request: Request) -> Response:
        """The tokens that the prompt of a response has, pictures and tools included; nothing is generated."""
        body = await read_body(request, InputTokensRequest)
        num_tokens = await prompt_tokens(context, request, body)
        document = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return Response(msgspec.json.encode(document), media_type="application/json")

    return routes
