"""/v1/choose (SPEC I5): which of some texts is the likeliest after a prompt.

What a score is, is `stoker.tasks.choose`'s.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.request import MAX_SALT_CHARS, Priority
from stoker.server.fields import keep_alive_seconds
from stoker.server.headers import header_fields
from stoker.server.inbound.body import (
    VALUES_WITH_TOKENS,
    Body,
    Many,
    Name,
    Named,
    TokenIds,
    described,
    read_body,
)
from stoker.server.inbound.disconnect import while_connected
from stoker.server.inbound.security import salt_of
from stoker.server.native.states import EmbeddingUsage, json_later
from stoker.server.openai.conversation import Message, turns_of
from stoker.tasks.choose import Choosing, require_choosing

if TYPE_CHECKING:
    from stoker.ipc.model import ModelInfo
    from stoker.server.context import ServerContext
    from stoker.tasks.choose import Choices


class ChooseRequest(Body):
    """A prompt or a conversation, and texts of which one is to follow it."""

    max_values: ClassVar[int] = VALUES_WITH_TOKENS

    model: Name | None = None
    prompt: str | TokenIds | None = None
    messages: Many[Message] | None = Field(None, min_length=1)
    choices: Many[str]
    calibrate: bool = False
    chat_template_kwargs: Named[Any] | None = None
    cache: bool | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_CHARS)
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    timeout_s: float | None = None
    keep_alive: float | str | None = None

    def check(self) -> None:
        """Raise InvalidRequestError where there is not one of prompt and messages."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("either prompt or messages is needed, not both", param="prompt")

    def turns(self, model: str) -> list[dict[str, Any]]:
        """The messages as the template gets them.

        Raises:
            InvalidRequestError, UnsupportedError: naming the message.
        """
        messages = self.messages or []
        return turns_of(messages, model)

    def fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of `Choosing.choose`, but for prompt, choices and model."""
        given = {
            "calibrate": self.calibrate,
            "cache": self.cache,
            "cache_salt": salt_of(key_digest, self.cache_salt or ""),
            "priority": Priority.BACKGROUND if self.service_tier == "flex" else None,
            "timeout_s": self.timeout_s,
            "keep_alive_s": keep_alive_seconds(self.keep_alive),
        }
        return {name: value for name, value in given.items() if value is not None}


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
    usage: EmbeddingUsage
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
    num_tokens = found.usage.prompt_tokens
    return ChooseAnswer(found.model, items, EmbeddingUsage(num_tokens, num_tokens))


def router(context: ServerContext) -> APIRouter:
    """The route of choosing."""
    routes = APIRouter(tags=["choose"])
    choose = _ChooseRoute(context)
    routes.post("/v1/choose", openapi_extra=described(ChooseRequest))(choose.choose)
    return routes


class _ChooseRoute:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._choosing = Choosing(context.runtime)

    async def choose(self, request: Request) -> Response:
        """The choices, the likeliest first; `score` is in nats a token, the lower the better."""
        body = await read_body(request, ChooseRequest)
        body.check()
        self._context.require_ready()
        info = self._context.runtime.resolve(body.model)
        require_choosing(info)
        fields = {
            **body.fields(request.state.key_digest),
            **header_fields(request),
            **await self._prompt(body, request, info),
            "model": info.asked_as,
        }
        work = self._choosing.choose(choices=body.choices, **fields)
        found = await while_connected(work, request.receive)
        return await json_later(answer_of(found))

    async def _prompt(self, body: ChooseRequest, request: Request, info: ModelInfo) -> dict[str, Any]:
        if body.prompt is not None:
            return {"prompt": body.prompt}
        args = body.chat_template_kwargs or {}
        how = {"model": info.id, "template_args": args, "owner": request.state.key_digest}
        turns = await asyncio.to_thread(body.turns, info.id)
        plan = await self._context.runtime.prepare_chat(turns, **how)
        if plan.images:
            where = plan.images[0].param
            raise UnsupportedError(f"{where}: choices are scored after text, not after pictures", param=where)
        return {"prompt": plan.prompt, "is_chat": True}
