"""More idle connections than a program has descriptors, while its engine is killed, suspended and resumed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import psutil
import pytest
from real_server import MODEL, Answer, Event, RealServer, is_a, serving

NUM_CONNECTIONS = 1100
NUM_DESCRIPTORS = 1024
NUM_TOKENS = 300


@dataclass(frozen=True)
class DescriptorLimit:
    """A program and all that it starts may have so many descriptors, and not raise that."""

    num_descriptors: int

    def enter(self, *command: str) -> list[str]:
        """The command that runs `command` so."""
        return ["sh", "-c", f'ulimit -n {self.num_descriptors} && exec "$@"', "sh", *command]


@pytest.mark.long
async def test_an_engine_comes_back_beside_1100_idle_connections() -> None:
    """L2, L3, L9: killed, suspended, resumed; the stream that runs loses nothing, new requests are taken."""
    limit = DescriptorLimit(NUM_DESCRIPTORS)
    async with serving(MODEL, group=limit, slots=2, ctx_size=2048) as server:
        engine = psutil.Process((await server.status())["engine"]["pid"])
        undisturbed = await server.stream(Answer("alone"), "The sea is", NUM_TOKENS)
        answer = Answer("disturbed")
        streaming = asyncio.create_task(server.stream(answer, "The sea is", NUM_TOKENS))
        await answer.reach(5)
        async with idle_connections(server) as num_connections:
            print(f"\n{num_connections} connections, {psutil.Process(server.pid).num_fds()} descriptors")  # noqa: T201
            engine.kill()
            await server.tape.until(lambda events: engine_states(events) == ["restarting", "serving"])
            os.kill(server.pid, signal.SIGUSR1)
            await server.tape.until(lambda events: engine_states(events)[-1] == "suspended")
            os.kill(server.pid, signal.SIGUSR2)
            await server.tape.until(lambda events: engine_states(events)[-1] == "serving")
            await streaming
            answer.assert_equals(undisturbed)
            assert (await server.http.get("/health")).json()["engine"]["state"] == "serving"
            assert len((await server.stream(Answer("new"), "The sky is", 3)).tokens) == 3
        back = ["restarting", "serving"]
        assert engine_states(server.tape.events) == [*back, "suspended", *back]


@contextlib.asynccontextmanager
async def idle_connections(server: RealServer) -> AsyncIterator[int]:
    """Open so many, say nothing, and close them at the end; gives how many were taken."""
    url = server.http.base_url
    writers: list[asyncio.StreamWriter] = []
    for _ in range(NUM_CONNECTIONS):
        with contextlib.suppress(OSError, TimeoutError):  # the server may take no more
            async with asyncio.timeout(1.0):
                writers.append((await asyncio.open_connection(url.host, url.port))[1])
    try:
        yield len(writers)
    finally:
        for writer in writers:
            writer.close()


def engine_states(events: list[Event]) -> list[str]:
    """Every state that the engine has come to since the tape began."""
    return [event["state"] for event in events if is_a(event, "engine")]
