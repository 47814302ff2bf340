"""Connections of the HTTP server, bounded in number and in the time a client may take (SPEC S4).

Owns a connection until the head of a request has come, between requests, and where its client does not read;
how many connections the limit of file descriptors allows; and in which pieces what is written leaves. Bodies
are `bodies`', requests the application's. uvicorn has no bound on a head or on the time it takes, and closes
nothing to let a new client in.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from stoker.errors import ErrorInfo, RequestTimeoutError, ServerBusyError
from stoker.server.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


RESERVED = 128
"""For the engine's start, model files, prefix files and images; some 40 are in use."""
_MIN_CONNECTIONS = 16
_UNLIMITED = 2**20


def descriptor_limit() -> int:
    """Descriptors that this process may open."""
    if sys.platform == "win32":
        return _UNLIMITED
    import resource  # noqa: PLC0415 - not there on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_limit(num_connections: int) -> None:
    """Raise the soft limit, as far as the hard one allows for so many connections and the reserve."""
    wanted = num_connections + RESERVED
    if sys.platform == "win32" or descriptor_limit() >= wanted:
        return
    import resource  # noqa: PLC0415 - not there on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connections_within(wanted: int) -> int:
    """How many connections the limit allows, `wanted` at most."""
    return min(wanted, max(_MIN_CONNECTIONS, descriptor_limit() - RESERVED))


log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 16
"""Requests that may come on a connection before the first of them is answered."""
STALLED_S = 60.0
"""Time without a byte read after which a client that has megabytes to read is given up."""
MAX_REFUSED = 32
"""Refused connections that may stay open for their clients to read why, beside the bound."""
MAX_GATHERED_BYTES = 64 * 1024
"""More is written at once, so that the transport can ask for a pause."""
_LINGER_S = 2.0  # for a refused client to read why
_LOG_EVERY_S = 60.0

_MALFORMED = ErrorInfo(code="invalid_request", message="this is not an HTTP/1.1 request", http_status=400)
_LONG_HEAD = ErrorInfo(
    code="request_too_large",
    message=f"the head of the request is over {MAX_HEAD_BYTES} bytes",
    http_status=431,
)


class Connections:
    """All open connections of one server.

    At the bound the one that has waited longest for its client gives way to a new one: an idle one, or one
    whose request is incomplete. Where every connection has a request at work the new one is refused; it stays
    open for a moment and is never served.

    Args:
        bound: how many there may be.
        receive_timeout_s: seconds that a head may take.

    Attributes:
        are_dismissed: each ends with its next answer.
    """

    def __init__(self, bound: int, receive_timeout_s: float) -> None:
        self.receive_timeout_s = receive_timeout_s
        self.are_dismissed = False
        self._bound = bound
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # for their clients, the longest first
        self._refused: dict[Connection, None] = {}  # the oldest first
        self._num_malformed = 0
        self._log_at_s = 0.0

    def __repr__(self) -> str:
        return f"Connections({len(self._open)} of {self._bound}, {len(self._waiting)} waiting)"

    def __len__(self) -> int:
        return len(self._open)

    def dismiss(self) -> None:
        """Have each end with its answer, the one that is being written or the next: clients connect anew."""
        self.are_dismissed = True
        for connection in self._open:
            connection.end_with_answer()

    def enter(self, connection: Connection) -> None:
        """Take in a new connection, which waits for its client, or refuse it."""
        if len(self._open) >= self._bound:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                self._refuse(connection)
                return
            self.leave(oldest)
            oldest.give_way()
        self._open.add(connection)
        self._waiting[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget a connection. Idempotent."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        self._refused.pop(connection, None)

    def work(self, connection: Connection) -> None:
        """A whole request has come on it."""
        self._waiting.pop(connection, None)

    def wait(self, connection: Connection) -> None:
        """It waits for its client again."""
        if connection in self._open:
            self._waiting.setdefault(connection)

    def note_malformed(self) -> None:
        """Log that something came that is not HTTP: now and then, with how often it did."""
        self._num_malformed += 1
        now_s = time.monotonic()
        if now_s >= self._log_at_s:
            log.warning("malformed HTTP requests: %d since the last such line", self._num_malformed)
            self._num_malformed, self._log_at_s = 0, now_s + _LOG_EVERY_S

    def _refuse(self, connection: Connection) -> None:
        """Tell a client that there is no room; of those that were told before, the oldest is closed."""
        if len(self._refused) >= MAX_REFUSED:
            oldest = next(iter(self._refused))
            self.leave(oldest)
            oldest.give_way()
        self._refused[connection] = None
        text = f"all {self._bound} connections of this server are at work; try again later"
        error = ServerBusyError(text, retry_after_s=_LINGER_S, max_connections=self._bound)
        connection.refuse(error.info())


class GatheredWrites(asyncio.Transport):
    """A transport that writes with the loop's next turn (SPEC S11); in all else the one that it is around.

    One system call sends all that a turn of the event loop writes to a connection: a call takes longer than
    making what it sends. An answer begins with its headers and its first text, and ends with its last text,
    the usage and the end mark; where the loop is behind, many tokens of a stream wait.

    Args:
        transport: of the connection.
        loop: that it runs on.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._gathered: list[bytes] = []
        self._num_bytes = 0

    def __repr__(self) -> str:
        return f"<GatheredWrites {self._num_bytes} bytes, {self._transport!r}>"

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes in order, soon."""
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(bytes(data))
        self._num_bytes += len(data)
        if self._num_bytes >= MAX_GATHERED_BYTES:
            self._flush()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send several."""
        for data in list_of_data:
            self.write(data)

    def _flush(self) -> None:
        gathered, self._gathered, self._num_bytes = self._gathered, [], 0
        if gathered and not self._transport.is_closing():
            self._transport.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    def write_eof(self) -> None:
        """Send what was written, and the end."""
        self._flush()
        self._transport.write_eof()

    def can_write_eof(self) -> bool:
        """As the transport."""
        return self._transport.can_write_eof()

    def close(self) -> None:
        """Send what was written, and close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what was written is dropped."""
        self._gathered.clear()
        self._transport.abort()

    def end(self) -> None:
        """Close; at once where the client does not read what was sent before."""
        self._flush()
        if self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        """As the transport."""
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        """Bytes that the client has not taken, those that are not sent yet included."""
        return self._num_bytes + self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the transport."""
        return self._transport.get_extra_info(name, default)

    def is_reading(self) -> bool:
        """As the transport."""
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        """As the transport."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As the transport."""
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """As the transport."""
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """As the transport."""
        return self._transport.get_protocol()


class Upgraded(asyncio.Protocol):
    """A connection that is a WebSocket: its protocol hears everything, and its end ends the connection too.

    uvicorn makes that protocol itself and tells the HTTP connection nothing more.

    Args:
        connection: as which it came; it has the bounds.
        protocol: of the WebSocket.
    """

    def __init__(self, connection: Connection, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol), f"{protocol!r} is not one that uvicorn has"
        self._connection = connection
        self._protocol = protocol

    def __repr__(self) -> str:
        return f"<Upgraded to {self._protocol!r}>"

    def data_received(self, data: bytes) -> None:
        """Frames, or parts of them."""
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """The client reads slower than is written; uvicorn ends one that answers no ping."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """It has read."""
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or this server, has closed it."""
        self._connection.leave()
        self._protocol.connection_lost(exc)


class Connection(HttpToolsProtocol):
    """One connection.

    Args:
        connections: all of the server.
        given: uvicorn's own arguments.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = connections
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._num_head = 0  # bytes of the head that have come
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """A client has come; its request has to."""
        self._writes = GatheredWrites(transport, self.loop)
        super().connection_made(self._writes)
        self._arm(self._all.receive_timeout_s, self._on_late_head)
        self._all.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or this server, has closed it."""
        self.leave()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Stop what watches it, and count it no more."""
        self._disarm()
        self._cancel_stall()
        self._all.leave(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head, a body, or several of both."""
        while data and self._is_in_head and not self._is_refused:
            if not self._num_head:  # the first of them
                self._arm(self._all.receive_timeout_s, self._on_late_head)
            room = MAX_HEAD_BYTES - self._num_head
            if not room:
                self.refuse(_LONG_HEAD)
                return
            part, data = data[:room], data[room:]
            self._num_head += len(part)
            self._feed(part)
        if data:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._all.note_malformed()
            self.refuse(_MALFORMED)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self._upgrade()
            # of any other protocol the request itself is being answered

    def _upgrade(self) -> None:
        """Hand the connection to the WebSocket's protocol; it counts as one at work until it is lost."""
        self._disarm()
        self._all.work(self)
        self.handle_websocket_upgrade()
        self._writes.set_protocol(Upgraded(self, self._writes.get_protocol()))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or behind a chunked body a trailer."""
        if not self._is_in_head:
            self._num_head += len(name) + len(value)
            if self._num_head > MAX_HEAD_BYTES:
                raise httptools.HttpParserError(f"trailers of over {MAX_HEAD_BYTES} bytes")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head has come."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError(f"over {MAX_PIPELINED} requests ahead")
        self._disarm()
        self._is_in_head, self._num_head = False, 0
        super().on_headers_complete()
        if self._all.are_dismissed:
            self.end_with_answer()

    def on_message_complete(self) -> None:
        """The body has come."""
        super().on_message_complete()
        self._is_in_head, self._num_head = True, 0
        if self.parser.should_upgrade() and self._should_upgrade():
            return
        if self.cycle.response_complete:  # it was answered before, and uvicorn times it no more
            self._arm(self.timeout_keep_alive, self.give_way)
        else:
            self._all.work(self)

    def on_response_complete(self) -> None:
        """The answer has been written."""
        super().on_response_complete()
        is_all_answered = self.cycle.response_complete  # else a request that was sent ahead has begun
        is_incomplete = not (self.pipeline or self._is_in_head)
        if is_all_answered or is_incomplete:
            self._all.wait(self)
        if not self._is_in_head:  # the rest of a refused body
            self._arm(self._all.receive_timeout_s, self.give_way)

    def pause_writing(self) -> None:
        """The client reads slower than is written."""
        super().pause_writing()
        self._watch_stall(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has read."""
        self._cancel_stall()
        super().resume_writing()

    def refuse(self, info: ErrorInfo) -> None:
        """Answer with an error, and close once the client has had time to read it."""
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(info)
            head = STATUS_LINE[info.http_status] + b"content-type: application/json\r\nconnection: close\r\n"
            retry = b"" if info.retry_after_s is None else b"retry-after: %d\r\n" % max(1, info.retry_after_s)
            self.transport.write(b"%b%bcontent-length: %d\r\n\r\n%b" % (head, retry, len(body), body))
            self.transport.write_eof()
            self._arm(_LINGER_S, self.give_way)
        else:  # an error in the middle of another answer would be read as a part of it
            self.give_way()

    def end_with_answer(self) -> None:
        """Close once the request that came last is answered, if there is one."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def give_way(self) -> None:
        """Close at once, whatever is still to be written."""
        self._writes.end()

    def _on_late_head(self) -> None:
        """The head did not come in time; who sent nothing of it needs no answer."""
        if not self._num_head:
            self.give_way()
            return
        text = f"the head of the request took over {self._all.receive_timeout_s:g} s"
        self.refuse(RequestTimeoutError(text).info())

    def _arm(self, after_s: float, act: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(after_s, act)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_stall(self, num_bytes: int) -> None:
        """End it unless fewer bytes than now wait to be read when the time is up."""

        def look() -> None:
            waiting = self.transport.get_write_buffer_size()
            if waiting < num_bytes:
                self._watch_stall(waiting)
            else:
                self.give_way()

        self._cancel_stall()
        self._stall = self.loop.call_later(STALLED_S, look)

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
