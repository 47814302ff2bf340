"""POST /v1/runtime/handover: a request as a gate gives it, from where another machine left it.

The body is a `Submit` and the answer lists of request events, as an engine gets and gives them: msgpack, so
that nothing of a request is lost on the way, and every delta has its token ids. For operators, as a gate is
trusted with what it says was delivered (docs/gate.md).

A machine that goes gives out what it has computed of a request, and another takes it in before the request
comes: bytes of the disk tier's form, which go to a file as they come and are checked before they are used.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stoker.errors import InvalidRequestError, RequestTimeoutError
from stoker.ipc.codec import encode_events
from stoker.ipc.commands import Submit
from stoker.ipc.events import Failed
from stoker.ipc.request import GenerateRequest
from stoker.remote import wire
from stoker.server.fields import check_tokens
from stoker.server.inbound.security import salt_of
from stoker.server.sse import Ending, EventStream
from stoker.server.streaming import kind_of

if TYPE_CHECKING:
    from stoker.errors import ErrorInfo
    from stoker.ipc.model import ModelInfo
    from stoker.server.context import ServerContext

_decode = msgspec.msgpack.Decoder(Submit).decode
_decode_request = msgspec.msgpack.Decoder(GenerateRequest).decode
_BYTES = "application/octet-stream"
_PIECE_BYTES = 1 << 20
BEAT = encode_events([])
MAX_TOKEN = 2**31 - 1
"""Of a vocabulary that is not known before the model is loaded; the engine looks again then."""


def _failed(info: ErrorInfo) -> bytes:
    return encode_events([Failed("", info)])


_ENDING = Ending(done=b"", fail=_failed, beat=BEAT, note=lambda _: b"", media_type=wire.FRAMES)


def router(context: ServerContext) -> APIRouter:
    """Requests that gates hand over."""
    routes = APIRouter(tags=["runtime"])

    @routes.post(wire.HANDOVER)
    async def hand_over(request: Request) -> Response:
        """Go on with a request of a gate from the tokens that another machine delivered. For operators.

        The body is msgpack, and so are the events of the answer, in frames; docs/gate.md has them.
        """
        request.state.identity.require_operator()
        async with context.bodies.received(request.receive) as data:
            submit = await context.bodies.decoded(data, _submit)
        request.state.request_id = submit.request_id
        context.require_ready()
        info = context.runtime.resolve(submit.request.model)
        request.state.identity.permit.check_class(submit.request.priority)
        _check(submit, info)
        salt = salt_of(request.state.key_digest, submit.request.cache_salt)
        submit = msgspec.structs.replace(
            submit, request=msgspec.structs.replace(submit.request, cache_salt=salt)
        )
        return EventStream(
            _frames(context, submit, request.state.key_digest), {}, wire.BEAT_S, ending=_ENDING
        )

    @routes.get(f"{wire.HANDOVER_STATE}/{{request_id}}")
    async def state_of(request: Request, request_id: str) -> Response:
        """What is computed of a live request, for another machine; it goes on here. For operators.

        The body is a file of the disk tier; `X-Stoker-Tokens` says of how many tokens. Also while it drains.
        """
        request.state.identity.require_operator()
        async with AsyncExitStack() as stack:
            found = await stack.enter_async_context(context.runtime.handover.state_of(request_id))
            kept = stack.pop_all()
        size = {"Content-Length": str(found.size_bytes), wire.STATE_TOKENS: str(found.num_tokens)}
        return StreamingResponse(_pieces(found.file, kept), media_type=_BYTES, headers=size)

    @routes.post(wire.HANDOVER_STATE)
    async def take_state(request: Request) -> dict[str, int]:
        """Store what another machine computed of a request that is handed over next. For operators.

        The body is four bytes of length, the request without its prompt as msgpack, and the state.
        """
        request.state.identity.require_operator()
        context.require_ready()
        parts = _parts(request, context.settings.receive_timeout_s)
        async with aclosing(parts):
            asked, rest = await _head(parts)
            context.runtime.resolve(asked.model)
            salt = salt_of(request.state.key_digest, asked.cache_salt)
            asked = msgspec.structs.replace(asked, cache_salt=salt)
            num_tokens = await context.runtime.handover.take_state(asked, _after(rest, parts))
        return {"num_tokens": num_tokens}

    return routes


async def _pieces(file: BinaryIO, kept: AsyncExitStack) -> AsyncGenerator[bytes, None]:
    async with kept:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece


async def _parts(request: Request, pause_s: float) -> AsyncGenerator[bytes, None]:
    """The body as it comes; a sender that pauses for too long is ended."""
    async with aclosing(request.stream()) as stream:
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    part = await anext(stream, None)
            except TimeoutError:
                raise RequestTimeoutError(f"no part of the state came within {pause_s:g} s") from None
            if part is None:
                return
            yield part


async def _head(parts: AsyncGenerator[bytes, None]) -> tuple[GenerateRequest, bytes]:
    """The request that a state is for, and what of the state came with it."""
    data = bytearray()
    async for part in parts:
        data += part
        end = wire.HEAD_BYTES + int.from_bytes(data[: wire.HEAD_BYTES], "little")
        if len(data) >= wire.HEAD_BYTES and end > wire.MAX_HEAD_BYTES:
            raise InvalidRequestError(f"the request before a state has over {wire.MAX_HEAD_BYTES} bytes")
        if len(data) >= max(end, wire.HEAD_BYTES):
            try:
                return _decode_request(data[wire.HEAD_BYTES : end]), bytes(data[end:])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidRequestError(f"the body is no state of this version: {error}") from None
    raise InvalidRequestError(f"the body ends after {len(data)} bytes, before its state begins")


async def _after(first: bytes, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for part in parts:
        yield part


def _submit(data: bytearray) -> Submit:
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no request of a gate of this version: {error}") from None
    finally:
        data.clear()


def _check(submit: Submit, info: ModelInfo) -> None:
    """Raises InvalidRequestError where what was delivered cannot be of that request and that model."""
    num = submit.request.n
    lengths = {len(submit.generated), len(submit.is_finished), len(submit.mirostat_mu)}
    if lengths not in ({num}, {0}):
        text = f"generated, is_finished and mirostat_mu have an entry for each of {num} choices, or none"
        raise InvalidRequestError(text, param="generated")
    if not 0 <= submit.age_s < math.inf:
        raise InvalidRequestError(f"age_s is {submit.age_s:g}; seconds from 0 on are taken", param="age_s")
    for tokens in filter(None, submit.generated):
        check_tokens(tokens, info.n_vocab or MAX_TOKEN + 1, "generated")
    if all(submit.is_finished) and submit.is_finished:
        raise InvalidRequestError("every choice has ended: nothing is left to compute", param="is_finished")


async def _frames(context: ServerContext, submit: Submit, owner: str) -> AsyncGenerator[bytes, None]:
    """A frame an event, the first behind an empty one: until then it may be refused with a status."""
    opening = BEAT
    request = submit.request
    with context.metrics.request(kind_of(request), request.priority) as meter:
        stream = context.runtime.take_over(submit, owner, wire.HANDOVER)
        async with aclosing(stream) as events:
            async for event in events:
                meter.note(event)
                yield opening + encode_events([event])
                opening = b""
