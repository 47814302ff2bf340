"""Responses over a WebSocket at the same address (SPEC W7): a message asks for one, its events are messages.

One response at a time; further messages wait, few of them. The connection remembers the last response, stored
or not, so that a next turn sends what is new alone. What was not stored is gone with the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from stoker.client.requests.stream import Notice
from stoker.errors import AuthenticationError, InvalidRequestError, QueueFullError, StokerError
from stoker.ipc.events import Admitted
from stoker.server.context import ServerContext
from stoker.server.errors import INTERNAL_ERROR, error_fields
from stoker.server.inbound.bodies import JsonBounds
from stoker.server.inbound.body import Many, Named, taken_body
from stoker.server.openai.responses.body import ResponsesRequest
from stoker.server.openai.responses.continuation import AskedResponse, Earlier, begun_response
from stoker.server.openai.responses.store import StoredResponse
from stoker.server.openai.responses.writer import ResponseEvents

if TYPE_CHECKING:
    from stoker.errors import ErrorInfo

log = logging.getLogger(__name__)

MAX_WAITING = 8
"""Messages that may wait while a response is made; together they are no larger than one body may be."""
MAX_CONNECTED_S = 3600.0
"""Of one connection, as at the vendor; its client connects again."""
_CREATE = "response.create"
_GOING_AWAY = 1001
_POLICY_VIOLATION = 1008


class CreateMessage(ResponsesRequest):
    """A response to make; what concerns HTTP alone is taken and has no effect.

    Attributes:
        generate: false: its items are taken in, and nothing is generated.
    """

    type: str = Field(pattern=r"^response\.create$")
    input: str | Many[Named[Any]] | None = None  # type: ignore[assignment] # it may be left out here
    generate: bool | None = None


def router(context: ServerContext) -> APIRouter:
    """The WebSocket route."""
    routes = APIRouter()

    @routes.websocket("/v1/responses")
    async def responses(socket: WebSocket) -> None:
        """Responses, one after the other."""
        await socket.accept()
        conversation = _Connection(context, socket)
        with contextlib.suppress(WebSocketDisconnect):
            await conversation.serve()

    return routes


class _Connection:
    """One client's connection."""

    def __init__(self, context: ServerContext, socket: WebSocket) -> None:
        self._context = context
        self._socket = socket
        self._last: StoredResponse | None = None
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the key is not accepted any more
        self._is_revoked = False
        self._waiting_bytes = 0

    async def serve(self) -> None:
        """Answer until the client leaves or the time is up; what runs then is cancelled.

        Where its key is not accepted any more, it is closed behind the answer that is being made.
        """
        self._context.on_keys.add(self._check_key)
        self._check_key()  # they may have changed since it was let in
        answering = asyncio.ensure_future(self._answer_all())
        reading = asyncio.ensure_future(self._read_all())
        try:
            done, _ = await asyncio.wait(
                (answering, reading), timeout=MAX_CONNECTED_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                await task
            if not done:
                text = f"a connection lasts {MAX_CONNECTED_S:.0f} s; connect again"
                await self._refuse(QueueFullError(text).info(), "websocket_connection_limit_reached")
                await self._socket.close(_GOING_AWAY)
        finally:
            self._context.on_keys.discard(self._check_key)
            answering.cancel()
            reading.cancel()
            await asyncio.gather(answering, reading, return_exceptions=True)

    async def _read_all(self) -> None:
        """Take messages in while a response is made, so that a client that leaves is noticed."""
        most = self._context.bodies.max_body_bytes
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes") or (message.get("text") or "").encode()
            num_waiting, num_bytes = self._waiting.qsize(), self._waiting_bytes
            if num_waiting >= MAX_WAITING:
                text = f"{num_waiting} messages wait on this connection, which are the most; try later"
                await self._refuse(QueueFullError(text).info())
                continue
            if num_bytes + len(data) > most:
                text = f"messages that wait on this connection may have {most} bytes together:"
                text = f"{text} {num_bytes} wait, and this one has {len(data)}; try later"
                await self._refuse(QueueFullError(text).info())
                continue
            self._waiting_bytes += len(data)
            self._waiting.put_nowait(data)

    async def _answer_all(self) -> None:
        while (data := await self._waiting.get()) is not None and not self._is_revoked:
            self._waiting_bytes -= len(data)
            await self._answer(data)
        await self._refuse(AuthenticationError("the API key of this connection is accepted no longer").info())
        await self._socket.close(_POLICY_VIOLATION)

    def _check_key(self) -> None:
        """The keys have changed: note what the connection's own may do now."""
        state = self._socket.scope["state"]
        try:
            state["identity"] = state["identify"]()
        except AuthenticationError:
            self._is_revoked = True
            self._waiting.put_nowait(None)
        else:
            state["key_digest"] = state["identity"].key_digest

    async def _answer(self, data: bytes) -> None:
        request = self._request()
        previous = None
        try:
            self._context.quotas.check(request.state.key_digest)
            body = await self._body(request, data)
            previous = body.previous_response_id
            earlier = Earlier(self._context.responses, request.state.key_digest, self._last)
            await self._respond(request, body, await earlier.asked(body))
        except StokerError as error:
            self._forget(previous)
            await self._refuse(error.info())
        except WebSocketDisconnect:
            raise
        except Exception:
            log.exception("request %s failed on a WebSocket", request.state.request_id)
            self._forget(previous)
            await self._refuse(INTERNAL_ERROR)

    def _forget(self, previous: str | None) -> None:
        """What could not be continued is not remembered by this connection any more."""
        if self._last is not None and self._last.response["id"] == previous:
            self._last = None

    async def _body(self, request: Request, data: bytes) -> CreateMessage:
        CreateMessage.model_rebuild()
        bounds = JsonBounds(CreateMessage.max_values)
        try:
            return await taken_body(request, CreateMessage, bytearray(bounds.take(data)))
        except InvalidRequestError as error:
            if error.param == "type":
                text = f"type: a message of type {_CREATE!r} is taken, no other"
                raise InvalidRequestError(text, param="type") from None
            raise

    async def _respond(self, request: Request, body: CreateMessage, asked: AskedResponse) -> None:
        turn, head = await begun_response(self._context, request, asked)
        is_stored, owner = head.echo["store"], request.state.key_digest

        def keep(response: dict[str, Any]) -> None:
            items = asked.items(head.id)
            self._last = StoredResponse(response=response, items=items)
            if is_stored:
                self._context.responses.keep(owner, response, lambda: items)

        events = ResponseEvents(head, turn.form, keep)
        if body.generate is False:
            await self._send(events.end())
            return
        has_begun = False
        try:
            async with aclosing(turn.call.events()) as arriving:
                async for _, event in arriving:
                    if has_begun or isinstance(event, Admitted) or not isinstance(event, Notice):
                        has_begun = True
                        await self._send(events.of(event))
        except StokerError as error:
            if not has_begun:
                raise
            self._forget(body.previous_response_id)
            await self._send(events.fail(error.info()))
        else:
            await self._send(events.end())

    def _request(self) -> Request:
        """What the routes are given of a message: an HTTP request with the headers of the connection."""
        state = {**self._socket.scope["state"], "request_id": f"req-{uuid.uuid4().hex}", "ignored": []}
        scope = {**self._socket.scope, "type": "http", "method": "POST", "state": state}
        return Request(scope, receive=_never)

    async def _refuse(self, info: ErrorInfo, code: str | None = None) -> None:
        error = error_fields(info) | ({"code": code} if code else {})
        await self._send([{"type": "error", "status": info.http_status, "error": error}])

    async def _send(self, objects: list[dict[str, Any]]) -> None:
        for one in objects:
            await self._socket.send_text(msgspec.json.encode(one, enc_hook=str).decode())


async def _never() -> Message:
    """No message: that the client leaves is noticed where the connection is read."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never
