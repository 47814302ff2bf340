"""A machine that is a Stoker server, reached over HTTP."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import msgspec

from stoker.errors import OperatorOnlyError
from stoker.gate.exchange import ConnectionPool, FrameExchange
from stoker.gate.link import MovingState, PeerLook
from stoker.ipc.commands import CountTokens, Detokenize, Tokenize
from stoker.ipc.status import RuntimeStatus
from stoker.remote import wire
from stoker.remote.bodies import request_body, request_path
from stoker.remote.calls import pieces_of
from stoker.remote.connection import Hints, ServerConnection

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from stoker.gate.link import OnEnd, OnEvents, PeerLink, PeerRun
    from stoker.ipc.commands import Submit, TextQuestion
    from stoker.ipc.request import GenerateRequest

LOOK_S = 3.0
"""What a machine may take to say how it is; in a longer step it says what it knows without its engine."""
_HINTS = Hints(server="", key=" (give an operator's in the file of `peer_key_file`)")

_encode = msgspec.msgpack.Encoder().encode


class HttpPeer:
    """One server; a `PeerLink`.

    Args:
        url: of the server.
        api_key: an operator's there; None: it asks for none.

    Raises:
        InvalidRequestError: the URL or the key is none.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._server = ServerConnection(url, api_key, _HINTS)
        self._server.open()
        self._pool = ConnectionPool(self._server)
        url_read = httpx.URL(self._server.url)
        self.name = url_read.netloc.decode() + url_read.path.rstrip("/")

    def __repr__(self) -> str:
        return f"<HttpPeer {self.name} {self._pool!r}>"

    @property
    def url(self) -> str:
        """See `PeerLink`."""
        return self._server.url

    def take_key(self, other: PeerLink) -> None:
        """See `PeerLink`."""
        if isinstance(other, HttpPeer):
            self._server.take_key(other._server)  # noqa: SLF001 - of its own class

    async def look(self) -> PeerLook:
        """See `PeerLink`."""
        try:
            async with asyncio.timeout(LOOK_S):
                overview = await self._server.get(wire.OVERVIEW, wire.Overview)
                if overview.refusal:  # each request would be refused with it
                    raise OperatorOnlyError(f"requests cannot be handed over: {overview.refusal}")
                status = await self._server.get(wire.STATUS, RuntimeStatus)
        except TimeoutError:
            raise self._server.silent(LOOK_S) from None
        return PeerLook(overview=overview, status=status)

    def run(self, submit: Submit, on_events: OnEvents, on_end: OnEnd) -> PeerRun:
        """See `PeerLink`."""
        request = self._pool.request(wire.HANDOVER, _encode(submit))
        return FrameExchange(self._pool, self._server, request, on_events, on_end)

    async def ask(self, question: TextQuestion) -> dict[str, Any]:
        """See `PeerLink`."""
        match question:
            case Tokenize(text=text, model=model, add_special=add, parse_special=parse):
                how = {"add_special": add, "parse_special": parse, "with_pieces": True}
                found = await self._server.post("/tokenize", {"content": text, "model": model, **how})
                tokens, pieces = pieces_of(found)
                return {"tokens": tokens, "pieces": pieces}
            case Detokenize(tokens=tokens, model=model):
                found = await self._server.post("/detokenize", {"tokens": tokens, "model": model})
                return {"text": found["content"]}
            case CountTokens(request=request):
                return await self._server.post(wire.COUNT_TOKENS, request_body(request))

    async def steer(self, request_id: str, action: str) -> None:
        """See `PeerLink`."""
        await self._server.post(f"{request_path(request_id)}/{action}", {})

    async def operate(self, action: str, body: dict[str, Any]) -> None:
        """See `PeerLink`."""
        await self._server.post(f"/v1/runtime/models/{action}", body)

    @asynccontextmanager
    async def state_of(self, request_id: str) -> AsyncIterator[MovingState]:
        """See `CarriesStates`."""
        path = f"{wire.HANDOVER_STATE}/{quote(request_id, safe='')}"
        async with self._server.download(path) as answer:
            size, tokens = answer.headers.get("Content-Length", ""), answer.headers.get(wire.STATE_TOKENS, "")
            if not (size.isdigit() and tokens.isdigit()):
                raise self._server.stranger("a state without its size")
            yield MovingState(num_tokens=int(tokens), size_bytes=int(size), parts=answer.aiter_raw())

    async def take_state(self, request: GenerateRequest, state: MovingState) -> int:
        """See `CarriesStates`."""
        head = _encode(request)
        first = len(head).to_bytes(wire.HEAD_BYTES, "little") + head
        told = await self._server.upload(wire.HANDOVER_STATE, _behind(first, state.parts))
        return int(told["num_tokens"])

    async def close(self) -> None:
        """See `PeerLink`."""
        self._pool.close()
        await self._server.close()


async def _behind(first: bytes, parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    yield first
    async for part in parts:
        yield part
