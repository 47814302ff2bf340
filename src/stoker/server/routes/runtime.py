"""GET /v1/runtime and /v1/runtime/events: how the engine is, and what happens in it (SPEC I4, O3)."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from stoker.server.context import ServerContext
from stoker.server.schema.status import status_document
from stoker.server.sse import EventStream, frame


def router(context: ServerContext) -> APIRouter:
    """What the engine holds, now or as it changes; neither wakes anything (SPEC S6)."""
    routes = APIRouter(tags=["runtime"])

    @routes.get("/v1/runtime")
    async def runtime() -> Response:
        """Engine, slots, queue, parked and paused requests, models, memory and heat."""
        status = await context.runtime.status()
        document = status_document(status, context.runtime.model_states())
        return Response(msgspec.json.encode(document), media_type="application/json")

    @routes.get("/v1/runtime/events")
    async def events() -> Response:
        """What happens from now on, as server-sent events; the first is a snapshot."""
        return EventStream(_frames(context), {}, context.settings.keepalive_s)

    return routes


async def _frames(context: ServerContext) -> AsyncGenerator[bytes, None]:
    """`{"event": name, "at": seconds since the epoch, ...}`, one a frame."""
    async with aclosing(context.runtime.events()) as events:
        async for event in events:
            yield frame(msgspec.json.encode({"event": event.event, "at": event.at, **event.fields}))
