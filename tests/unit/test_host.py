"""The engine's host against a scripted engine, in a real child process or a thread: what clients see when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, request, text_of

from stoker.engine.carrier import Carrier, ProcessCarrier, ThreadCarrier
from stoker.engine.host import EngineHost
from stoker.engine.state import EngineState
from stoker.errors import (
    EngineCrashedError,
    InvalidRequestError,
    ModelFileError,
    ModelLoadError,
    NotReadyError,
    QueueFullError,
    RequestNotFoundError,
    RequestTimeoutError,
)
from stoker.messages import Delta, Event, Failed, Finished, GetStatus, ModelSpec, PromptEcho, Tokenize
from stoker.request import FinishReason, GenerateRequest
from stoker.settings import EngineSettings
from stoker.streams import RequestStream

MODEL = ModelSpec(id="m", path="good")


def in_process(settings: EngineSettings) -> Carrier:
    """The stand-in as a real child."""
    return ProcessCarrier(settings, module="scripted_engine")


def in_thread(settings: EngineSettings) -> Carrier:
    """The stand-in in a thread."""
    return ThreadCarrier(settings, ScriptedEngine)


both = pytest.mark.parametrize("carrier", [in_process, in_thread])


@pytest.fixture(autouse=True)
def _stand_in_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@asynccontextmanager
async def hosting(
    carrier: Callable[[EngineSettings], Carrier] = in_process, *specs: ModelSpec, **fields: Any
) -> AsyncIterator[EngineHost]:
    """A started host, closed at the end."""
    host = EngineHost(EngineSettings(**fields), list(specs or [MODEL]), new_carrier=carrier)
    await host.start()
    try:
        yield host
    finally:
        await host.close(0.0)


class Client:
    """One request's consumer: what it has been shown."""

    def __init__(self, host: EngineHost, request_id: str, asked: GenerateRequest) -> None:
        self.stream = RequestStream(request_id, host.cancel)
        self.events: list[Event] = []
        host.submit(request_id, asked, self.stream.push)

    async def read(self, num_tokens: int) -> Client:
        """Read until so many tokens were delivered in all."""
        while len(self.tokens) < num_tokens:
            self.events.append(await anext(self.stream))
        return self

    async def read_all(self) -> Client:
        """Read to the end."""
        async for event in self.stream:
            self.events.append(event)
        return self

    async def error(self) -> Exception:
        """Read to the end, which is an error."""
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller says which
            await self.read_all()
        return caught.value

    @property
    def deltas(self) -> list[Delta]:
        """What was shown of the text."""
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def tokens(self) -> list[int]:
        """All token ids, in order."""
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        """All text, in order."""
        return "".join(delta.text for delta in self.deltas)


def kill(host: EngineHost) -> int:
    """Kill -9, as anybody might; the pid that was killed."""
    pid = host.pid
    os.kill(pid, signal.SIGKILL)
    return pid


@both
async def test_a_request_is_answered_to_its_end(carrier) -> None:
    """L6: deltas, then one terminal event, by either carrier."""
    async with hosting(carrier) as host:
        client = await Client(host, "a", request(max_tokens=6, n=2)).read_all()
        assert sorted(client.tokens) == [*range(6), *range(100, 106)]
        assert sum(isinstance(event, Finished) for event in client.events) == 1
        assert host.stats()["num_live_requests"] == 0
        assert host.stats()["num_sinks"] == 0


async def test_four_streams_survive_a_kill_with_nothing_lost_or_repeated() -> None:
    """L3, bar 5: the delivered part stays, the rest continues, nobody sees an error."""
    async with hosting() as host:
        clients = [Client(host, str(i), request(max_tokens=6, pause_after=3)) for i in range(4)]
        for client in clients:
            await client.read(3)
        old = kill(host)
        for client in clients:
            await client.read_all()
            assert client.text == text_of(0, range(6))
        assert host.pid != old
        assert host.num_restarts == 1


async def test_ten_kills_in_a_row_lose_nothing_and_fail_nobody() -> None:
    """L3, bar 5: somebody's kill -9 is not charged to a request."""
    async with hosting() as host:
        client = Client(host, "a", request(max_tokens=11, pause_after=1))
        idle = Client(host, "b", request(max_tokens=1, pause_after=0))
        for life in range(10):
            await client.read(life + 1)
            kill(host)
        await client.read_all()
        assert client.tokens == list(range(11))
        assert host.num_restarts == 10
        assert host.state is EngineState.SERVING
        await idle.stream.aclose()


async def test_an_exception_in_a_thread_carried_engine_restarts_it() -> None:
    """L3: the same replay by the other carrier."""
    async with hosting(in_thread) as host:
        victim = Client(host, "a", request(max_tokens=6, pause_after=3))
        await victim.read(3)
        killer = Client(host, "k", request(die="raise", die_at=2))
        assert isinstance(await killer.error(), EngineCrashedError)
        assert (await victim.read_all()).tokens == list(range(6))


async def test_a_step_that_never_ends_is_killed_and_continued() -> None:
    """L3: heartbeats go on, but the step is over its limit."""
    async with hosting(watchdog_s=20.0) as host:
        client = await Client(host, "a", request(max_tokens=6, hang_at=3)).read(3)
        host._settings = EngineSettings(watchdog_s=0.4)
        await client.read_all()
        assert client.tokens == list(range(6)) or client.tokens[:3] == [0, 1, 2]
