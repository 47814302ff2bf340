"""Servers in a thread of their own, on a loopback port that the system chose, and clients for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import openai
import pytest
import uvloop
from stand_in import StandInRuntime

from stoker.server.serve import bind
from stoker.server.service import Service
from stoker.settings import ServerSettings

if TYPE_CHECKING:
    from stoker.runtime import Runtime

T = TypeVar("T")
START_S = 60.0


class ServerThread:
    """One service on its own loop; `call` runs something there."""

    def __init__(self, make_runtime: Callable[[], Any], **settings: Any) -> None:
        self._make_runtime = make_runtime
        self._settings = ServerSettings(port=0, **{"follow_sleep": False, **settings})
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.ready: Future[dict[str, Any]] = Future()
        self._set_up: Future[tuple[asyncio.AbstractEventLoop, Service, Any]] = Future()
        self._ended: Future[None] = Future()
        self.is_stopped = False
        self._thread = threading.Thread(target=self._main, name="server")
        self._thread.start()
        self._loop, self.service, self.runtime = self._set_up.result(START_S)

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            if not self._set_up.done():
                self._set_up.set_exception(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _run(self) -> None:
        try:
            runtime = self._make_runtime()
            service = Service(runtime, self._settings, self._listener)
        except BaseException:
            self._listener.close()
            raise
        self._set_up.set_result((asyncio.get_running_loop(), service, runtime))
        await service.run(self.ready.set_result)

    def call(self, function: Callable[[], T]) -> T:
        """The result of a function that runs on the server's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(START_S)

    def wait_ended(self) -> None:
        """Until it has ended by itself; raises what ended it."""
        self.is_stopped = True
        self._ended.result(START_S)
        self._thread.join(START_S)

    def stop(self) -> None:
        """Shut down; raises what ended the service, if anything did."""
        self.is_stopped = True
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self.service.stop)
        self._ended.result(START_S)
        self._thread.join(START_S)


def make_fake_runtime() -> Runtime:
    """A real runtime with the deterministic backend, in this process."""
    from stoker.runtime import Runtime  # noqa: PLC0415 - only where it is asked for

    return Runtime(model="fake:eog_period=0", isolation="thread", slots=4, states_dir="no-such-folder")


@contextlib.contextmanager
def _servers() -> Iterator[Callable[..., ServerThread]]:
    started: list[ServerThread] = []

    def start(make_runtime: Callable[[], Any] = StandInRuntime, **settings: Any) -> ServerThread:
        started.append(ServerThread(make_runtime, **settings))
        return started[-1]

    yield start
    for server in started:
        if not server.is_stopped:
            server.stop()


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerThread]]:
    """Start servers that stop with the test."""
    with _servers() as start:
        yield start


@pytest.fixture(scope="module")
def _module_servers() -> Iterator[Callable[..., ServerThread]]:
    """Start servers that stop with the module."""
    with _servers() as start:
        yield start


@pytest.fixture(scope="session")
def _scripted() -> Iterator[ServerThread]:
    server = ServerThread(StandInRuntime, keepalive_s=0.05)
    server.ready.result(START_S)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def _fake() -> Iterator[ServerThread]:
    server = ServerThread(make_fake_runtime)
    server.ready.result(START_S)
    yield server
    server.stop()


@pytest.fixture
def scripted(_scripted: ServerThread) -> Iterator[ServerThread]:
    """A server whose runtime plays scripts."""
    yield _scripted
    _scripted.call(_scripted.runtime.reset)


@pytest.fixture(params=["stand-in", "fake"])
def server(request: pytest.FixtureRequest) -> ServerThread:
    """A server in front of the scripted runtime, then in front of a real one with the fake backend."""
    name = "scripted" if request.param == "stand-in" else "_fake"
    found: ServerThread = request.getfixturevalue(name)
    return found


@pytest.fixture
def http(server: ServerThread) -> Iterator[httpx.Client]:
    """A plain client of `server`."""
    with httpx.Client(base_url=server.url, timeout=START_S) as client:
        yield client


@pytest.fixture
def scripted_http(scripted: ServerThread) -> Iterator[httpx.Client]:
    """A plain client of `scripted`."""
    with httpx.Client(base_url=scripted.url, timeout=START_S) as client:
        yield client


@pytest.fixture
def client(server: ServerThread) -> Iterator[openai.OpenAI]:
    """The official client of `server`."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def scripted_client(scripted: ServerThread) -> Iterator[openai.OpenAI]:
    """The official client of `scripted`."""
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
async def async_client(server: ServerThread) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official asynchronous client of `server`."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Ask again until something holds; the test's own timeout is the bound."""

    def wait(holds: Callable[[], bool]) -> None:
        pause = threading.Event()
        while not holds():
            pause.wait(0.01)

    return wait
