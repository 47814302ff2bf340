"""POST /v1/messages: Anthropic's Messages API over the same core as chat completions, and its token count."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.server.anthropic.body import CountTokensRequest, MessagesRequest
from stoker.server.anthropic.writer import PING, MessageChunks, MessageHead, WholeMessage
from stoker.server.context import ServerContext
from stoker.server.inbound.body import described, read_body
from stoker.server.openai.chat import prompt_tokens, translated_turn
from stoker.server.streaming.delivery import collected, streamed
from stoker.server.streaming.sse import Ending


def router(context: ServerContext) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/messages", openapi_extra=described(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, MessagesRequest)
        turn = await translated_turn(context, request, body, "msg_")
        head = MessageHead(turn.id, turn.request.model, request.state.request_id, turn.request.priority)
        is_stream = body.stream
        del body  # its pictures are megabytes, and it may wait for long
        if not is_stream:
            return turn.tell(await collected(turn.source, WholeMessage(head, turn.form), request))
        writer = MessageChunks(head, turn.form)
        ending = Ending(b"", writer.fail, PING)
        return turn.tell(streamed(turn.source, writer, context.settings.keepalive_s, ending))

    @routes.post("/v1/messages/count_tokens", openapi_extra=described(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """The tokens that the prompt of a message has, pictures and tools included; nothing is generated."""
        body = await read_body(request, CountTokensRequest)
        num_tokens = await prompt_tokens(context, request, body)
        return Response(msgspec.json.encode({"input_tokens": num_tokens}), media_type="application/json")

    return routes
