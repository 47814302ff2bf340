"""The outermost layer of the server: what every request passes and every answer carries.

A pure ASGI middleware (a wrapped `send` costs a microsecond a token, a BaseHTTPMiddleware a task). It gives
each request its id, says whether it is one of the Messages API or of Ollama's, applies `security`, refuses a
body that declares too much and turns an escaped exception into the one error shape. Routes are reached only
through it.
"""

from __future__ import annotations

import logging
import re
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from uvicorn.protocols.utils import ClientDisconnected

from stoker.errors import CallerError, ErrorInfo, ForbiddenError, RateLimitError
from stoker.remote.wire import REQUEST_ID
from stoker.server.errors import INTERNAL_ERROR, error_response
from stoker.server.inbound.body import UnknownFields, ignored_names
from stoker.server.inbound.security import Identity
from stoker.server.reply import IGNORED_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from stoker.server.inbound.bodies import IncomingBodies
    from stoker.server.inbound.body import FindModel
    from stoker.server.inbound.quotas import Quotas
    from stoker.server.inbound.security import Access, HostList, Origins, Visit

log = logging.getLogger(__name__)

_SANE_ID = re.compile(REQUEST_ID.encode())
_MESSAGES_PATH = re.compile(r"(/v1)?/messages(/.*)?")
_OLLAMA_PATH = "/api/"
_OPEN_PATHS = frozenset({"/health", "/ready", "/ui"})
_PAGE = "/ui/"
_CONTROL = "/v1/runtime/"
"""Paths that a key without a token left may use: to end what it has running, and to look."""
_NO_CONTENT = 204
_IGNORED = IGNORED_HEADER.lower().encode()
MAX_TOLD_HOSTS = 16
"""Refused names that are logged; a page that tries many fills no log."""
_UNIDENTIFIED = Identity(refusal="no key is read on this path")


def is_messages_path(path: str) -> bool:
    """Whether the route speaks the Messages API."""
    return _MESSAGES_PATH.fullmatch(path) is not None


@dataclass(frozen=True, slots=True)
class CallerRules:
    """Who may ask, and for what.

    Attributes:
        access: tells who sends a request; asked on every path but health and readiness.
        quotas: of named keys; one that has used up its own is refused before its body is read.
        find_model: the model of a name; routes find it in the request's state.
    """

    access: Access
    quotas: Quotas
    find_model: FindModel


class WorkGate:
    """ASGI middleware around the whole application.

    Args:
        app: what is guarded.
        hosts: names the server may be called by.
        origins: whose pages may call it.
        callers: who may ask, and for what.
        bodies: of requests, for the routes; they find it in the request's state.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: HostList,
        origins: Origins,
        callers: CallerRules,
        bodies: IncomingBodies,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins
        self._callers = callers
        self._bodies = bodies
        self._unknown_fields = UnknownFields(is_strict=bodies.is_strict)
        self._told: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, pass on, and answer what no route answered."""
        if scope["type"] == "websocket":
            await self._upgrade(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = self._state(scope)
        state["send_body"] = send  # for pieces of a body that has begun: no layer here looks at these
        answer = _Answer(send, scope)
        try:
            visit = self._visit(scope)
            answer.add(visit.headers)
            if visit.is_preflight:  # which carries no key
                await Response(status_code=_NO_CONTENT)(scope, receive, answer.send)
                return
            self._admit(scope, visit)
            if scope["method"] == "POST" and not scope["path"].startswith(_CONTROL):
                self._callers.quotas.check(state["key_digest"])
            await self._app(scope, receive, answer.send)
        except (CallerError, RateLimitError) as error:
            await answer.fail(scope, error.info())
        except Exception:
            log.exception("request %s failed: %s %s", state["request_id"], scope["method"], scope["path"])
            await answer.fail(scope, INTERNAL_ERROR)

    async def _upgrade(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A connection that is to be a WebSocket: the same checks; a refusal is an HTTP error."""
        state = self._state(scope)
        scope["method"] = "GET"
        schemes = {"ws": "http", "wss": "https"}
        try:
            visit = self._visit({**scope, "scheme": schemes.get(scope["scheme"], scope["scheme"])})
            self._admit(scope, visit)
            state["identify"] = self._identification(scope, visit)  # it outlives a change of the keys
        except CallerError as error:
            await error_response(error.info(), scope)(scope, receive, send)
            raise ClientDisconnected from None  # else uvicorn logs an error, as the handshake has no end
        await self._app(scope, receive, send)

    def _state(self, scope: Scope) -> dict[str, Any]:
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = _request_id(scope)
        state["is_messages"] = is_messages_path(scope["path"])
        state["is_ollama"] = scope["path"].startswith(_OLLAMA_PATH)
        state["bodies"], state["unknown_fields"] = self._bodies, self._unknown_fields
        state["find_model"] = self._callers.find_model
        return state

    def _admit(self, scope: Scope, visit: Visit) -> None:
        """Note who sends it; raises where that is nobody who may."""
        state = scope["state"]
        state["identity"] = self._identity(scope, visit)
        state["key_digest"] = state["identity"].key_digest

    def _visit(self, scope: Scope) -> Visit:
        """Whether its Host and Origin are let in; raises where they are not."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        try:
            self._hosts.check(headers.get(b"host", []))
        except ForbiddenError as error:
            self._tell_owner(error.message)
            raise
        return self._origins.visit(scope["method"], scope["scheme"], headers)

    def _tell_owner(self, refusal: str) -> None:
        """Log a refused Host, once each and so many of them at most: anybody may send any."""
        if len(self._told) < MAX_TOLD_HOSTS and refusal not in self._told:
            self._told.add(refusal)
            log.warning("a client was refused: %s", refusal)

    def _identity(self, scope: Scope, visit: Visit) -> Identity:
        """Who sends it, or raise; a page of another origin is no program of this machine."""
        identity = _UNIDENTIFIED
        if not _is_open(scope):
            identity = self._identification(scope, visit)()
        self._bodies.check_declared(_header(scope, b"content-length"))
        self._bodies.check_encoding(_header(scope, b"content-encoding"))
        return identity

    def _identification(self, scope: Scope, visit: Visit) -> Callable[[], Identity]:
        """Tells who sends it, by the keys that hold when it is called; raises where nobody may."""
        keys = [*_header(scope, b"authorization"), None], [*_header(scope, b"x-api-key"), None]
        client = "" if visit.is_foreign else (scope.get("client") or ("",))[0]
        return partial(self._callers.access.identify, keys[0][0], keys[1][0], client)


class _Answer:
    """One answer on its way out: adds headers with the request id, knows whether it has begun."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._scope = scope
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_begun = False

    def add(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send further headers with its beginning."""
        self._headers.extend(headers)

    async def send(self, message: Message) -> None:
        if not self._has_begun and message["type"] == "http.response.start":
            self._has_begun = True
            own = [*message.get("headers", []), *self._headers, *_id_headers(self._scope)]
            message["headers"] = _with_ignored(own, self._scope["state"].get("ignored"))
        await self._send(message)

    async def fail(self, scope: Scope, info: ErrorInfo) -> None:
        """Answer with an error if nothing was sent; afterwards all that can be done is to cut the answer."""
        if not self._has_begun:
            await error_response(info, scope)(scope, _nothing, self.send)


def _is_open(scope: Scope) -> bool:
    """Whether it is answered without a key: probes, and the page, which asks for one by itself."""
    path = scope["path"]
    if path in _OPEN_PATHS or path.startswith(_PAGE):
        return True
    return path == "/" and any(b"text/html" in value for value in _header(scope, b"accept"))


def _id_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The id by the names that clients of the two vendors look for."""
    request_id = scope["state"]["request_id"].encode()
    headers = [(b"x-request-id", request_id)]
    return [*headers, (b"request-id", request_id)] if scope["state"]["is_messages"] else headers


def _with_ignored(headers: list[tuple[bytes, bytes]], names: list[str] | None) -> list[tuple[bytes, bytes]]:
    """The headers with the fields that were not known, behind the tools that were left out."""
    if not names:
        return headers
    told = [value for name, value in headers if name == _IGNORED]
    others = [header for header in headers if header[0] != _IGNORED]
    return [*others, (_IGNORED, b", ".join([*told, ignored_names(names).encode()]))]


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _header(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _request_id(scope: Scope) -> str:
    """The client's own id if it is a sane one, else a new one."""
    given = _header(scope, b"x-request-id")
    if len(given) == 1 and _SANE_ID.fullmatch(given[0]):
        return given[0].decode()
    return f"req-{uuid.uuid4().hex}"
