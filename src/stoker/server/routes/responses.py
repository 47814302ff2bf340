"""POST /v1/responses: OpenAI's Responses API over the same core as chat completions."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.server.body import described, read_body
from stoker.server.context import ServerContext
from stoker.server.delivery import collected, streamed
from stoker.server.routes.chat import chat_body, chat_turn
from stoker.server.schema.responses import ResponsesRequest
from stoker.server.sse import Ending
from stoker.server.writers.responses import ResponseChunks, ResponseHead, WholeResponse


def router(context: ServerContext) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/responses", openapi_extra=described(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer an input."""
        body = await read_body(request, ResponsesRequest)
        turn = await chat_turn(context, request, chat_body(body.to_chat()), "resp")
        head = ResponseHead(turn.generation.id, turn.request.model, int(time.time()), body.echo())
        is_stream = body.stream
        del body  # its pictures are megabytes, and it may wait for long
        if not is_stream:
            return turn.tell(await collected(turn.generation, WholeResponse(head, turn.form), request))
        writer = ResponseChunks(head, turn.form)
        return turn.tell(
            streamed(turn.generation, writer, context.settings.keepalive_s, Ending(b"", writer.fail))
        )

    return routes
