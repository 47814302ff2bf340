"""GET /v1/runtime and its events, /health, /ready and /metrics (SPEC I4, O3): how the engine is.

None of them wakes anything (SPEC S6). While no engine can be asked, models are shown as they were last heard
of and memory as it is measured here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import StokerError
from stoker.ipc.usage import Usage
from stoker.server.context import ServerContext, models_now
from stoker.server.inbound.security import Identity
from stoker.server.reply import json_response
from stoker.server.sse import EventStream, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.client.event_bus import RuntimeEvent
    from stoker.ipc.status import EngineHealth, EngineStatus, GroupStatus, ModelStatus, SlotStatus, WaitStatus
    from stoker.runtime import RuntimeStatus


_SHOWN_AS = {"priority": "class", "is_pinned": "pinned"}


def status_document(status: RuntimeStatus, known: Sequence[ModelStatus]) -> dict[str, Any]:
    """Engine, slots, requests that do not run, groups, models, memory and heat."""
    engine = status.engine
    return {
        "engine": {
            "pid": status.pid,
            "restarts": status.restarts,
            "label": status.label,
            "threads": status.threads,
            "threads_reason": engine.threads_reason,
            "devices": engine.devices,
            **engine_document(status.health),
        },
        "slots": [_shown(slot) for slot in engine.slots],
        "queue": [_shown(waiting) for waiting in engine.queue],
        "parked": [_shown(waiting) for waiting in engine.parked],
        "paused": [_shown(waiting) for waiting in engine.paused],
        "groups": [{"request_id": group.id, **group_progress(group)} for group in status.groups],
        "models": [_shown(model) for model in models_now(status, known)],
        "memory": _memory(status),
        "heat": engine.memory.heat,
        "cache": _cache(engine),
        "counters": engine.counters,
    }


def engine_document(health: EngineHealth) -> dict[str, Any]:
    """Where the engine is, for how long, and if it is away: why, and when the next start is."""
    document: dict[str, Any] = {"state": health.state, "for_s": round(health.for_s, 3)}
    if health.num_failed_starts:
        document["failed_starts"] = health.num_failed_starts
    if health.next_start_s is not None:
        document["next_start_s"] = round(health.next_start_s, 3)
    if health.reason:
        document["reason"] = health.reason
    return document


def _shown(status: SlotStatus | WaitStatus | ModelStatus) -> dict[str, Any]:
    """Its fields, some under the names that bodies have for them."""
    given = msgspec.structs.asdict(status)
    return {_SHOWN_AS.get(name, name): value for name, value in given.items()}


def group_progress(group: GroupStatus) -> dict[str, Any]:
    """How far a call of several requests is; each of them may have a slot or a place in the queue besides."""
    return {
        "kind": group.kind,
        "class": group.priority,
        "model": group.model,
        "state": group.state,
        "position": group.position,
        "eta_s": group.eta_s,
        "deadline_s": group.deadline_s,
        "age_s": group.age_s,
        "num_members": group.num_members,
        "num_done": group.num_done,
        "num_tokens": group.usage.prompt_tokens,
    }


def _memory(status: RuntimeStatus) -> dict[str, Any]:
    """Bytes and pressure as the engine measured them last; what can be measured here while there is none."""
    memory = status.engine.memory
    if not memory.limit:
        return {**_measured(status.pid), "tier": None, "pressure": None, "rungs": [], "lines": {}}
    return {
        "limit": memory.limit,
        "footprint": memory.footprint,
        "available": memory.available,
        "tier": memory.tier,
        "pressure": memory.pressure or None,
        "pressure_fraction": memory.pressure_fraction,
        "pressure_source": memory.pressure_source,
        "rungs": memory.rungs,
        "lines": memory.lines,
    }


def _measured(engine_pid: int) -> dict[str, int]:
    """What both processes hold, and what the machine could still give."""
    footprint = 0
    for pid in {psutil.Process().pid, engine_pid} - {0}:
        try:
            footprint += psutil.Process(pid).memory_info().rss
        except psutil.Error:  # the engine died between the two questions
            continue
    machine = psutil.virtual_memory()
    return {"limit": machine.total, "footprint": footprint, "available": machine.available}


def _cache(engine: EngineStatus) -> dict[str, Any]:
    """Tier by tier; bytes and how many stored prefixes (SPEC C14)."""
    cache = engine.cache
    return {
        "entries": cache.num_entries,
        "unsaved": cache.num_unsaved,
        "live": {"cells_used": engine.kv_cells_used, "cells_total": engine.kv_cells_total},
        "ram": {"bytes": cache.ram_bytes, "limit": cache.ram_limit_bytes, "entries": cache.num_ram},
        "disk": {
            "bytes": cache.disk_bytes,
            "limit": cache.disk_limit_bytes,
            "entries": cache.num_disk,
            "problem": cache.disk_problem,
        },
    }


_WITHHELD = "told to operators only"
_BLANK: dict[str, Any] = {
    "request_id": None,
    "num_tokens": 0,
    "story": [],
    "num_members": 0,
    "num_done": 0,
    "deadline_s": None,
}
"""What is shown of another caller's request or call."""


def redact_status(document: dict[str, Any], may_see: Callable[[str], bool]) -> None:
    """Blank what belongs to other callers in a document of GET /v1/runtime; changes the document.

    Args:
        document: from `status_document`.
        may_see: whether the request of that runtime id is shown.
    """
    for name in ("slots", "queue", "parked", "paused", "groups"):
        for entry in document[name]:
            if entry["request_id"] is None or not may_see(entry["request_id"]):
                entry.update({name: value for name, value in _BLANK.items() if name in entry})
    for model in document["models"]:
        model["reason"] = ""  # may name files and requests
    document["cache"]["disk"]["problem"] = ""


def redacted_status(status: RuntimeStatus, may_see: Callable[[str], bool]) -> RuntimeStatus:
    """The same of the status as it is: an id that is not shown is empty, or None in a slot.

    Args:
        status: of the runtime.
        may_see: as in `redact_status`.
    """
    replace = msgspec.structs.replace
    engine, cache = status.engine, status.engine.cache

    def waiting(entries: Sequence[WaitStatus]) -> list[WaitStatus]:
        return [
            one if may_see(one.request_id) else replace(one, request_id="", num_tokens=0, story=[])
            for one in entries
        ]

    slots = [
        one
        if one.request_id is not None and may_see(one.request_id)
        else replace(one, request_id=None, num_tokens=0, story=[])
        for one in engine.slots
    ]
    groups = [
        one
        if may_see(one.id)
        else replace(
            one, id="", names=(), owner="", num_members=0, num_done=0, deadline_s=None, usage=Usage()
        )
        for one in status.groups
    ]
    shown = replace(
        engine,
        slots=slots,
        queue=waiting(engine.queue),
        parked=waiting(engine.parked),
        paused=waiting(engine.paused),
        models=[replace(model, reason="") for model in engine.models],
        cache=replace(cache, disk_problem=""),
    )
    return replace(status, engine=shown, groups=groups)


def redacted_event(event: RuntimeEvent, may_see: Callable[[str], bool]) -> RuntimeEvent | None:
    """The event without reasons; None: it is about another caller's request and is not shown.

    Args:
        event: of the runtime.
        may_see: whether requests of that owner are shown.
    """
    if event.event == "request":
        return event if may_see(event.owner) else None
    fields = {name: value for name, value in event.fields.items() if name != "reason"}
    if error := fields.get("error"):
        fields["error"] = {**error, "message": _WITHHELD}
    return msgspec.structs.replace(event, fields=fields)


def router(context: ServerContext) -> APIRouter:
    """What the engine holds, now or as it changes; whether it is alive, takes work, and how it is doing."""
    routes = APIRouter()

    @routes.get("/v1/runtime", tags=["runtime"])
    async def runtime(request: Request) -> Response:
        """Engine, slots, queue, parked and paused requests, models, memory and heat.

        A caller who is no operator sees counts and places of all requests, but ids, lengths and stories only
        of the requests of its own key.
        """
        caller: Identity = request.state.identity
        status = await context.runtime.status()
        document = status_document(status, context.runtime.model_states())
        if not caller.is_operator:
            owner_of = context.runtime.owner_of
            redact_status(document, lambda request_id: caller.may_see(owner_of(request_id)))
        return json_response(document)

    @routes.get("/v1/runtime/events", tags=["runtime"])
    async def events(request: Request) -> Response:
        """What happens from now on, as server-sent events; the first is a snapshot.

        A caller who is no operator gets events of the requests of its own key only.
        """
        return EventStream(_frames(context, request.state.identity), {}, context.settings.keepalive_s)

    @routes.get("/health", tags=["probes"])
    async def health() -> Response:
        """200 while it serves or is about to; 503 where no engine starts, or none will any more.

        `engine.state`: starting, serving, restarting, suspended, closing; failing, failed or closed.
        """
        found = context.runtime.health()
        status = "ok" if found.is_alive else "error"
        document = {"status": status, "engine": engine_document(found)}
        return json_response(document, 200 if found.is_alive else 503)

    @routes.get("/ready", tags=["probes"])
    async def ready() -> Response:
        """Requests are taken; 503 until then. A suspended runtime takes them and keeps them."""
        context.require_ready()
        state = context.runtime.health().state
        return json_response({"status": "ready" if state == "serving" else state})

    @routes.get("/metrics", tags=["probes"])
    async def metrics() -> Response:
        """Prometheus' text format."""
        try:
            status = await context.runtime.status()
        except StokerError:  # an engine that restarts has no figures; the client's own still count
            status = None
        text = context.metrics.render(status, context.runtime.model_states())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes


async def _frames(context: ServerContext, caller: Identity) -> AsyncGenerator[bytes, None]:
    """`{"event": name, "at": seconds since the epoch, ...}`, one a frame."""
    async with aclosing(context.runtime.events()) as events:
        async for each in events:
            event = each if caller.is_operator else redacted_event(each, caller.may_see)
            if event is None:
                continue
            yield frame(msgspec.json.encode({"event": event.event, "at": event.at, **event.fields}))
