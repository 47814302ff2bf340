"""Connections of a gate to a machine: which are used again, and what of an answer the gate is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from stoker.errors import ServerLostError, StokerError
from stoker.gate import exchange
from stoker.gate.exchange import ConnectionPool, FrameExchange
from stoker.ipc.codec import encode_events
from stoker.ipc.events import Delta, Finished, Queued, RequestEvent
from stoker.ipc.usage import Timings, Usage
from stoker.remote.connection import ServerConnection

TOKENS: list[RequestEvent] = [Delta(request_id="r", index=0, token_ids=[number]) for number in range(3)]
END = Finished(request_id="r", usage=Usage(), timings=Timings())
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def chunk(*events: RequestEvent) -> bytes:
    """A frame an event, in one piece of a body."""
    data = b"".join(encode_events([event]) for event in events)
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class Machine:
    """Answers each request with the same bytes, once as many wait as are to be there together."""

    answer: bytes
    num_together: int = 1
    connections: list[asyncio.Task[None] | None] = field(default_factory=list)
    waiting: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until the gate closes it."""
        self.connections.append(asyncio.current_task())
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.waiting.append(writer)
                if len(self.waiting) == self.num_together:
                    for each in self.waiting:
                        each.write(self.answer)
                    self.waiting.clear()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()


@asynccontextmanager
async def pool_before(machine: Machine) -> AsyncIterator[tuple[ConnectionPool, ServerConnection]]:
    """The connections of a gate to that machine."""
    async with await asyncio.start_server(machine.serve, "127.0.0.1", backlog=256) as listening:
        port = listening.sockets[0].getsockname()[1]
        server = ServerConnection(f"http://127.0.0.1:{port}", None)
        pool = ConnectionPool(server)
        yield pool, server
        pool.close()
        await asyncio.gather(*filter(None, machine.connections))


async def asked(
    pool: ConnectionPool, server: ServerConnection
) -> tuple[list[RequestEvent], StokerError | None]:
    """The events of one request, and why there is no end."""
    told: list[RequestEvent] = []
    ended: asyncio.Future[StokerError | None] = asyncio.get_running_loop().create_future()
    request = pool.request("/v1/runtime/handover", b"")
    run = FrameExchange(pool, server, request, told.extend, ended.set_result)
    error = await ended
    run.abandon()
    return told, error


async def test_a_crowd_uses_the_connections_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: as many as a large machine runs at once; connecting costs both sides as much as some tokens."""
    monkeypatch.setattr(exchange, "KEPT_S", 60.0)
    machine = Machine(HEAD + chunk(END) + LAST, num_together=200)
    async with pool_before(machine) as (pool, server):
        for _ in range(3):
            found = await asyncio.gather(*(asked(pool, server) for _ in range(machine.num_together)))
            assert found == [([END], None)] * machine.num_together
    assert len(machine.connections) == machine.num_together


async def test_events_that_come_in_one_piece_are_told_in_order() -> None:
    """P7: none is lost or doubled, and the terminal one is the end."""
    machine = Machine(HEAD + chunk(Queued("r", 0)) + chunk(*TOKENS, END) + LAST)
    async with pool_before(machine) as found:
        assert await asked(*found) == ([Queued("r", 0), *TOKENS, END], None)


async def test_an_answer_without_a_terminal_event_is_a_lost_machine() -> None:
    """P7: so that the request goes on elsewhere, from the tokens that came."""
    machine = Machine(HEAD + chunk(*TOKENS) + LAST)
    async with pool_before(machine) as found:
        told, error = await asked(*found)
    assert told == TOKENS
    assert isinstance(error, ServerLostError)
