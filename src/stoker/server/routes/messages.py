"""POST /v1/messages: Anthropic's Messages API over the same core as chat completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.server.body import described, read_body
from stoker.server.context import ServerContext
from stoker.server.delivery import collected, streamed
from stoker.server.routes.chat import chat_body, chat_turn
from stoker.server.schema.messages import MessagesRequest
from stoker.server.sse import Ending
from stoker.server.writers.messages import MessageChunks, MessageHead, WholeMessage


def router(context: ServerContext) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/messages", openapi_extra=described(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, MessagesRequest)
        turn = await chat_turn(context, request, chat_body(body.to_chat()), "msg")
        head = MessageHead(turn.generation.id, turn.request.model)
        is_stream = body.stream
        del body  # its pictures are megabytes, and it may wait for long
        if not is_stream:
            return turn.tell(await collected(turn.generation, WholeMessage(head, turn.form), request))
        writer = MessageChunks(head, turn.form)
        return turn.tell(
            streamed(turn.generation, writer, context.settings.keepalive_s, Ending(b"", writer.fail))
        )

    return routes
