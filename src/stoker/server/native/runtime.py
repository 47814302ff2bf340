"""GET /v1/runtime and its events, /health, /ready and /metrics (SPEC I4, O3): how the engine is.

None of them wakes anything (SPEC S6). While no engine can be asked, models are shown as they were last heard
of and memory as it is measured here.
"""

from __future__ import annotations

import time
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import psutil
from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from stoker.client.figures import cache_document, memory_document
from stoker.errors import StokerError
from stoker.ipc.usage import Usage
from stoker.server.context import ServerContext, models_now, ready_count_text
from stoker.server.inbound.security import Identity
from stoker.server.native.events import ANOTHER
from stoker.server.reply import json_response

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from stoker.ipc.status import (
        EngineHealth,
        GroupStatus,
        ModelStatus,
        RequestMove,
        RequestStatus,
        SlotStatus,
        WaitStatus,
    )
    from stoker.runtime import Runtime, RuntimeStatus


Row = TypeVar("Row", "RequestStatus", "GroupStatus")

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
        "groups": [_call_row(group) for group in status.groups],
        "requests": [request_row(one) for one in status.requests],
        "recent": [request_row(one) for one in status.recent],
        "exits": msgspec.to_builtins(status.exits),
        "models": [
            _shown(model) | {"activity": engine.activity.get(model.id, {})}
            for model in models_now(status, known)
        ],
        "memory": _memory(status),
        "heat": engine.memory.heat,
        "cache": cache_document(engine.cache, engine.kv_cells_used, engine.kv_cells_total),
        "counters": {name: _counted(value) for name, value in engine.counters.items()},
        **({"machines": msgspec.to_builtins(engine.machines)} if engine.machines else {}),
    }


def request_row(request: RequestStatus) -> dict[str, Any]:
    """A request as status shows it."""
    return request.as_row() | {"class": request.priority}  # its name until the next version


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


def _call_row(group: GroupStatus) -> dict[str, Any]:
    """A call of several requests as status shows it: how far it is, and what it went through."""
    story = {"waits_for": group.waits_for, "moves": msgspec.to_builtins(group.moves)}
    return {"request_id": group.id or None, **group_progress(group), **story}


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
    return memory_document(memory, status.engine.devices, psutil.virtual_memory().total)


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

    def own(request: Row) -> Row:
        others = {move.by for move in request.moves if move.by and not may_see(move.by)}
        moves = [_veiled_move(move, others) for move in request.moves]
        return replace(request, moves=moves, waits_for=_veiled(request.waits_for, others))

    def waiting(entries: Sequence[WaitStatus]) -> list[WaitStatus]:
        return [
            _veiled_wait(one, may_see)
            if may_see(one.request_id)
            else replace(one, request_id="", num_tokens=0, story=[], others=[], reason="", by=None)
            for one in entries
        ]

    slots = [
        replace(one, story=_veiled_story(one.story, one.others, may_see), others=[])
        if one.request_id is not None and may_see(one.request_id)
        else replace(one, request_id=None, num_tokens=0, story=[], others=[], index=None)
        for one in engine.slots
    ]
    groups = [own(one) if may_see(one.id) else _unnamed_call(one) for one in status.groups]
    shown = replace(
        engine,
        slots=slots,
        queue=waiting(engine.queue),
        parked=waiting(engine.parked),
        paused=waiting(engine.paused),
        models=_unexplained(engine.models),
        cache=replace(cache, disk_problem="", shared=None),
        prefixes=[],
        machines=[],
    )
    return replace(
        status,
        engine=shown,
        groups=groups,
        requests=[own(one) for one in status.requests if caller.may_see(one.owner)],
        recent=[own(one) for one in status.recent if caller.may_see(one.owner)],
        exits=[replace(ended, reason="") for ended in status.exits],
        settings={},
    )


def _unnamed_call(call: GroupStatus) -> GroupStatus:
    """Another caller's: that there is one, and where."""
    return msgspec.structs.replace(
        call,
        id="",
        names=(),
        num_members=0,
        num_done=0,
        deadline_s=None,
        waits_for="",
        moves=[],
        usage=Usage(),
    )


def _veiled(text: str, hidden: Collection[str]) -> str:
    """A text that names none of these requests."""
    for request_id in hidden:
        text = text.replace(request_id, ANOTHER)
    return text


def _veiled_move(move: RequestMove, hidden: Collection[str]) -> RequestMove:
    if move.by not in hidden:
        return move
    return msgspec.structs.replace(move, by=None, reason=_veiled(move.reason, hidden))


def _veiled_story(
    story: list[tuple[float, str]], others: Collection[str], may_see: Callable[[str], bool]
) -> list[tuple[float, str]]:
    hidden = [request_id for request_id in others if not may_see(request_id)]
    return [(age_s, _veiled(what, hidden)) for age_s, what in story] if hidden else story


def _veiled_wait(one: WaitStatus, may_see: Callable[[str], bool]) -> WaitStatus:
    hidden = [
        request_id for request_id in (*one.others, one.by or "") if request_id and not may_see(request_id)
    ]
    return msgspec.structs.replace(
        one,
        story=_veiled_story(one.story, one.others, may_see),
        others=[],
        reason=_veiled(one.reason, hidden),
        by=None if one.by in hidden else one.by,
    )


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
        context.require_ready(ready_count_text)
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
