"""/v1/choose (SPEC I5): which of some texts is the likeliest after a prompt.

What a score is, is `stoker.tasks.choose`'s.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.status import CallKind
from stoker.server.fields import RequestFields, header_fields, present
from stoker.server.inbound.body import VALUES_WITH_TOKENS, Described, Many, Named, TokenIds, read_body
from stoker.server.openai.conversation import Message, laid_out, turns_of
from stoker.server.reply import InputUsage, large_json_response
from stoker.server.streaming import in_one_call
from stoker.tasks.choose import require_choosing, score_choices
from stoker.tasks.fields import keep_alive_seconds

if TYPE_CHECKING:
    from stoker.ipc.model import ModelInfo
    from stoker.server.context import ServerContext
    from stoker.tasks.choose import Choices


class ChooseRequest(RequestFields):
    """A prompt or a conversation, and texts of which one is to follow it."""

    max_values: ClassVar[int] = VALUES_WITH_TOKENS

    prompt: str | TokenIds | None = None
    messages: Many[Message] | None = Field(None, min_length=1)
    choices: Many[str]
    calibrate: bool = False
    chat_template_kwargs: Named[Any] | None = None
    cache: bool | None = None
    keep_alive: float | str | None = None

    def check(self) -> None:
        """Raise InvalidRequestError where there is not one of prompt and messages."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("either prompt or messages is needed, not both", param="prompt")

    def fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of `Runtime.choose`, but for prompt, choices and model."""
        given = present(cache=self.cache, keep_alive_s=keep_alive_seconds(self.keep_alive))
        return super().fields(key_digest) | given | {"calibrate": self.calibrate}


class ChosenItem(msgspec.Struct, frozen=True):
    """One choice's place; `score` is null for an empty one, which no number of JSON can rank."""

    index: int
    rank: int
    choice: str
    score: float | None
    probability: float


class ChooseAnswer(msgspec.Struct, frozen=True):
    """The choices, the best first."""

    model: str
    data: list[ChosenItem]
    usage: InputUsage
    object: str = "list"


def answer_of(found: Choices) -> ChooseAnswer:
    """The answer's body."""
    items = [
        ChosenItem(
            each.index,
            each.rank,
            each.choice,
            None if math.isinf(each.score) else each.score,
            each.probability,
        )
        for each in found.results
    ]
    return ChooseAnswer(found.model, items, InputUsage.of(found.usage))


def router(context: ServerContext) -> APIRouter:
    """The route of choosing."""
    routes = APIRouter(tags=["choose"])

    @routes.post("/v1/choose", openapi_extra=Described(ChooseRequest))
    async def choose(request: Request) -> Response:
        """The choices, the likeliest first; `score` is in nats a token, the lower the better."""
        body = await read_body(request, ChooseRequest)
        body.check()
        context.require_ready()
        info = context.runtime.resolve(body.model)
        require_choosing(info)
        fields = {
            **body.fields(request.state.key_digest),
            **header_fields(request),
            **await _prompt(context, body, request, info),
            "model": info.asked_as,
        }
        work = partial(score_choices, context.runtime, choices=body.choices, **fields)
        found = await in_one_call(request, CallKind.CHOOSE, work)
        return await large_json_response(answer_of(found))

    return routes


async def _prompt(
    context: ServerContext, body: ChooseRequest, request: Request, info: ModelInfo
) -> dict[str, Any]:
    """The keyword arguments that the prompt or the conversation is."""
    if body.prompt is not None:
        return {"prompt": body.prompt}
    args = body.chat_template_kwargs or {}
    how = {"model": info.id, "template_args": args, "owner": request.state.key_digest}
    turns = await asyncio.to_thread(turns_of, body.messages or [], info.id)
    plan = await laid_out(context, request, turns, **how)
    if plan.images:
        where = plan.images[0].param
        raise UnsupportedError(f"{where}: choices are scored after text, not after pictures", param=where)
    return {"prompt": plan.prompt, "is_chat": True}
