"""Errors as HTTP answers (SPEC S3): the tree's status, `Retry-After` where it helps, and the body's shape.

OpenAI's shape, but on the routes of the Messages API, where it is Anthropic's, and on Ollama's. `OriginRules`
has errors name the places of the caller's own body where that was translated. `stoker.errors` defines the
errors, `sse` writes those inside a stream that has begun.
"""

from __future__ import annotations

import logging
import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from stoker.errors import ErrorInfo, InvalidRequestError, StokerError, error_from_info
from stoker.server.inbound.bodies import ClientGoneError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fastapi import FastAPI
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails
    from starlette.requests import Request
    from starlette.types import Scope

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "request_cancelled",
}
_MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STATUS_CODES = {404: "not_found", 405: "method_not_allowed"}
_UNION_TAGS = frozenset({"str", "int", "float", "bool", "none"})
_OBJECT_TYPES = frozenset({"model_type", "model_attributes_type", "dict_type"})
_OBJECT_TEXT = "Input should be an object"  # pydantic says "dictionary" and names classes
_RETRY_STATUSES = frozenset({429, 503})
_MAX_NAME_CHARS = 64  # of a key that the caller chose, in an error
_CLIENT_CLOSED = 499  # it is not read; logs of proxies use this number
_FIRST_SERVER_ERROR = 500

INTERNAL_ERROR = ErrorInfo(
    code="internal_error", message="the server failed on this request; its log says why"
)


def error_type(status: int) -> str:
    """The `type` that OpenAI's servers use for an HTTP status."""
    if status >= _FIRST_SERVER_ERROR:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def error_fields(info: ErrorInfo) -> dict[str, Any]:
    """`message`, `type`, `code` and `param`, and `details` where the error has some."""
    error: dict[str, Any] = {
        "message": info.message,
        "type": error_type(info.http_status),
        "code": info.code,
        "param": info.param,
    }
    if info.details:
        error["details"] = info.details
    return error


def error_body(info: ErrorInfo) -> bytes:
    """`{"error": ...}` with `error_fields`, as JSON."""
    return msgspec.json.encode({"error": error_fields(info)}, enc_hook=str)


def messages_error(info: ErrorInfo, request_id: str) -> dict[str, Any]:
    """An error as clients of the Messages API read it, in a body and as an event."""
    kind = _MESSAGES_TYPES.get(info.http_status)
    if kind is None:
        kind = "api_error" if info.http_status >= _FIRST_SERVER_ERROR else "invalid_request_error"
    error = {"type": kind, "message": info.message, "code": info.code, "param": info.param}
    return {"type": "error", "error": error, "request_id": request_id}


def ollama_error(info: ErrorInfo) -> bytes:
    """An error as clients of Ollama's API read it: `{"error": "..."}`, in a body and as a line."""
    return msgspec.json.encode({"error": info.message})


def error_response(info: ErrorInfo, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer: status, body, and `Retry-After` (seconds, at least 1) on 429 and 503.

    Args:
        info: the error.
        scope: of the request; its state has the request's id and, as `is_messages` and `is_ollama`, the
            shape (see `gate`).
        headers: further ones.
    """
    log.debug("%s %s: %d %s: %r", scope["method"], scope["path"], info.http_status, info.code, info.message)
    sent = dict(headers or {})
    if info.http_status in _RETRY_STATUSES:
        sent["Retry-After"] = str(max(1, math.ceil(info.retry_after_s or 1.0)))
    if info.http_status == 401:  # noqa: PLR2004 - the one status that needs a challenge
        sent["WWW-Authenticate"] = "Bearer"
    body = error_body(info)
    state = scope["state"]
    if state["is_messages"]:
        body = msgspec.json.encode(messages_error(info, state["request_id"]))
    elif state["is_ollama"]:
        body = ollama_error(info)
    return Response(body, info.http_status, sent, media_type="application/json")


def invalid_body(error: ValidationError) -> InvalidRequestError:
    """The first problem pydantic found, with the path of the field as `param`.

    Of a field that may have several types there is one for each. What came is of the type whose bound it
    breaks, else of the one whose problem lies deepest inside of it.
    """
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = _path(problems[0])
    alike = (each for each in problems if _path(each)[: len(first)] == first)
    problem = max(alike, key=lambda each: (not each["type"].endswith("_type"), len(_path(each))))
    param = ".".join(_path(problem)) or None
    text = _OBJECT_TEXT if problem["type"] in _OBJECT_TYPES else problem["msg"].removeprefix("Value error, ")
    return InvalidRequestError(f"{param}: {text}" if param else text, param=param)


def _path(problem: ErrorDetails) -> list[str]:
    """Where it is in the body."""
    return [str(part)[:_MAX_NAME_CHARS] for part in problem["loc"] if not _is_union_tag(part)]


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and (part in _UNION_TAGS or "[" in part)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error that a route raises answer in the one shape."""
    app.add_exception_handler(StokerError, _on_stoker_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)


async def _on_stoker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StokerError)
    return error_response(error.info(), request.scope)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {request.url.path}: {error.detail}"
    info = ErrorInfo(code=_STATUS_CODES.get(status, "http_error"), message=message, http_status=status)
    headers: Mapping[str, Any] | None = error.headers
    return error_response(info, request.scope, headers)


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


class OriginRules:
    """The caller's own path for each path of the chat completion.

    Args:
        fields: paths that are always the same, such as `{"stop": "stop_sequences"}`.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._own = dict(fields)

    def __repr__(self) -> str:
        return f"OriginRules({len(self._own)} paths)"

    def add(self, path: str, own: str) -> None:
        """`path` of the chat completion was made of `own`; what is below the one is below the other."""
        self._own[path] = own

    def of(self, path: str) -> str:
        """The caller's path: by the longest known beginning; an unknown path is its own."""
        head, tail = path, ""
        while head:
            if head in self._own:
                return self._own[head] + tail
            head, _, name = head.rpartition(".")
            tail = f".{name}{tail}"
        return path

    def told(self, error: StokerError) -> StokerError:
        """The error with the caller's own path, in the message too where it names the path."""
        param = error.param
        if param is None or (own := self.of(param)) == param:
            return error
        message = error.message
        if "." in param or message.startswith(param):
            message = re.sub(rf"(?<![\w.]){re.escape(param)}(?!\w)", lambda _: own, message)
        return error_from_info(msgspec.structs.replace(error.info(), param=own, message=message))

    def add_text(self, path: str, own: str) -> None:
        """The message at `path` was made of a text, `own`."""
        self.add(path, own)
        self.add(f"{path}.content", own)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of the block name the caller's own places.

        Raises:
            StokerError: as the block raised it, translated.
        """
        try:
            yield
        except StokerError as error:
            raise self.told(error) from error
