"""The client of a crowd: streams read as bytes, at 10,000 tokens a second and more.

`bench.client` parses every event; where a server sends more than a client's core can parse, the client would
be what is measured. This one looks for the first event and for the usage at the end, and counts the rest.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import msgspec

from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bench.client import Completion

EVENT = b"data: "
END = b"data: [DONE]"
LAST_CHUNK = b"\r\n0\r\n\r\n"
USAGE = re.compile(rb'"usage": ?\{')
CHUNK_HEAD = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")
"""Stands between two pieces of a body; JSON on one line has no line ends of its own."""
TAIL_BYTES = 4096
"""Holds the usage chunk and what follows it."""
SHOWN_BYTES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished stream, in seconds of one clock and tokens by the server's own count.

    `arrivals` are the times at which events came, with the number of them.
    """

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int
    num_prompt_tokens: int
    arrivals: tuple[tuple[float, int], ...] = ()

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first event."""
        return self.first_s - self.sent_s


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Last(msgspec.Struct):
    usage: _Usage


class CrowdStream(asyncio.Protocol):
    """One request and its answer on one connection.

    Attributes:
        first: when the first event came, in seconds of the answer's clock.
        done: the answer; BenchError where it was refused or cut.
        arrivals: as in `Answer`, so far.

    Args:
        request: head and body.
    """

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[float] = loop.create_future()
        self.done: asyncio.Future[Answer] = loop.create_future()
        self.arrivals: list[tuple[float, int]] = []
        self._request = request
        self._sent_s = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._sent_s = time.perf_counter()
        # an event loop of another make has transports of its own class
        cast("asyncio.WriteTransport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count what came; the end is kept for the usage."""
        self._tail = data if len(data) >= TAIL_BYTES else self._tail[-TAIL_BYTES:] + data
        num_events = data.count(EVENT)
        if num_events:
            now_s = time.perf_counter()
            self.arrivals.append((now_s, num_events))
            if not self.first.done():
                self.first.set_result(now_s)
        if END in self._tail or self._tail.endswith(LAST_CHUNK):
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server, or this program, has closed it."""
        if not self.done.done():
            shown = self._tail[-SHOWN_BYTES:].decode(errors="replace")
            self.done.set_exception(exc or BenchError(f"the stream was cut, or is none: ...{shown}"))
        if not self.first.done():
            self.first.cancel()

    def _finish(self) -> None:
        if self.done.done():
            return
        tail = CHUNK_HEAD.sub(b"", self._tail)
        documents = [part.split(b"\n", 1)[0] for part in tail.split(EVENT) if USAGE.search(part)]
        if not (documents and self.arrivals):
            shown = tail[-SHOWN_BYTES:].decode(errors="replace")
            self.done.set_exception(BenchError(f"the stream ended without its usage: ...{shown}"))
            return
        usage = msgspec.json.decode(documents[-1], type=_Last).usage
        self.done.set_result(
            Answer(
                sent_s=self._sent_s,
                first_s=self.arrivals[0][0],
                last_s=self.arrivals[-1][0],
                num_tokens=usage.completion_tokens,
                num_prompt_tokens=usage.prompt_tokens,
                arrivals=tuple(self.arrivals),
            )
        )


@asynccontextmanager
async def open_stream(url: str, completion: Completion, model: str) -> AsyncIterator[CrowdStream]:
    """A completion on its way; leaving the block ends it.

    Raises:
        OSError: the server does not answer.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    body = completion.body(completion.model or model)
    head = (
        f"POST {completion.path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    request = head.encode() + body
    transport, stream = await loop.create_connection(lambda: CrowdStream(request), host, port)
    try:
        yield stream
    finally:
        stream.done.cancel()
        transport.close()


async def read_crowd(
    url: str, completions: Sequence[Completion], model: str, timeout_s: float = 300.0
) -> list[Answer]:
    """Stream all completions at once, each on a connection of its own.

    Raises:
        BenchError: one was refused, was cut, or took over `timeout_s`.
        OSError: the server does not answer.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_read(url, each, model, timeout_s)) for each in completions]
    outcomes = [task.result() for task in tasks]
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, Answer)]


async def _read(
    url: str, completion: Completion, model: str, timeout_s: float
) -> Answer | BenchError | OSError:
    """The answer, or why there is none: one that fails does not end the others in the middle."""
    try:
        async with asyncio.timeout(timeout_s), open_stream(url, completion, model) as stream:
            return await stream.done
    except TimeoutError:
        return BenchError(f"no complete answer in {timeout_s:g} s")
    except (BenchError, OSError) as error:
        return error
