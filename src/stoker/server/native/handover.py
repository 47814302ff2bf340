"""POST /v1/runtime/handover: a request as a gate gives it, from where another machine left it.

The body is a `Submit` and the answer lists of request events, as an engine gets and gives them: msgpack, so
that nothing of a request is lost on the way, and every delta has its token ids. For operators, as a gate is
trusted with what it says was delivered (docs/gate.md).
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError
from stoker.ipc.codec import encode_events
from stoker.ipc.commands import Submit
from stoker.ipc.events import Failed
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

    return routes


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
