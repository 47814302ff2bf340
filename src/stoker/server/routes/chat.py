"""POST /v1/chat/completions, and what the other APIs share with it: a checked body to a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from stoker.chat.conversation import prepared_turn
from stoker.constraint import Constraint, ConstraintKind
from stoker.errors import InvalidRequestError
from stoker.request import GenerateRequest
from stoker.server.body import described, read_body
from stoker.server.delivery import collected, streamed
from stoker.server.errors import invalid_body
from stoker.server.generation import Caller, Generation
from stoker.server.routes.headers import header_fields
from stoker.server.routes.states import initial_state
from stoker.server.schema.chat import ChatRequest
from stoker.server.schema.fields import state_bytes
from stoker.server.writers.chat import ChatChunks, WholeChat
from stoker.server.writers.head import Head
from stoker.values import ModelInfo

if TYPE_CHECKING:
    from stoker.chat.answer import AnswerForm
    from stoker.chat.conversation import PreparedTurn
    from stoker.server.context import ServerContext


def router(context: ServerContext) -> APIRouter:
    """The chat route, with and without /v1."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    @routes.post("/chat/completions", include_in_schema=False)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, ChatRequest)
        turn = await chat_turn(context, request, body, "chatcmpl")
        asked = turn.request
        head = Head(turn.generation.id, asked.model, asked.n, body.wants_usage)
        if body.stream:
            return streamed(turn.generation, ChatChunks(head, turn.form), context.settings.keepalive_s)
        whole = WholeChat(head, turn.form, has_logprobs=asked.logprobs is not None)
        return await collected(turn.generation, whole, request)

    return routes


@dataclass(frozen=True)
class ChatTurn:
    """A conversation on its way: what is generated, and how the text is to be read."""

    request: GenerateRequest
    generation: Generation
    form: AnswerForm


def chat_body(given: dict[str, Any]) -> ChatRequest:
    """The chat completion that another API asks for. Raises InvalidRequestError."""
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise invalid_body(error) from None


async def chat_turn(context: ServerContext, request: Request, body: ChatRequest, prefix: str) -> ChatTurn:
    """Everything between a checked body and its first event; `prefix` begins the answer's id.

    Raises:
        CallerError: the body asks for what cannot be.
        NotReadyError: no model is ready.
    """
    context.require_ready()
    info = context.runtime.resolve(body.model)
    asked, form = _to_request(context, info, body, request)
    initial = await initial_state(context, request, state_bytes(body.state), info.id)
    asked = msgspec.structs.replace(asked, **initial)
    return ChatTurn(asked, Generation(context, prefix, Caller.of(request), [asked]), form)


def _to_request(
    context: ServerContext, info: ModelInfo, body: ChatRequest, request: Request
) -> tuple[GenerateRequest, AnswerForm]:
    fields = {
        **body.common(info.n_vocab, request.state.key_digest),
        "max_tokens": body.token_limit(),
        "logprobs": body.num_logprobs(),
        **header_fields(request),
    }
    turn = prepared_turn(body.turns(info.id), info.chat_template, body.offer())
    args = body.template_args() | ({"tools": turn.tools} if turn.tools else {})
    prompt = context.runtime.render_chat(turn.messages, model=info.id, **args) + turn.prefill
    form = turn.form(prompt)
    fields["stop"], fields["spelled"] = (*fields["stop"], *turn.stops), turn.control_tokens
    fields["constraint"] = _constraint(fields.get("constraint"), turn, form)
    return GenerateRequest(prompt=prompt, model=info.id, is_chat=True, **fields), form


def _constraint(asked: Constraint | None, turn: PreparedTurn, form: AnswerForm) -> Constraint | None:
    """What the answer has to match, behind its reasoning: what was asked for, or a call that is forced.

    Raises:
        InvalidRequestError: both.
    """
    if turn.constraint is not None:
        if asked is not None:
            text = f"tool_choice forces a call: {asked.param} cannot be asked for with it"
            raise InvalidRequestError(text, param="tool_choice")
        kind, source = turn.constraint
        asked = Constraint(kind=ConstraintKind(kind), source=source)
    if asked is None or form.tags is None:
        return asked
    opener = "" if form.is_reasoning else form.tags.opener
    return msgspec.structs.replace(asked, reasoning_start=opener, reasoning_end=form.tags.closer)
