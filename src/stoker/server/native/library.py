"""What a program needs to use this server as it uses the library: requests and status in the library's form.

Bodies and events are the structs of `stoker.ipc` as JSON, so nothing of them is lost on the way; their shapes
are `stoker.remote.wire`'s. Embeddings, ranking, choosing, states and models have their routes elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.images.intake import image_reports
from stoker.ipc.events import Failed
from stoker.ipc.request import GenerateRequest, Picture, Sampling, Sound
from stoker.remote import wire
from stoker.server.fields import InlineState, check_tokens, header_fields
from stoker.server.inbound.body import (
    MAX_UNKNOWN,
    VALUES_WITH_TOKENS,
    Body,
    Described,
    Named,
    RequestId,
    TokenIds,
    read_body,
)
from stoker.server.inbound.security import salt_of
from stoker.server.native.requests import Attachment
from stoker.server.native.runtime import model_states_for, status_for
from stoker.server.native.states import initial_state
from stoker.server.openai.chat import prepared_chat
from stoker.server.openai.conversation import ConversationFields
from stoker.server.reply import json_response
from stoker.server.sse import Ending, EventStream
from stoker.server.streaming import GenerationCall
from stoker.tasks.chat import form_of

if TYPE_CHECKING:
    from stoker.errors import ErrorInfo
    from stoker.ipc.model import ModelInfo
    from stoker.server.context import ServerContext
    from stoker.server.inbound.security import Identity
    from stoker.server.streaming import Source

_NAMES = frozenset(GenerateRequest.__struct_fields__) - {"prompt"}


class LibraryRequest(Body):
    """A request in the library's own form.

    Attributes:
        prompt: text or token ids; null where there is a conversation.
        request: further fields of `GenerateRequest`; bytes in base64.
        request_id: unique among live requests; null: one is made up.
        state: what a recurrent model begins from.
        conversation: what the prompt is made of.
    """

    max_values: ClassVar[int] = VALUES_WITH_TOKENS

    prompt: str | TokenIds | None = None
    request: Named[Any] = Field(default_factory=dict)
    request_id: RequestId | None = None
    state: str | InlineState | None = None
    conversation: ConversationFields | None = None

    @property
    def own_id(self) -> str | None:
        """Its id."""
        return self.request_id

    @property
    def own_class(self) -> str | None:
        """The class of the request."""
        asked = self.request.get("priority")
        return asked if isinstance(asked, str) else None

    @property
    def own_models(self) -> list[str | None]:
        """That of the request."""
        asked = self.request.get("model")
        return [asked if isinstance(asked, str) else None]

    def sampling(self, info: ModelInfo) -> Sampling:
        """The sampling that it asks for; the model's own defaults hold where it does not say."""
        given = self.request.get("sampling") or {}
        return msgspec.convert({**(info.sampling_defaults or {}), **given}, Sampling, str_keys=True)

    def to_request(self, key_digest: str) -> GenerateRequest:
        """The request, bound to the caller's key.

        Raises:
            InvalidRequestError: a field is missing, malformed or out of range.
            UnsupportedError: it asks for a state to be delivered, or brings one that nobody has checked.
        """
        if (self.prompt is None) == (self.conversation is None):
            raise InvalidRequestError("either prompt or conversation is needed, not both", param="prompt")
        given = self.request | {"prompt": self.prompt or ""}
        if isinstance(media := given.get("pictures"), list):
            given["pictures"] = [_tagged(one) for one in media]
        try:
            request = msgspec.convert(given, GenerateRequest, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"the request is malformed: {error}", param="request") from None
        if request.initial_state is not None:
            raise UnsupportedError(
                "initial_state is not taken as it is: send it as state", param="initial_state"
            )
        if request.state_output is not None:
            text = "state_output is not delivered over HTTP; embeddings and states have routes of their own"
            raise UnsupportedError(text, param="state_output")
        return msgspec.structs.replace(request, cache_salt=salt_of(key_digest, request.cache_salt))


def _tagged(medium: Any) -> Any:
    """A medium that does not say what it is is a picture, as all were once."""
    return {"type": "picture", **medium} if isinstance(medium, dict) else medium


class LibraryCall(GenerationCall):
    """A generation under the id that its caller gave it, with what is told before its first event."""

    def __init__(
        self,
        context: ServerContext,
        http: Request,
        request: GenerateRequest,
        request_id: str | None,
        head: wire.AnswerHead | None = None,
    ) -> None:
        super().__init__(context, "request-", http, [request])
        if request_id is not None:
            self.id = request_id
            self.runtime_ids = [request_id]
        self.head = head

    @property
    def request(self) -> GenerateRequest:
        """What is generated."""
        return self.requests[0]


def router(context: ServerContext) -> APIRouter:
    """Requests, status and models for programs that use the library's API over HTTP."""
    routes = APIRouter(tags=["runtime"])

    @routes.post(wire.REQUESTS, openapi_extra=Described(LibraryRequest))
    async def generate(request: Request) -> Response:
        """Run a request; its events come as named server-sent events, `finished` or `failed` at the end."""
        return _event_stream(context, call := await _call(context, request), call.head)

    @routes.get(wire.REQUESTS + "/{request_id}/events")
    async def attach(request_id: str, request: Request) -> Response:
        """The events of a kept request from its first token on; leaving ends nothing."""
        attachment = Attachment(context, request.state.identity, request_id)
        return _event_stream(context, attachment, wire.AnswerHead(form_of(attachment.note)))

    @routes.post(wire.COUNT_TOKENS, openapi_extra=Described(LibraryRequest))
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of a request has, its images included; nothing is computed."""
        call = await _call(context, request)
        return json_response({"num_tokens": await context.runtime.count_tokens(call.request)})

    @routes.get(wire.OVERVIEW)
    async def overview(request: Request) -> Response:
        """What is served and whether requests are taken; asks no engine."""
        return json_response(_overview(context, request.state.identity))

    @routes.get(wire.STATUS)
    async def status(request: Request) -> Response:
        """The engine and everything it holds now; of other callers' requests counts and places only."""
        found = await context.runtime.status()
        return json_response(status_for(request.state.identity, found, context.runtime))

    return routes


async def _call(context: ServerContext, request: Request) -> LibraryCall:
    """The call that a body asks for.

    Raises:
        CallerError: the body asks for what cannot be.
        NotReadyError: no model is ready.
    """
    body = await read_body(request, LibraryRequest)
    if unknown := sorted(body.request.keys() - _NAMES):
        request.state.unknown_fields.tell(
            request, (f"request.{name}" for name in unknown[:MAX_UNKNOWN]), _NAMES
        )
    asked = await asyncio.to_thread(body.to_request, request.state.key_digest)
    context.require_ready()
    info = context.runtime.resolve(asked.model)
    changes: dict[str, Any] = {"model": info.asked_as, **header_fields(request)}
    changes["sampling"] = body.sampling(info)
    head = None
    if body.conversation is not None:
        head, planned = await _planned(context, request, body.conversation, asked)
        changes |= planned
    else:
        _check_prompt(context, asked, info)
    if body.state is not None:
        changes |= await initial_state(context, request, body.state, info.id)
    asked = msgspec.structs.replace(asked, **changes)
    return LibraryCall(context, request, asked, body.request_id, head)


async def _planned(
    context: ServerContext, request: Request, conversation: ConversationFields, asked: GenerateRequest
) -> tuple[wire.AnswerHead, dict[str, Any]]:
    """How the answer to a conversation is to be read, and the fields that the conversation adds."""
    plan = await prepared_chat(context, request, conversation, context.runtime.resolve(asked.model))
    taken = await context.runtime.images.take(plan.images) if plan.images else []
    fields = plan.fields({"stop": asked.stop, "constraint": asked.constraint})
    fields |= {"prompt": plan.prompt, "pictures": tuple(one.picture for one in taken)}
    return wire.AnswerHead(plan.form, image_reports(taken)), fields


def _check_prompt(context: ServerContext, asked: GenerateRequest, info: ModelInfo) -> None:
    """Raises InvalidRequestError where the vocabulary or the bounds on images do not allow it."""
    if not isinstance(asked.prompt, str):
        check_tokens(asked.prompt, info.n_vocab, "prompt")
    limits = context.runtime.images.limits
    pictures = [one for one in asked.pictures if isinstance(one, Picture)]
    if len(pictures) > limits.max_images:
        text = f"there are {len(pictures)} pictures, at most {limits.max_images} are taken"
        raise InvalidRequestError(text, param="pictures")
    context.runtime.images.check_sounds([one for one in asked.pictures if isinstance(one, Sound)])
    if any(max(one.width, one.height) > limits.edge_px for one in pictures):
        text = (
            f"a picture has an edge of more than {limits.edge_px} pixels; as part of a message it is shrunk"
        )
        raise InvalidRequestError(text, param="pictures")


def _overview(context: ServerContext, caller: Identity) -> wire.Overview:
    runtime = context.runtime
    models = runtime.models
    if not caller.is_operator:
        models = [_without_paths(info) for info in models]
    return wire.Overview(
        is_ready=runtime.is_ready and not context.is_stopping,
        is_suspended=runtime.is_suspended,
        health=runtime.health(),
        models=models,
        states=model_states_for(caller, runtime),
        prefixes=runtime.handover.held() if caller.is_operator else b"",
        refusal=caller.refusal,
    )


def _without_paths(info: ModelInfo) -> ModelInfo:
    adapters = tuple(msgspec.structs.replace(adapter, path="") for adapter in info.adapters)
    return msgspec.structs.replace(info, path="", adapters=adapters)


# ------------------------------------------------------------ events


def _failed(info: ErrorInfo) -> bytes:
    return wire.encoded_event(Failed("", info))


_ENDING = Ending(done=b"", fail=_failed)


def _event_stream(context: ServerContext, source: Source, head: wire.AnswerHead | None) -> EventStream:
    """The events of `source` as they are, behind `head`."""
    beat_s = min(context.settings.keepalive_s, wire.BEAT_S)
    return EventStream(_frames(source, head), {}, beat_s, ending=_ENDING)


async def _frames(source: Source, head: wire.AnswerHead | None) -> AsyncGenerator[bytes, None]:
    """The head comes with the first event: until then the request may be refused with a status."""
    opening = b"" if head is None else wire.encoded_event(head)
    async with aclosing(source.events()) as events:
        async for _, event in events:
            yield opening + wire.encoded_event(event)
            opening = b""
