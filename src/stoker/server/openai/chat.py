"""POST /v1/chat/completions: the route, the answer, and the APIs that are other spellings of it.

Reasoning, content and tool calls are told apart by `stoker.tasks.chat`; here they get their places in
OpenAI's shape.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from stoker.chat.answer import AnswerForm, WholeAnswer
from stoker.chat.answer_events import CallArguments, CallBegan, Reasoning
from stoker.images.intake import image_reports
from stoker.ipc.events import Delta, Finished, PrefillProgress
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.server.errors import OriginRules
from stoker.server.fields import header_fields, names_progress, tier_of
from stoker.server.inbound.body import Described, beside, read_body, validated
from stoker.server.native.states import initial_state
from stoker.server.openai.answers import (
    Call,
    CallPiece,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    Envelope,
    Function,
    FunctionPiece,
    Head,
    TextFrame,
    chat_logprobs,
)
from stoker.server.openai.conversation import ChatRequest, ConversationFields, laid_out
from stoker.server.reply import IGNORED_HEADER, IMAGES_HEADER, ignored_header, images_header
from stoker.server.sse import Ending
from stoker.server.streaming import GenerationCall, collected, streamed
from stoker.tasks.chat import PLAIN, ChoiceReaders

if TYPE_CHECKING:
    from stoker.chat.answer_events import AnswerEvent
    from stoker.chat.conversation import ToolOffer
    from stoker.chat.tools.tools import LeftOut
    from stoker.client.requests.stream import StreamEvent
    from stoker.images import ImageReport
    from stoker.ipc.usage import TokenLogprob
    from stoker.server.context import ServerContext
    from stoker.tasks.chat import ChatPlan

_ROLE = ChatDelta(role="assistant", content="")
_NOTHING = ChatDelta()
_EMPTY = ChatDelta(content="")


class ChatChunks:
    """A chat completion as chunks; the first of each choice names the role."""

    ending = Ending()

    def __init__(self, head: Head, form: AnswerForm = PLAIN) -> None:
        self._head = head
        self._readers = ChoiceReaders(form, head.id)
        self._envelope = Envelope(head, "chat.completion.chunk")
        self._is_plain = form == PLAIN
        self._frames: dict[int, TextFrame | None] = {}  # of those that have begun; None: text is read

    def write(self, _prompt: int, event: StreamEvent) -> bytes:
        """Frames of one event; empty if it shows nothing."""
        if isinstance(event, Delta):
            frame = self._frames.get(event.index)
            if frame and event.text and event.logprobs is None and event.finish_reason is None:
                return frame.of(event.text)
            return self._delta(event)
        if isinstance(event, Finished):
            self._envelope.add(event)
        elif isinstance(event, PrefillProgress):
            return self._envelope.progress(event, [ChatChunkChoice(0, _NOTHING)])
        return b""

    def end(self) -> bytes:
        """Frames after the last event."""
        return self._envelope.closing([ChatChunkChoice(0, _NOTHING)])

    def _delta(self, event: Delta) -> bytes:
        chunk, opening = self._envelope.chunk, b""
        if event.index not in self._frames:
            empty = ChatChunkChoice(event.index, _EMPTY)
            self._frames[event.index] = (
                self._envelope.text_frame(empty, "content") if self._is_plain else None
            )
            opening = chunk(ChatChunkChoice(event.index, _ROLE))
        found = [_delta_of(piece, self._head) for piece in self._readers.read(event)]
        deltas = [delta for delta in found if delta is not _NOTHING]
        if event.logprobs and not deltas:
            deltas = [_EMPTY]
        frames = [chunk(ChatChunkChoice(event.index, delta)) for delta in deltas[:-1]]
        if deltas:
            logprobs = chat_logprobs(event.logprobs) if event.logprobs else None
            frames.append(chunk(ChatChunkChoice(event.index, deltas[-1], logprobs)))
        if reason := self._readers.finish_reason(event):  # clients expect it in a chunk without text
            shown = _reason(reason, self._head)
            frames.append(chunk(ChatChunkChoice(event.index, _NOTHING, None, shown)))
        return b"".join([opening, *frames])


class WholeChat:
    """A chat completion as one answer."""

    def __init__(self, head: Head, form: AnswerForm = PLAIN, *, has_logprobs: bool) -> None:
        self._head = head
        self._readers = ChoiceReaders(form, head.id)
        self._has_logprobs = has_logprobs
        self._envelope = Envelope(head, "chat.completion")
        self._answers = [WholeAnswer() for _ in range(head.n)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(head.n)]
        self._reasons = ["length"] * head.n

    def add(self, _prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        if isinstance(event, Delta):
            self._answers[event.index].add(self._readers.read(event))
            self._logprobs[event.index].extend(event.logprobs or ())
            if reason := self._readers.finish_reason(event):
                self._reasons[event.index] = _reason(reason, self._head)
        elif isinstance(event, Finished):
            self._envelope.add(event)

    def whole(self) -> bytes:
        """The answer's body."""
        choices = [
            ChatChoice(
                index,
                _message_of(self._answers[index], self._head),
                self._reasons[index],
                chat_logprobs(self._logprobs[index]) if self._has_logprobs else None,
            )
            for index in range(self._head.n)
        ]
        return self._envelope.whole(choices)


def _reason(reason: FinishReason, head: Head) -> str:
    is_call = reason is FinishReason.TOOL_CALLS and head.has_functions
    return "function_call" if is_call else reason


def _delta_of(event: AnswerEvent, head: Head) -> ChatDelta:
    """What a piece of the answer adds; an end of a call adds nothing."""
    match event:
        case str(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case CallBegan(index, own_id, name):
            return _call_delta(CallPiece(index, FunctionPiece("", name), own_id, "function"), head)
        case CallArguments(index, fragment):
            return _call_delta(CallPiece(index, FunctionPiece(fragment)), head)
    return _NOTHING


def _call_delta(piece: CallPiece, head: Head) -> ChatDelta:
    if not head.has_functions:
        return ChatDelta(tool_calls=[piece])
    return _NOTHING if piece.index else ChatDelta(function_call=piece.function)  # the old form has one call


def _message_of(answer: WholeAnswer, head: Head) -> ChatMessage:
    calls = [Call(call.id, Function(call.name, call.arguments)) for call in answer.calls]
    return ChatMessage(
        None if calls and not answer.content else answer.content,
        reasoning_content=answer.reasoning or UNSET,
        tool_calls=UNSET if head.has_functions else calls or UNSET,
        function_call=calls[0].function if calls and head.has_functions else UNSET,
    )


_ORIGINS = OriginRules({"prompt": "messages"})
"""The engine's errors are of a prompt; a conversation has messages."""


def router(context: ServerContext) -> APIRouter:
    """The chat route."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/chat/completions", openapi_extra=Described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, ChatRequest)
        body.check_last_turns()
        turn = await chat_turn(context, request, body, "chatcmpl-", _ORIGINS)
        asked = turn.request
        head = Head(
            turn.call.id,
            asked.model,
            asked.n,
            body.wants_usage,
            tier_of(asked.priority),
            has_functions=body.has_functions,
            images=turn.images,
            names_progress=names_progress(request),
        )
        is_stream = body.stream
        del body  # its images are megabytes, and it may wait for long
        if is_stream:
            chunks = ChatChunks(head, turn.form)
            return turn.tell(streamed(turn.call, chunks, context.settings.keepalive_s))
        whole = WholeChat(head, turn.form, has_logprobs=asked.logprobs is not None)
        return turn.tell(await collected(turn.call, whole, request))

    return routes


@dataclass(frozen=True)
class ChatTurn:
    """A conversation on its way.

    Attributes:
        call: its work.
        form: how the text is to be read.
        images: what became of images.
        left_out: tools that the model was not told of.
    """

    call: GenerationCall
    form: AnswerForm
    images: tuple[ImageReport, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def request(self) -> GenerateRequest:
        """What is generated."""
        return self.call.requests[0]

    def tell(self, answer: Response) -> Response:
        """The answer with headers that say what became of the images and which tools were ignored."""
        if self.images:
            answer.headers[IMAGES_HEADER] = images_header(self.images)
        if self.left_out:
            answer.headers[IGNORED_HEADER] = ignored_header(self.left_out)
        return answer


async def chat_turn(
    context: ServerContext,
    request: Request,
    body: ChatRequest,
    prefix: str,
    origins: OriginRules | None = None,
) -> ChatTurn:
    """Everything between a checked body and its first event.

    Args:
        context: of the server.
        request: the HTTP request.
        body: of the chat completion.
        prefix: begins the answer's id.
        origins: where its places stand in the caller's body; None: it is the caller's.

    Raises:
        CallerError: the body asks for what cannot be.
        NotReadyError: no model is ready.
    """
    context.require_ready()
    info = context.runtime.resolve(body.model)
    common = await beside(request, partial(body.common, info, request.state.key_digest))
    fields = {
        **common,
        "max_tokens": body.token_limit(),
        "logprobs": body.num_logprobs(),
        **header_fields(request),
    }
    plan = await prepared_chat(context, request, body, info)
    asked = GenerateRequest(prompt=plan.prompt, model=info.asked_as, **plan.fields(fields))
    taken = await context.runtime.images.take(plan.images) if plan.images else []
    if body.state is not None:
        asked = msgspec.structs.replace(asked, **await initial_state(context, request, body.state, info.id))
    if taken:
        asked = msgspec.structs.replace(asked, pictures=tuple(one.picture for one in taken))
    left_out = plan.left_out
    if origins is not None:
        left_out = tuple(replace(one, where=origins.of(one.where)) for one in left_out)
    call = GenerationCall(context, prefix, request, [asked], origins)
    return ChatTurn(call, plan.form, image_reports(taken) if taken else (), left_out)


async def prepared_chat(
    context: ServerContext, request: Request, body: ConversationFields, info: ModelInfo
) -> ChatPlan:
    """What a conversation asks of a model. Nothing that grows with the body is done on the event loop.

    Raises:
        StokerError: the conversation is malformed, or the template refuses it or does not end.
    """

    def told() -> tuple[list[dict[str, Any]], ToolOffer, dict[str, Any]]:
        return body.turns(info.id), body.offer(), body.template_args()

    turns, offer, args = await beside(request, told)
    how = {"model": info.id, "template_args": args, "owner": request.state.key_digest}
    return await laid_out(context, request, turns, offer=offer, **how)


# ------------------------------------------------------------ other spellings


@dataclass(frozen=True)
class Translation:
    """The body of a chat completion as JSON values, and where its places stand in the body it was made of."""

    body: dict[str, Any]
    origins: OriginRules


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
        del asked  # its images are megabytes
        return await chat_turn(context, request, chat, prefix, origins)


async def prompt_tokens(context: ServerContext, request: Request, body: Translated) -> int:
    """How many tokens the prompt has of a chat completion that another API asks for.

    Raises:
        CallerError: the body asks for what cannot be.
        NotReadyError: no model is ready.
    """
    turn = await translated_turn(context, request, body, "count-")
    assert turn.call.origins is not None
    with turn.call.origins.named():
        return await context.runtime.count_tokens(turn.request)
