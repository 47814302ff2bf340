"""GET /v1/runtime and /v1/runtime/events: how the engine is, and what happens in it (SPEC I4, O3)."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.server.context import ServerContext
from stoker.server.native.status_body import status_document
from stoker.server.redaction import redact_status, redacted_event
from stoker.server.streaming.generation import Caller
from stoker.server.streaming.sse import EventStream, frame


def router(context: ServerContext) -> APIRouter:
    """What the engine holds, now or as it changes; neither wakes anything (SPEC S6)."""
    routes = APIRouter(tags=["runtime"])

    @routes.get("/v1/runtime")
    async def runtime(request: Request) -> Response:
        """Engine, slots, queue, parked and paused requests, models, memory and heat.

        A caller who is no operator sees counts and places of all requests, but ids, lengths and stories only
        of the requests of its own key.
        """
        caller = Caller.of(request)
        status = await context.runtime.status()
        document = status_document(status, context.runtime.model_states())
        if not caller.is_operator:
            owner_of = context.runtime.owner_of
            redact_status(document, lambda request_id: caller.may_see(owner_of(request_id)))
        return Response(msgspec.json.encode(document), media_type="application/json")

    @routes.get("/v1/runtime/events")
    async def events(request: Request) -> Response:
        """What happens from now on, as server-sent events; the first is a snapshot.

        A caller who is no operator gets events of the requests of its own key only.
        """
        return EventStream(_frames(context, Caller.of(request)), {}, context.settings.keepalive_s)

    return routes


async def _frames(context: ServerContext, caller: Caller) -> AsyncGenerator[bytes, None]:
    """`{"event": name, "at": seconds since the epoch, ...}`, one a frame."""
    async with aclosing(context.runtime.events()) as events:
        async for each in events:
            event = each if caller.is_operator else redacted_event(each, caller.may_see)
            if event is None:
                continue
            yield frame(msgspec.json.encode({"event": event.event, "at": event.at, **event.fields}))
