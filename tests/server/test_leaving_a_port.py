"""Two servers at one port, one of which leaves it."""

from __future__ import annotations

import asyncio
import sys

import httpx
import pytest

from stoker.errors import MachineSetupError
from stoker.runtime import Runtime
from stoker.server.serve import bind
from stoker.server.service import Service
from stoker.settings import ServerSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ports are shared otherwise")

BODY = {"prompt": "a", "max_tokens": 100, "stream": True}


class Running:
    """A service on the running loop, at a port that it shares."""

    def __init__(self, port: int) -> None:
        self._listener = bind("127.0.0.1", port, is_shared=True)
        self.port = self._listener.getsockname()[1]
        model = "fake:eog_period=0,step_delay_s=0.02"
        runtime = Runtime(model=model, isolation="thread", slots=2, drain_s=0.2)
        self.service = Service(runtime, ServerSettings(follow_sleep=False), self._listener)
        self._is_ready = asyncio.Event()
        self.ended = asyncio.ensure_future(self.service.run(lambda _line: self._is_ready.set()))

    async def ready(self) -> None:
        """Until it serves."""
        await self._is_ready.wait()


async def leave(server: Running) -> None:
    """What a door does when it is stopped."""
    await server.service.leave_port(30.0)
    server.service.stop()
    await server.ended


async def test_a_port_is_shared_by_those_who_say_so() -> None:
    """P43: a server that does not is refused beside one that does, and the other way round."""
    with bind("127.0.0.1", 0, is_shared=True) as one:
        port = one.getsockname()[1]
        with bind("127.0.0.1", port, is_shared=True):
            pass
        with pytest.raises(MachineSetupError, match="is in use"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", 0) as one, pytest.raises(MachineSetupError, match="is in use"):
        bind("127.0.0.1", one.getsockname()[1], is_shared=True)


async def test_who_leaves_a_port_loses_no_request() -> None:
    """P43: its stream ends in full, a connection that waits is answered once more, new ones are not its."""
    old = Running(0)
    await old.ready()
    url = f"http://127.0.0.1:{old.port}"
    async with httpx.AsyncClient(base_url=url) as reading, httpx.AsyncClient(base_url=url) as idle:
        assert (await idle.get("/health")).status_code == 200
        async with reading.stream("POST", "/v1/completions", json=BODY) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            new = Running(old.port)
            await new.ready()
            leaving = asyncio.ensure_future(leave(old))
            await asyncio.sleep(0.2)
            again = await idle.get("/health")
            assert (again.status_code, again.headers.get("connection")) == (200, "close")
            assert old.service.num_live == 1, "it is the old one that has answered"
            answered = old.service.server.server_state.total_requests
            for _ in range(20):
                async with httpx.AsyncClient(base_url=url) as fresh:
                    text = await fresh.post("/v1/completions", json=BODY | {"max_tokens": 1})
                    assert text.status_code == 200
            its_own = 1  # the stream, if it has ended meanwhile
            assert old.service.server.server_state.total_requests <= answered + its_own
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        await leaving
    new.service.stop()
    await new.ended


async def test_it_does_not_wait_for_ever() -> None:
    """P43: past its time it returns, with a stream under way, which `stop` then ends with a word."""
    old = Running(0)
    await old.ready()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{old.port}") as http:
        async with http.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 1000}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await old.service.leave_port(0.1)
            assert old.service.num_live == 1
            old.service.stop()
            told = [line async for line in lines if line]
        assert told[-1] == "data: [DONE]"
        assert '"finish_reason":"cancelled"' in told[-2]
    await old.ended
