"""POST /v1/chat/completions."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.request import GenerateRequest
from stoker.server.body import described, read_body
from stoker.server.context import ServerContext
from stoker.server.delivery import collected, streamed
from stoker.server.generation import Caller, Generation
from stoker.server.routes.headers import header_fields
from stoker.server.routes.states import initial_state
from stoker.server.schema.chat import ChatRequest
from stoker.server.schema.fields import state_bytes
from stoker.server.writers.chat import ChatChunks, WholeChat
from stoker.server.writers.head import Head
from stoker.values import ModelInfo


def router(context: ServerContext) -> APIRouter:
    """The chat route, with and without /v1."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    @routes.post("/chat/completions", include_in_schema=False)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, ChatRequest)
        context.require_ready()
        info = context.runtime.resolve(body.model)
        asked = _to_request(context, info, body, request)
        initial = await initial_state(context, request, state_bytes(body.state), info.id)
        asked = msgspec.structs.replace(asked, **initial)
        generation = Generation(context, "chatcmpl", Caller.of(request), [asked])
        head = Head(generation.id, info.id, asked.n, body.wants_usage)
        if body.stream:
            return streamed(generation, ChatChunks(head), context.settings.keepalive_s)
        whole = WholeChat(head, has_logprobs=asked.logprobs is not None)
        return await collected(generation, whole, request)

    return routes


def _to_request(
    context: ServerContext, info: ModelInfo, body: ChatRequest, request: Request
) -> GenerateRequest:
    fields = {
        **body.common(info.n_vocab, request.state.key_digest),
        "max_tokens": body.token_limit(),
        "logprobs": body.num_logprobs(),
        **header_fields(request),
    }
    turns = body.turns(info.id)
    prompt = context.runtime.render_chat(turns, model=info.id, **body.template_args())
    return GenerateRequest(prompt=prompt, model=info.id, is_chat=True, **fields)
