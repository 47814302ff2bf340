"""POST /v1/chat/completions, and what the other APIs share with it: a checked body to a request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.ipc.model import ModelInfo
from stoker.ipc.request import GenerateRequest
from stoker.server.fields import tier_of
from stoker.server.headers import (
    IGNORED_HEADER,
    IMAGES_HEADER,
    header_fields,
    ignored_header,
    images_header,
)
from stoker.server.inbound.body import described, read_body, validated
from stoker.server.inbound.origin_rules import OriginRules
from stoker.server.native.states import initial_state
from stoker.server.openai.chat_body import ChatRequest, ConversationFields
from stoker.server.openai.chat_writer import ChatChunks, WholeChat
from stoker.server.streaming.delivery import TranslatedSource, collected, streamed
from stoker.server.streaming.generation import Caller, GenerationCall
from stoker.server.streaming.head import Head

if TYPE_CHECKING:
    from stoker.chat.answer import AnswerForm
    from stoker.chat.conversation import ToolOffer
    from stoker.chat.tools.tools import LeftOut
    from stoker.images import ImageReport
    from stoker.server.context import ServerContext
    from stoker.server.inbound.origin_rules import Translation
    from stoker.server.streaming.delivery import Source
    from stoker.tasks.chat import ChatPlan


def router(context: ServerContext) -> APIRouter:
    """The chat route."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, ChatRequest)
        body.check_last_turns()
        turn = await chat_turn(context, request, body, "chatcmpl-")
        asked = turn.request
        head = Head(
            turn.id,
            asked.model,
            asked.n,
            body.wants_usage,
            tier_of(asked.priority),
            has_functions=body.has_functions,
            images=turn.images,
        )
        is_stream = body.stream
        del body  # its pictures are megabytes, and it may wait for long
        if is_stream:
            chunks = ChatChunks(head, turn.form)
            return turn.tell(streamed(turn.source, chunks, context.settings.keepalive_s))
        whole = WholeChat(head, turn.form, has_logprobs=asked.logprobs is not None)
        return turn.tell(await collected(turn.source, whole, request))

    return routes


@dataclass(frozen=True)
class ChatTurn:
    """A conversation on its way.

    Attributes:
        id: the answer's.
        request: what is generated.
        source: where its events come from.
        form: how the text is to be read.
        images: what became of pictures.
        left_out: tools that the model was not told of.
        origins: where the places of the chat completion stand in the caller's body.
    """

    id: str
    request: GenerateRequest
    source: Source
    form: AnswerForm
    images: tuple[ImageReport, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    origins: OriginRules = field(default_factory=lambda: OriginRules({}))

    def tell(self, answer: Response) -> Response:
        """The answer with headers that say what became of the pictures and which tools were ignored."""
        if self.images:
            answer.headers[IMAGES_HEADER] = images_header(self.images)
        if self.left_out:
            answer.headers[IGNORED_HEADER] = ignored_header(self.left_out)
        return answer


async def chat_turn(context: ServerContext, request: Request, body: ChatRequest, prefix: str) -> ChatTurn:
    """Everything between a checked body and its first event; `prefix` begins the answer's id.

    Raises:
        CallerError: the body asks for what cannot be.
        NotReadyError: no model is ready.
    """
    context.require_ready()
    info = context.runtime.resolve(body.model)
    common = await asyncio.to_thread(body.common, info.n_vocab, request.state.key_digest)
    fields = {
        **common,
        "max_tokens": body.token_limit(),
        "logprobs": body.num_logprobs(),
        **header_fields(request),
    }
    plan = await prepared_chat(context, request, body, info)
    asked = GenerateRequest(prompt=plan.prompt, model=info.asked_as, **plan.fields(fields))
    taken = await context.runtime.images.take(plan.images) if plan.images else []
    initial = await initial_state(context, request, body.state, info.id)
    asked = msgspec.structs.replace(asked, **initial, pictures=tuple(one.picture for one in taken))
    reports = tuple(one.report for one in taken)
    generation = GenerationCall(context, prefix, Caller.of(request), [asked])
    return ChatTurn(generation.id, asked, generation, plan.form, reports, plan.left_out)


class Translated(Protocol):
    """The body of another API."""

    def to_chat(self) -> Translation:
        """The chat completion that asks for the same."""
        ...


async def translated_turn(
    context: ServerContext, request: Request, body: Translated, prefix: str
) -> ChatTurn:
    """The turn of a chat completion that another API asks for; its errors name that API's own places.

    Nothing that grows with the body is done on the event loop.

    Raises:
        CallerError: the body asks for what cannot be.
        NotReadyError: no model is ready.
    """
    asked = await asyncio.to_thread(body.to_chat)
    origins = asked.origins
    with origins.named():
        chat = await asyncio.to_thread(validated, ChatRequest, asked.body)
        del asked  # its pictures are megabytes
        turn = await chat_turn(context, request, chat, prefix)
    left_out = tuple(replace(one, where=origins.of(one.where)) for one in turn.left_out)
    source = TranslatedSource(turn.source, origins)
    return replace(turn, source=source, left_out=left_out, origins=origins)


async def prompt_tokens(context: ServerContext, request: Request, body: Translated) -> int:
    """How many tokens the prompt has of a chat completion that another API asks for.

    Raises:
        CallerError: the body asks for what cannot be.
        NotReadyError: no model is ready.
    """
    turn = await translated_turn(context, request, body, "count-")
    with turn.origins.named():
        return await context.runtime.count_tokens(turn.request)


async def prepared_chat(
    context: ServerContext, request: Request, body: ConversationFields, info: ModelInfo
) -> ChatPlan:
    """What a conversation asks of a model. Nothing that grows with the body is done on the event loop.

    Raises:
        StokerError: the conversation is malformed, or the template refuses it or does not end.
    """

    def told() -> tuple[list[dict[str, Any]], ToolOffer, dict[str, Any]]:
        return body.turns(info.id), body.offer(), body.template_args()

    turns, offer, args = await asyncio.to_thread(told)
    how = {"model": info.id, "template_args": args, "owner": request.state.key_digest}
    return await context.runtime.prepare_chat(turns, offer, **how)
