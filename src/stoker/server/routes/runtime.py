"""GET /v1/runtime and the actions on live requests (SPEC I4, Q17)."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from stoker.errors import RequestNotFoundError
from stoker.server.context import ServerContext
from stoker.server.schema.status import status_document

Action = Callable[[str], Awaitable[None]]


def router(context: ServerContext) -> APIRouter:
    """What the engine holds; end, pause and resume a request by id.

    A request is known by its `X-Request-Id`, its answer's id or the runtime's. Each action answers with the
    runtime's ids that it reached.
    """
    routes = APIRouter(tags=["runtime"])

    @routes.get("/v1/runtime")
    async def runtime() -> Response:
        """Engine, slots, queue, parked and paused requests, models and memory."""
        status = await context.runtime.status()
        return _json(status_document(status, context.runtime.models))

    @routes.post("/v1/runtime/requests/{request_id}/cancel")
    async def cancel(request_id: str) -> Response:
        """End a live request; what it has written stands."""
        ended = await _each(context, request_id, context.runtime.cancel)
        return _json({"id": request_id, "cancelled": ended})

    @routes.post("/v1/runtime/requests/{request_id}/pause")
    async def pause(request_id: str) -> Response:
        """Let a live request stand still; again: the same answer."""
        paused = await _each(context, request_id, context.runtime.pause_request)
        return _json({"id": request_id, "paused": paused})

    @routes.post("/v1/runtime/requests/{request_id}/resume")
    async def resume(request_id: str) -> Response:
        """Let a paused request go on in its stream; one that is not paused goes on anyway."""
        resumed = await _each(context, request_id, context.runtime.resume_request)
        return _json({"id": request_id, "resumed": resumed})

    return routes


async def _each(context: ServerContext, name: str, act: Action) -> list[str]:
    """Do it to every runtime request behind `name`; those that it reached.

    Raises:
        RequestNotFoundError: nothing of that name is live.
    """
    reached = []
    for runtime_id in context.live.runtime_ids(name):
        try:
            await act(runtime_id)
        except RequestNotFoundError:  # one prompt of several has ended by itself
            continue
        reached.append(runtime_id)
    return reached


def _json(document: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
