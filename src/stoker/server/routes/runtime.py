"""GET /v1/runtime and the actions on live requests (SPEC I4)."""

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
from fastapi import APIRouter
from starlette.responses import Response

from stoker.errors import RequestNotFoundError
from stoker.messages import EngineStatus, ModelInfo, WaitStatus
from stoker.server.context import ServerContext

if TYPE_CHECKING:
    from stoker.runtime import RuntimeStatus


def router(context: ServerContext) -> APIRouter:
    """What the engine holds, and how to end a request by id."""
    routes = APIRouter(tags=["runtime"])

    @routes.get("/v1/runtime")
    async def runtime() -> Response:
        """Engine, slots, queue, models and memory."""
        status = await context.runtime.status()
        return _json(_document(status, context.runtime.models))

    @routes.post("/v1/runtime/requests/{request_id}/cancel")
    async def cancel(request_id: str) -> Response:
        """End a live request, known by its `X-Request-Id`, its answer's id or the runtime's."""
        ended = []
        for runtime_id in context.live.runtime_ids(request_id):
            with contextlib.suppress(RequestNotFoundError):  # one prompt of several has ended by itself
                await context.runtime.cancel(runtime_id)
                ended.append(runtime_id)
        return _json({"id": request_id, "cancelled": ended})

    return routes


def _json(document: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _document(status: "RuntimeStatus", models: list[ModelInfo]) -> dict[str, Any]:
    engine = status.engine
    return {
        "engine": {
            "pid": status.pid,
            "state": status.state,
            "restarts": status.restarts,
            "label": status.label,
            "threads": status.threads,
        },
        "slots": [
            {
                "id": slot.id,
                "state": slot.state,
                "request_id": slot.request_id,
                "model": slot.model,
                "num_tokens": slot.num_tokens,
            }
            for slot in engine.slots
        ],
        "queue": [_waiting(waiting) for waiting in engine.queue],
        "parked": [_waiting(waiting) for waiting in engine.parked],
        "models": [{"id": info.id, "state": "ready", "bytes": info.memory_bytes} for info in models],
        "memory": _memory(status),
        "cache": _cache(engine),
        "counters": engine.counters,
    }


def _waiting(waiting: WaitStatus) -> dict[str, Any]:
    return {
        "request_id": waiting.request_id,
        "class": waiting.priority,
        "position": waiting.position,
        "eta_s": waiting.eta_s,
        "num_tokens": waiting.num_tokens,
    }


def _memory(status: "RuntimeStatus") -> dict[str, int | None]:
    """Bytes: what both processes hold, and what the machine could still give."""
    footprint = 0
    for pid in {psutil.Process().pid, status.pid} - {None, 0}:
        try:
            footprint += psutil.Process(pid).memory_info().rss
        except psutil.Error:  # the engine died between the two questions
            continue
    machine = psutil.virtual_memory()
    return {"limit": machine.total, "footprint": footprint, "available": machine.available}


def _cache(engine: EngineStatus) -> dict[str, Any]:
    return {"live": {"cells_used": engine.kv_cells_used, "cells_total": engine.kv_cells_total}}
