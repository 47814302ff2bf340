"""/v1/runtime/requests: who is live or kept, actions on them by id, their streams again (SPEC I4, L2)."""

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import RequestNotFoundError
from stoker.server.context import ServerContext
from stoker.server.native.requests_body import requests_document
from stoker.server.streaming.attachment import Attachment
from stoker.server.streaming.delivery import streamed
from stoker.server.streaming.generation import Caller

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
        caller = Caller.of(request)
        live = [found for found in context.live.requests() if caller.may_see(found.owner)]
        kept = [found for found in context.runtime.kept() if caller.may_see(found.owner)]
        status = await context.runtime.status()
        return _json({"object": "list", "data": requests_document(live, kept, status)})

    @routes.get("/v1/runtime/requests/{request_id}/stream")
    async def stream(request_id: str, request: Request) -> Response:
        """The whole stream of a kept request from its first token, as its own route streams."""
        attachment = Attachment(context, Caller.of(request), request_id)
        writer, ending = attachment.writer()
        return streamed(attachment, writer, context.settings.keepalive_s, ending)

    @routes.post("/v1/runtime/requests/{request_id}/cancel")
    async def cancel(request_id: str, request: Request) -> Response:
        """End a request; what it has written stands."""
        ended = await _each(context, request, request_id, context.runtime.cancel)
        return _json({"id": request_id, "cancelled": ended})

    @routes.post("/v1/runtime/requests/{request_id}/pause")
    async def pause(request_id: str, request: Request) -> Response:
        """Let a live request stand still; again: the same answer."""
        paused = await _each(context, request, request_id, context.runtime.pause_request)
        return _json({"id": request_id, "paused": paused})

    @routes.post("/v1/runtime/requests/{request_id}/resume")
    async def resume(request_id: str, request: Request) -> Response:
        """Let a paused request go on in its stream; one that is not paused goes on anyway."""
        resumed = await _each(context, request, request_id, context.runtime.resume_request)
        return _json({"id": request_id, "resumed": resumed})

    return routes


async def _each(context: ServerContext, request: Request, name: str, act: Action) -> list[str]:
    """Do it to every runtime request behind `name` that the caller may steer; those that it reached.

    Raises:
        RequestNotFoundError: nothing of that name is live or kept, or it is another key's.
    """
    reached = []
    for runtime_id in _runtime_ids(context, name, Caller.of(request)):
        try:
            await act(runtime_id)
        except RequestNotFoundError:  # one prompt of several has ended by itself
            continue
        reached.append(runtime_id)
    return reached


def _runtime_ids(context: ServerContext, name: str, caller: Caller) -> list[str]:
    named = [found for found in context.runtime.kept() if name in (found.id, *found.names)]
    kept = [found.id for found in named if caller.may_steer(found.owner)]
    found = context.live.runtime_ids(name, caller.may_steer) + kept
    if not found:
        raise RequestNotFoundError(f"no live request has the id {name!r}", param="id")
    return found


def _json(document: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
