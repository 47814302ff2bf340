"""/v1/runtime/requests (SPEC I4, L2): live and kept requests, actions on them by id, their streams again."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.client.requests.load_rows import LOAD_ID
from stoker.errors import RequestNotFoundError, TextNotKeptError
from stoker.ipc.status import GroupStatus, SlotStatus, WaitStatus
from stoker.server.anthropic.writer import MessageChunks, MessageHead
from stoker.server.context import ServerContext
from stoker.server.inbound.security import Identity
from stoker.server.native.runtime import group_progress
from stoker.server.openai.answers import Head
from stoker.server.openai.chat import ChatChunks
from stoker.server.openai.completions import TextChunks
from stoker.server.openai.responses.body import default_echo
from stoker.server.openai.responses.writer import ResponseChunks, ResponseEvents, ResponseHead
from stoker.server.reply import json_response
from stoker.server.streaming import kind_of, merged, streamed
from stoker.tasks.chat import form_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from stoker.client.requests.stream import StreamEvent
    from stoker.client.requests.texts import RequestText
    from stoker.client.store.file import KeptRequest
    from stoker.ipc.status import EngineStatus, RuntimeStatus
    from stoker.server.streaming import ChunkWriter


HELD = "held"  # it has not reached an engine, or there is none


def requests_document(
    live: Sequence[KeptRequest | GroupStatus], kept: Sequence[KeptRequest], status: RuntimeStatus
) -> list[dict[str, object]]:
    """One entry a request or call; the live ones first, as they came."""
    places = _places(status.engine)
    groups = {group.id: group for group in status.groups}  # which have their places
    entries = [
        _group(groups.get(one.id, one))
        if isinstance(one, GroupStatus)
        else _request(one, *places.get(one.id, (HELD, None)))
        for one in live
    ]
    return entries + [_request(one, one.state, None) | {"is_kept": True} for one in kept]


def _request(request: KeptRequest, state: str, place: SlotStatus | WaitStatus | None) -> dict[str, object]:
    waiting = place if isinstance(place, WaitStatus) else None
    return {
        "id": request.id,
        "names": request.names,
        "kind": kind_of(request),
        "priority": request.priority,
        "class": request.priority,  # its name until the next version
        "model": request.model,
        "state": state,
        "position": waiting.position if waiting else None,
        "eta_s": waiting.eta_s if waiting else None,
        "num_tokens": place.num_tokens if place else request.num_tokens,
        "is_kept": False,
    }


def text_document(found: RequestText) -> dict[str, Any]:
    """The texts of a request, `prompt` null where it was given as token ids."""
    return {
        "id": found.request_id,
        "is_ended": found.is_ended,
        "prompt": msgspec.to_builtins(found.prompt),
        "choices": msgspec.to_builtins(found.choices),
    }


def _group(group: GroupStatus) -> dict[str, object]:
    return {"id": group.id, "names": group.names, **group_progress(group), "is_kept": False}


def _places(engine: EngineStatus) -> dict[str, tuple[str, SlotStatus | WaitStatus]]:
    """State and place of each request that the engine has; of several choices the busiest counts."""
    places: dict[str, tuple[str, SlotStatus | WaitStatus]] = {}
    for state, waiting in (("queued", engine.queue), ("parked", engine.parked), ("paused", engine.paused)):
        places |= {found.request_id: (state, found) for found in waiting}
    return places | {slot.request_id: (slot.state, slot) for slot in engine.slots if slot.request_id}


class Attachment:
    """The kept requests behind one name: one, or the prompts of one completion, in order.

    Args:
        context: of the server.
        caller: requests of its API key are found; an operator finds all.
        name: the client's `X-Request-Id`, the answer's id or the runtime's.

    Raises:
        RequestNotFoundError: nothing of that name is kept for this caller.
    """

    def __init__(self, context: ServerContext, caller: Identity, name: str) -> None:
        self._context = context
        found = [
            kept
            for kept in context.runtime.kept()
            if caller.may_steer(kept.owner) and name in (kept.id, *kept.names)
        ]
        if not found:
            raise RequestNotFoundError(f"no request is kept under the id {name!r}", param="id")
        # One X-Request-Id may have been sent with several requests: the last answer is meant.
        answer = found[-1].names[-1] if found[-1].names else found[-1].id
        same = [kept for kept in found if (kept.names[-1] if kept.names else kept.id) == answer]
        self._kept = sorted(same, key=lambda kept: (len(kept.id), kept.id))  # ...-2 before ...-10
        self._answer_id = answer

    def __repr__(self) -> str:
        return f"Attachment({self._answer_id}, {len(self._kept)} prompts)"

    @property
    def is_ready(self) -> bool:
        """It was taken in before; there is nothing to wait for."""
        return True

    @property
    def note(self) -> bytes:
        """How its answer is to be read, as the request has it."""
        return self._kept[0].note

    def writer(self) -> ChunkWriter:
        """Writes chunks as the request's own route does, with usage at the end.

        Which route that was is told by the answer's id. What a response repeats of its request is not kept;
        its object shows the defaults.
        """
        first, own = self._kept[0], self._answer_id
        form = form_of(first.note)
        if first.is_chat and own.startswith("resp_"):
            head = ResponseHead(own, first.model, int(time.time()), default_echo())
            return ResponseChunks(ResponseEvents(head, form))
        if first.is_chat and own.startswith("msg_"):
            return MessageChunks(MessageHead(own, first.model), form)
        chat = Head(own, first.model, first.n, wants_usage=True)
        return ChatChunks(chat, form) if first.is_chat else TextChunks(chat, len(self._kept))

    async def events(self) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """(index of the prompt, event) as they come; leaving ends nothing.

        Raises:
            StokerError: what ended one of the requests.
        """
        streams = [self._one(index) for index in range(len(self._kept))]
        async with aclosing(merged(streams)) as events:
            async for event in events:
                yield event

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        kept = self._kept[index]
        stream = self._context.runtime.attach(kept.id, owner=kept.owner)
        async with aclosing(stream) as events:
            async for event in events:
                yield index, event


Action = Callable[[str], Awaitable[None]]


def router(context: ServerContext) -> APIRouter:
    """List requests; end, pause and resume one by id; read a kept one's stream.

    A request is known by its `X-Request-Id`, its answer's id or the runtime's. Each action answers with the
    runtime's ids that it reached.
    """
    routes = APIRouter(tags=["runtime"])

    @routes.get("/v1/runtime/requests")
    async def requests(request: Request) -> Response:
        """The caller's requests, an operator's all: those with a client, and those kept without one."""
        caller: Identity = request.state.identity
        live = [found for found in context.runtime.with_client() if caller.may_see(found.owner)]
        kept = [found for found in context.runtime.kept() if caller.may_see(found.owner)]
        document = requests_document(live, kept, await context.runtime.status())
        return json_response({"object": "list", "data": document})

    @routes.get("/v1/runtime/requests/{request_id}/stream")
    async def stream(request_id: str, request: Request) -> Response:
        """The whole stream of a kept request from its first token, as its own route streams."""
        attachment = Attachment(context, request.state.identity, request_id)
        return streamed(attachment, attachment.writer(), context.settings.keepalive_s)

    @routes.get("/v1/runtime/requests/{request_id}/text")
    async def text(request_id: str, request: Request) -> Response:
        """What a request reads and has written, where the server shows texts (`--request-texts`).

        Of longer texts the end, with the number of characters before it. Of requests of the caller's key, for
        an operator of all: live ones, and the last 64 that ended.
        """
        answer = json_response(text_document(_text_of(context, request_id, request.state.identity)))
        answer.headers["Cache-Control"] = "no-store"
        return answer

    @routes.post("/v1/runtime/requests/{request_id}/cancel")
    async def cancel(request_id: str, request: Request) -> Response:
        """End a request; what it has written stands. A call without a text answers 499, request_cancelled.

        `load:MODEL` stops the load or download of a model, for operators.
        """
        if request_id.startswith(LOAD_ID):
            request.state.identity.require_operator()
            await context.runtime.unload_model(_loading(context, request_id))
            return json_response({"id": request_id, "cancelled": [request_id]})
        ended = await _each(context, request, request_id, context.runtime.cancel)
        return json_response({"id": request_id, "cancelled": ended})

    @routes.post("/v1/runtime/requests/{request_id}/pause")
    async def pause(request_id: str, request: Request) -> Response:
        """Let a live request stand still; again: the same answer."""
        paused = await _each(context, request, request_id, context.runtime.pause_request)
        return json_response({"id": request_id, "paused": paused})

    @routes.post("/v1/runtime/requests/{request_id}/resume")
    async def resume(request_id: str, request: Request) -> Response:
        """Let a paused request go on in its stream; one that is not paused goes on anyway."""
        resumed = await _each(context, request, request_id, context.runtime.resume_request)
        return json_response({"id": request_id, "resumed": resumed})

    return routes


def _text_of(context: ServerContext, request_id: str, caller: Identity) -> RequestText:
    """What a request reads and has written.

    Raises:
        TextsOffError: the server shows no texts.
        RequestNotFoundError: no request has that id, or it is another key's.
        TextNotKeptError: there is no text of it.
    """
    found: RequestText = context.runtime.request_text(request_id)
    if not caller.may_see(found.owner):
        raise RequestNotFoundError(f"no request is known under the id {request_id!r}", param="id")
    if not found.is_kept:
        raise TextNotKeptError(f"of request {request_id!r} no text is kept")
    return found


async def _each(context: ServerContext, request: Request, name: str, act: Action) -> list[str]:
    """Do it to every runtime request behind `name` that the caller may steer; those that it reached.

    Raises:
        RequestNotFoundError: nothing of that name is live or kept, or it is another key's.
    """
    reached = []
    for runtime_id in _runtime_ids(context, name, request.state.identity):
        try:
            await act(runtime_id)
        except RequestNotFoundError:  # one prompt of several has ended by itself
            continue
        reached.append(runtime_id)
    return reached


def _loading(context: ServerContext, request_id: str) -> str:
    """The model of a load that is under way. Raises RequestNotFoundError: there is no such load."""
    model = request_id.removeprefix(LOAD_ID)
    known = {one.id for one in context.runtime.model_states() if one.state in {"loading", "downloading"}}
    if model not in known:
        raise RequestNotFoundError(f"no load has the id {request_id!r}", param="id")
    return model


def _runtime_ids(context: ServerContext, name: str, caller: Identity) -> list[str]:
    known = [*context.runtime.with_client(), *context.runtime.kept()]
    named = [found for found in known if name in (found.id, *found.names)]
    found = [one.id for one in named if caller.may_steer(one.owner)]
    if not found:
        raise RequestNotFoundError(f"no live request has the id {name!r}", param="id")
    return found
