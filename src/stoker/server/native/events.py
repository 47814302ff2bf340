"""GET /v1/runtime/events: what happens, as server-sent events, to each caller what it may see (SPEC O3, S4).

An event is encoded once for all operators and once for each key, however many read.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError
from stoker.remote.wire import BEAT_S
from stoker.server.sse import EventStream, frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping

    from stoker.client.event_bus import RuntimeEvent
    from stoker.server.context import ServerContext
    from stoker.server.inbound.security import Identity

MAX_FRAMES = 2048
"""Encoded events that are kept for others of the same key; past this the oldest goes."""
KINDS = frozenset(
    {
        "engine",
        "model",
        "pressure",
        "rung",
        "heat",
        "request",
        "steps",
        "memory",
        "cache",
        "machines",
        "snapshot",
    }
)
ANOTHER = "another request"
"""What a reason says in place of an id that its reader may not see."""
_WITHHELD = "told to operators only"
_REASONS = ("reason", "waits_for")


class EventFrames:
    """Events as frames, each made once for a visibility.

    Args:
        owner_of: digest of the API key that a live request came with, by its id.
    """

    def __init__(self, owner_of: Callable[[str], str]) -> None:
        self._owner_of = owner_of
        self._frames: OrderedDict[tuple[str, float, str, str], bytes] = OrderedDict()

    def __repr__(self) -> str:
        return f"<EventFrames {len(self._frames)}>"

    def of(self, event: RuntimeEvent, caller: Identity) -> bytes:
        """The event as `caller` may see it; empty: it may not."""
        if caller.is_operator:
            return _framed(event.id, event.data or msgspec.json.encode(event.document()))
        key = (event.id, event.at, event.event, caller.key_digest)
        made = self._frames.get(key)
        if made is None:
            shown = redacted_event(event, caller.may_see, self._owner_of)
            made = b"" if shown is None else _framed(event.id, msgspec.json.encode(shown.document()))
            if event.id:
                self._frames[key] = made
                if len(self._frames) > MAX_FRAMES:
                    self._frames.popitem(last=False)
        return made


def _framed(event_id: str, data: bytes) -> bytes:
    named = f"id: {event_id}\n".encode() if event_id else b""
    return named + frame(data)


def redacted_event(
    event: RuntimeEvent, may_see: Callable[[str], bool], owner_of: Callable[[str], str]
) -> RuntimeEvent | None:
    """The event without reasons and names of others; None: it is about another caller's request.

    Args:
        event: of the runtime.
        may_see: whether requests of that owner are shown.
        owner_of: a live request, by its id.
    """

    def is_shown(request_id: str) -> bool:
        return may_see(event.owners.get(request_id) or owner_of(request_id))

    if event.event == "request":
        return (
            msgspec.structs.replace(event, fields=veiled(event.fields, is_shown))
            if may_see(event.owner)
            else None
        )
    if event.event == "machines":
        return None
    fields = {name: value for name, value in event.fields.items() if name not in {"reason", "machines"}}
    if event.event == "snapshot":
        fields = _redacted_snapshot(fields, is_shown)
    if event.event == "model":
        fields = _redacted_model(fields, is_shown)
    if event.event == "cache":
        fields = _redacted_cache(fields)
    return msgspec.structs.replace(event, fields=fields)


def veiled(fields: Mapping[str, Any], is_shown: Callable[[str], bool]) -> dict[str, Any]:
    """Fields of a request in which reasons name no request that is not shown."""
    moves = [*fields.get("moves", ()), *([fields["move"]] if fields.get("move") else ()), fields]
    hidden = {by for move in moves if (by := move.get("by")) and not is_shown(by)}
    return _without(fields, hidden) if hidden else dict(fields)


def _without(fields: Mapping[str, Any], hidden: Collection[str]) -> dict[str, Any]:
    shown = dict(fields)
    for name in _REASONS:
        for request_id in hidden if shown.get(name) else ():
            shown[name] = shown[name].replace(request_id, ANOTHER)
    if shown.get("by") in hidden:
        shown["by"] = None
    if shown.get("move"):
        shown["move"] = _without(shown["move"], hidden)
    if "moves" in shown:
        shown["moves"] = [_without(move, hidden) for move in shown["moves"]]
    return shown


def _redacted_snapshot(fields: dict[str, Any], is_shown: Callable[[str], bool]) -> dict[str, Any]:
    shown = dict(fields)
    for name in ("requests", "groups", "recent"):
        own = [row for row in shown.get(name, ()) if is_shown(row["request_id"])]
        shown[name] = [veiled(row, is_shown) for row in own]
    shown["slots"] = [
        lane if lane["request_id"] is not None and is_shown(lane["request_id"]) else _unnamed(lane)
        for lane in shown.get("slots", ())
    ]
    shown["models"] = [
        {**_redacted_model(model, is_shown), "reason": ""} for model in shown.get("models", ())
    ]
    shown["exits"] = [{**ended, "reason": ""} for ended in shown.get("exits", ())]
    if isinstance(engine := shown.get("engine"), dict):
        shown["engine"] = {**engine, "reason": ""}
    if cache := shown.get("cache"):
        shown["cache"] = _redacted_cache(cache)
    shown["may"] = {**fields.get("may", {}), "administrate": False}
    return shown


def _redacted_model(model: dict[str, Any], is_shown: Callable[[str], bool]) -> dict[str, Any]:
    shown = dict(model)
    if "error" in shown:
        shown["error"] = _withheld(shown["error"])
    if "used_by" in shown:
        shown["used_by"] = [request_id for request_id in shown["used_by"] if is_shown(request_id)]
    return shown


def _unnamed(lane: dict[str, Any]) -> dict[str, Any]:
    return {**lane, "request_id": None, "index": None}


def _withheld(error: dict[str, Any] | None) -> dict[str, Any] | None:
    return {**error, "message": _WITHHELD} if error else None


def _redacted_cache(cache: dict[str, Any]) -> dict[str, Any]:
    disk = {**cache.get("disk", {}), "problem": ""}
    return {**cache, "disk": disk, "prefixes": []}


def router(context: ServerContext) -> APIRouter:
    """What happens, as it happens."""
    routes = APIRouter()
    made = EventFrames(context.runtime.owner_of)

    async def frames(caller: Identity, after: str, kinds: Collection[str]) -> AsyncGenerator[bytes, None]:
        async with aclosing(context.runtime.events(after=after, kinds=kinds)) as events:
            async for event in events:
                if shown := made.of(event, caller):
                    yield shown

    @routes.get("/v1/runtime/events", tags=["runtime"])
    async def events(request: Request, kinds: Annotated[str, Query(max_length=200)] = "") -> Response:
        """What happens from now on, as server-sent events; the first is a snapshot (docs/events.md).

        With `Last-Event-ID` it goes on after that event, without a snapshot, while what came since is kept.
        `kinds`, names with commas between them, leaves out all other events but snapshots. A caller who is no
        operator gets events of the requests of its own key only.
        """
        wanted = _kinds_of(kinds)
        caller: Identity = request.state.identity
        stream = frames(caller, request.headers.get("Last-Event-ID", ""), wanted)
        return EventStream(stream, {}, min(context.settings.keepalive_s, BEAT_S))

    return routes


def _kinds_of(given: str) -> frozenset[str]:
    """Names of events. Raises InvalidRequestError: there is none of that name."""
    kinds = frozenset(name for name in given.split(",") if name)
    if unknown := kinds - KINDS:
        text = f"no event is called {min(unknown)!r:.40}; there are: {', '.join(sorted(KINDS))}"
        raise InvalidRequestError(text, param="kinds")
    return kinds
