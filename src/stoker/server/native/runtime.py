"""GET /v1/runtime and its events, /health, /ready and /metrics (SPEC I4, O3): how the engine is.

None of them wakes anything (SPEC S6). While no engine can be asked, models are shown as they were last heard
of and memory as it is measured here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import psutil
from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import StokerError
from stoker.ipc.usage import Usage
from stoker.remote.wire import BEAT_S
from stoker.server.context import ServerContext, models_now
from stoker.server.inbound.security import Identity
from stoker.server.reply import json_response
from stoker.server.sse import EventStream, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.client.event_bus import RuntimeEvent
    from stoker.ipc.status import (
        EngineHealth,
        EngineStatus,
        GroupStatus,
        ModelStatus,
        RequestStatus,
        SlotStatus,
        WaitStatus,
    )
    from stoker.runtime import Runtime, RuntimeStatus


_SHOWN_AS = {"is_pinned": "pinned"}


def status_document(status: RuntimeStatus, known: Sequence[ModelStatus]) -> dict[str, Any]:
    """Engine, slots, requests, groups, models, memory and heat."""
    engine = status.engine
    return {
        "version": status.version,
        "up_s": round(status.up_s, 3),
        "policy": status.settings.get("policy"),
        "settings": status.settings,
        "as_of_s": round(status.as_of_s, 3),
        "engine": {
            "pid": status.pid,
            "restarts": status.restarts,
            "label": status.label,
            "threads": status.threads,
            "threads_reason": engine.threads_reason,
            "devices": msgspec.to_builtins(engine.devices),
            **engine_document(status.health),
        },
        "slots": [_shown(slot) for slot in engine.slots],
        "queue": [_waiting(one) for one in engine.queue],
        "parked": [_waiting(one) for one in engine.parked],
        "paused": [_waiting(one) for one in engine.paused],
        "groups": [{"request_id": group.id or None, **group_progress(group)} for group in status.groups],
        "requests": [request_row(one) for one in status.requests],
        "recent": [request_row(one) for one in status.recent],
        "exits": msgspec.to_builtins(status.exits),
        "models": [
            _shown(model) | {"activity": engine.activity.get(model.id, {})}
            for model in models_now(status, known)
        ],
        "memory": _memory(status),
        "heat": engine.memory.heat,
        "cache": _cache(engine),
        "counters": {name: _counted(value) for name, value in engine.counters.items()},
    }


def request_row(request: RequestStatus) -> dict[str, Any]:
    """A request as status shows it."""
    row: dict[str, Any] = msgspec.to_builtins(request)
    del row["owner"]
    return row | {"class": request.priority}  # its name until the next version


def _counted(value: float) -> float:
    """A count without a point."""
    return int(value) if value == int(value) else value


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
    """Its fields, some under the names that bodies have for them; `class` is `priority` for one version."""
    given = msgspec.structs.asdict(status)
    shown = {_SHOWN_AS.get(name, name): value for name, value in given.items()}
    return shown | {"class": shown["priority"]} if "priority" in shown else shown


def _waiting(status: WaitStatus) -> dict[str, Any]:
    return _shown(status) | {"request_id": status.request_id or None}  # another caller's has none


def group_progress(group: GroupStatus) -> dict[str, Any]:
    """How far a call of several requests is; each of them may have a slot or a place in the queue besides."""
    return {
        "kind": group.kind,
        "priority": group.priority,
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
        "ladder": memory.ladder,
        "thresholds": memory.thresholds,
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


_LISTS = frozenset({"requests", "groups", "recent"})
"""What of a snapshot is about requests."""
_WITHHELD = "told to operators only"


def model_states_for(caller: Identity, runtime: Runtime) -> list[ModelStatus]:
    """Every served model and download; why it is not ready, which may name files, is told to operators."""
    states = runtime.model_states()
    return states if caller.is_operator else _unexplained(states)


def _unexplained(models: Sequence[ModelStatus]) -> list[ModelStatus]:
    return [msgspec.structs.replace(model, reason="") for model in models]


def status_for(caller: Identity, status: RuntimeStatus, runtime: Runtime) -> RuntimeStatus:
    """The status as `caller` may see it, without digests of keys: of others' requests counts and places.

    An id that is not shown is empty, or None in a slot.
    """
    shown = status if caller.is_operator else _redacted(status, caller, runtime.owner_of)
    replace = msgspec.structs.replace
    return replace(
        shown,
        groups=[replace(one, owner="") for one in shown.groups],
        requests=[replace(one, owner="") for one in shown.requests],
        recent=[replace(one, owner="") for one in shown.recent],
    )


def _redacted(status: RuntimeStatus, caller: Identity, owner_of: Callable[[str], str]) -> RuntimeStatus:
    replace = msgspec.structs.replace
    engine, cache = status.engine, status.engine.cache

    def may_see(request_id: str) -> bool:
        return caller.may_see(owner_of(request_id))

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
        else replace(one, id="", names=(), num_members=0, num_done=0, deadline_s=None, usage=Usage())
        for one in status.groups
    ]
    shown = replace(
        engine,
        slots=slots,
        queue=waiting(engine.queue),
        parked=waiting(engine.parked),
        paused=waiting(engine.paused),
        models=_unexplained(engine.models),
        cache=replace(cache, disk_problem=""),
        prefixes=[],
    )
    return replace(
        status,
        engine=shown,
        groups=groups,
        requests=[one for one in status.requests if caller.may_see(one.owner)],
        recent=[one for one in status.recent if caller.may_see(one.owner)],
        exits=[replace(ended, reason="") for ended in status.exits],
        settings={},
    )


def redacted_event(event: RuntimeEvent, may_see: Callable[[str], bool]) -> RuntimeEvent | None:
    """The event without reasons; None: it is about another caller's request and is not shown.

    Args:
        event: of the runtime.
        may_see: whether requests of that owner are shown.
    """
    if event.event == "request":
        return event if may_see(event.owner) else None
    fields = {name: value for name, value in event.fields.items() if name != "reason"}
    for name in _LISTS & fields.keys():
        fields[name] = [one for one in fields[name] if may_see(one["owner"])]
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
        shown = status_for(caller, status, context.runtime)
        document = status_document(shown, model_states_for(caller, context.runtime))
        return json_response(document | {"policy": status.settings.get("policy")})  # which all may know

    @routes.get("/v1/runtime/events", tags=["runtime"])
    async def events(request: Request) -> Response:
        """What happens from now on, as server-sent events; the first is a snapshot.

        With `Last-Event-ID` it goes on after that event, without a snapshot, while what came since is kept. A
        caller who is no operator gets events of the requests of its own key only.
        """
        frames = _frames(context, request.state.identity, request.headers.get("Last-Event-ID", ""))
        return EventStream(frames, {}, min(context.settings.keepalive_s, BEAT_S))

    @routes.get("/v1/runtime/prefixes", tags=["runtime"])
    async def prefixes(request: Request) -> Response:
        """The longest stored prefixes: tokens, bytes, hits, where; no text. For operators."""
        request.state.identity.require_operator()
        return json_response({"prefixes": (await context.runtime.status()).engine.prefixes})

    @routes.get("/v1/runtime/log", tags=["runtime"])
    async def log(request: Request, after: Annotated[int, Query(ge=0)] = 0) -> Response:
        """The last records of the log after that number, the oldest first. For operators."""
        request.state.identity.require_operator()
        return json_response({"records": context.log.after(after)})

    _add_probes(routes, context)
    return routes


def _add_probes(routes: APIRouter, context: ServerContext) -> None:
    """Whether it is alive, takes work, and how it is doing, for other programs."""

    @routes.get("/health", tags=["probes"])
    async def health() -> Response:
        """200 while it serves or is about to; 503 where no engine starts, or none will any more.

        `engine.state`: starting, serving, restarting, suspended, closing; failing, failed or closed.
        """
        found = context.runtime.health()
        states = [model.state for model in context.runtime.model_states()]
        document = {
            "status": "ok" if found.is_alive else "error",
            "engine": engine_document(found),
            "version": metadata.version("stoker"),
            "up_s": round(time.time() - context.started_at, 3),
            "models": {"served": len(states), "ready": states.count("ready")},
        }
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


async def _frames(context: ServerContext, caller: Identity, after: str) -> AsyncGenerator[bytes, None]:
    """`{"event": name, "at": seconds since the epoch, "id": ..., ...}`, one a frame of that id."""
    async with aclosing(context.runtime.events(after=after)) as events:
        async for each in events:
            event = each if caller.is_operator else redacted_event(each, caller.may_see)
            if event is None:
                continue
            document = {"event": event.event, "at": event.at, **_unowned(event.fields)}
            if event.id:
                document["id"] = event.id
            named = f"id: {event.id}\n".encode() if event.id else b""
            yield named + frame(msgspec.json.encode(document))


def _unowned(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an event without digests of keys."""
    lists = {
        name: [{key: value for key, value in one.items() if key != "owner"} for one in fields[name]]
        for name in _LISTS & fields.keys()
    }
    return fields | lists
