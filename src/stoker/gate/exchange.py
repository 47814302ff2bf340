"""Connections to a machine that carry one request each at a time, and are kept for the next.

Owns HTTP/1.1 as far as `POST` with an answer of frames needs it; `httptools`, the parser of the server, reads
it. The client library that all else uses takes 0.2 ms of this process for a piece of an answer, and one comes
with every token: here it is 0.02 ms (bench/gate.py).
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any, cast

import httptools
import httpx

from stoker.errors import ServerLostError, StokerError
from stoker.ipc.codec import WireError, event_decoder
from stoker.ipc.events import Failed, Finished
from stoker.remote.wire import FRAMES

if TYPE_CHECKING:
    from stoker.gate.link import OnEnd, OnEvents
    from stoker.ipc.events import Event
    from stoker.remote.connection import ServerConnection

CONNECT_S = 2.0
KEPT_S = 2.0
"""Idle connections end here first: a request on one that the machine is closing would be lost."""
MAX_KEPT = 256
"""To one machine: what it may run at once, as a crowd that comes again would have to connect again."""
MAX_ERROR_BYTES = 64 * 1024
_OK = 200


class FrameConnection(asyncio.Protocol):
    """One connection. What it carries is its `exchange`; None: it is kept."""

    def __init__(self) -> None:
        self.exchange: FrameExchange | None = None
        self.kept_s = 0.0
        self.num_answers = 0
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None

    def __repr__(self) -> str:
        return f"<FrameConnection of {self.exchange!r}>"

    @property
    def is_open(self) -> bool:
        """Whether it can carry another exchange."""
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, exchange: FrameExchange, request: bytes) -> None:
        """Send a request; what comes back is given to `exchange`."""
        assert self._transport is not None, "it is not connected"
        self.exchange, self._parser = exchange, httptools.HttpResponseParser(self)
        self._transport.write(request)

    def abort(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is connected."""
        self._transport = cast("asyncio.Transport", transport)  # of uvloop it is none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.exchange is None:  # nothing was asked: it tells that it closes
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._broken(f"its answer cannot be read: {error}")
        except WireError as error:
            self._broken(error.message)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        exchange, self.exchange = self.exchange, None
        self._transport = None
        if exchange is not None:
            exchange.lost(str(exc) if exc else "it closed the connection")

    def _broken(self, reason: str) -> None:
        exchange, self.exchange = self.exchange, None
        self.abort()
        if exchange is not None:
            exchange.lost(reason)

    # ------------------------------------------------------------ the parser's

    def on_headers_complete(self) -> None:
        """The head of an answer has come."""
        if self.exchange is not None:
            self.exchange.begin_answer(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        """A piece of its body has come."""
        if self.exchange is not None:
            self.exchange.take(data)

    def on_message_complete(self) -> None:
        """All of it has come."""
        exchange, self.exchange = self.exchange, None
        self.num_answers += 1
        if exchange is not None:
            exchange.complete(self, can_stay=self._parser.should_keep_alive())


class ConnectionPool:
    """The kept connections to one machine.

    Args:
        server: whose URL and headers they use.
    """

    def __init__(self, server: ServerConnection) -> None:
        url = httpx.URL(server.url)
        self._host, self._is_tls = url.host, url.scheme == "https"
        self._port = url.port or (443 if self._is_tls else 80)
        self._first_lines = [f"POST {url.path.rstrip('/')}%s HTTP/1.1", f"Host: {url.netloc.decode()}"]
        self._server = server
        self._kept: list[FrameConnection] = []

    def __repr__(self) -> str:
        return f"<ConnectionPool of {self._host}:{self._port}, {len(self._kept)} kept>"

    def request(self, path: str, body: bytes) -> bytes:
        """A whole request, with the key that the server has now."""
        own = [f"{name}: {value}" for name, value in self._server.headers.items() if name != "Content-Type"]
        last = f"Content-Type: {FRAMES}", "Content-Length: %d\r\n\r\n"
        head = "\r\n".join([*self._first_lines, *own, *last])
        return (head % (path, len(body))).encode("latin-1") + body

    def kept(self) -> FrameConnection | None:
        """One that is open; None: there is none."""
        now = asyncio.get_running_loop().time()
        while self._kept:
            connection = self._kept.pop()
            if connection.is_open and now - connection.kept_s < KEPT_S:
                return connection
            connection.abort()
        return None

    async def connect(self) -> FrameConnection:
        """A new one. Raises OSError, TimeoutError."""
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if self._is_tls else None
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(FrameConnection, self._host, self._port, ssl=context)
        return connection

    def keep(self, connection: FrameConnection) -> None:
        """Use it for another request."""
        if len(self._kept) >= MAX_KEPT:
            connection.abort()
            return
        connection.kept_s = asyncio.get_running_loop().time()
        self._kept.append(connection)

    def close(self) -> None:
        """Close those that carry nothing."""
        while self._kept:
            self._kept.pop().abort()


class FrameExchange:
    """One request on its way to a machine, and its events back: a `PeerRun`.

    Args:
        pool: of connections.
        server: makes errors of refusals.
        request: as it is sent.
        on_events, on_end: as in `PeerLink.run`.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        server: ServerConnection,
        request: bytes,
        on_events: OnEvents,
        on_end: OnEnd,
    ) -> None:
        self._pool, self._server, self._request = pool, server, request
        self._on_events, self._on_end = on_events, on_end
        self._decoder = event_decoder()
        self._status = 0
        self._refusal = bytearray()
        self._last: Event | None = None  # that has come
        self._is_over = False
        self._connection: FrameConnection | None = None
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._opening: asyncio.Task[None] | None = None
        if (kept := pool.kept()) is not None:
            self._send(kept)
        else:
            self._opening = asyncio.ensure_future(self._open())

    def __repr__(self) -> str:
        return f"<FrameExchange with {self._server.url}, status {self._status}>"

    @property
    def silent_s(self) -> float:
        """See `PeerRun`."""
        return self._loop.time() - self._heard_s

    @property
    def _has_ended(self) -> bool:
        """Whether the terminal event has come."""
        return isinstance(self._last, Finished | Failed)

    def abandon(self) -> None:
        """See `PeerRun`."""
        self._is_over = True
        if self._opening is not None:
            self._opening.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.exchange = None
            connection.abort()

    async def _open(self) -> None:
        try:
            connection = await self._pool.connect()
        except (OSError, TimeoutError, ssl.SSLError) as error:
            self._end(self._lost_error(str(error) or type(error).__name__))
            return
        self._send(connection)

    def _send(self, connection: FrameConnection) -> None:
        if self._is_over:
            connection.abort()
            return
        self._connection = connection
        connection.begin(self, self._request)

    # ------------------------------------------------------------ the connection's

    def begin_answer(self, status: int) -> None:
        """The head of the answer has come."""
        self._status = status
        self._heard_s = self._loop.time()

    def take(self, data: bytes) -> None:
        """A piece of the answer's body has come. Raises WireError."""
        self._heard_s = self._loop.time()
        if self._status != _OK:
            self._refusal += data[: MAX_ERROR_BYTES - len(self._refusal)]
            return
        found: list[Event] = []
        for frame in self._decoder.feed(data):
            found += frame
        if found and not self._is_over:
            self._last = found[-1]
            self._on_events(found)  # type: ignore[arg-type] # a machine sends what is about requests here

    def complete(self, connection: FrameConnection, *, can_stay: bool) -> None:
        """The whole answer has come."""
        self._connection = None
        if can_stay and connection.is_open:
            self._pool.keep(connection)
        else:
            connection.abort()
        if self._status != _OK:
            self._end(self._refused())
        elif self._has_ended:
            self._end(None)
        else:
            self._end(self._lost_error("its answer ended before the request did"))

    def lost(self, reason: str) -> None:
        """The connection has ended before the answer; a kept one may have been closed meanwhile."""
        connection, self._connection = self._connection, None
        is_stale = connection is not None and connection.num_answers > 0 and not self._status
        if is_stale and not self._is_over:
            self._opening = asyncio.ensure_future(self._open())
        elif self._has_ended:
            self._end(None)
        else:
            self._end(self._lost_error(reason))

    # ------------------------------------------------------------ its end

    def _end(self, error: StokerError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_end(error)

    def _lost_error(self, reason: str) -> ServerLostError:
        text = f"the machine at {self._server.url} was lost: {reason}"
        return ServerLostError(text, param="url", url=self._server.url)

    def _refused(self) -> StokerError:
        asked = httpx.Request("POST", self._server.url)
        return self._server.refusal(httpx.Response(self._status, content=bytes(self._refusal), request=asked))
