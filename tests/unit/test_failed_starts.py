"""An engine that cannot be started, for want of whatever it takes: tried again, told of, nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from scripted_engine import request
from test_supervisor import MODEL, Client, hosting, in_process, kill, serving

from stoker.client.process import transport as transports
from stoker.client.process.lifecycle import EngineState
from stoker.client.process.transport import (
    DescriptorReserve,
    ProcessTransport,
    ThreadTransport,
    Transport,
)
from stoker.client.supervisor import EngineSupervisor
from stoker.engine.process import EngineInThread
from stoker.errors import EngineError, MachineSetupError, NotReadyError
from stoker.settings import EngineSettings


@pytest.fixture(autouse=True)
def _stand_in_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def refuse(error: BaseException) -> Callable[..., object]:
    """A function that raises."""

    def refused(*_args: object, **_kwargs: object) -> object:
        raise error

    return refused


FULL = OSError(errno.EMFILE, "Too many open files")
FAULTS = {
    "a socket pair": (socket, "socketpair", FULL),
    "its buffers": (socket.socket, "setsockopt", OSError(errno.ENOBUFS, "No buffer space available")),
    "a pipe": (os, "pipe", OSError(errno.ENFILE, "Too many open files in system")),
    "a process": (subprocess, "Popen", OSError(errno.EAGAIN, "Resource temporarily unavailable")),
    "memory": (subprocess, "Popen", MemoryError()),
    "a thread": (threading.Thread, "start", RuntimeError("can't start new thread")),
    "its settings": (transports, "config_of", ValueError("not serialisable")),
}


class Faulty:
    """Makes transports whose start is refused `what`, as often as `num_faults` says."""

    def __init__(self, what: str, num_faults: int) -> None:
        self.owner, self.name, self.error = FAULTS[what]
        self.num_faults = num_faults
        self.num_starts = 0

    def __call__(self, settings: EngineSettings) -> Transport:
        """The transport of the next engine."""
        transport = in_process(settings)
        start = transport.start

        async def refused(on_events: transports.EventSink) -> None:
            self.num_starts += 1
            if self.num_starts > self.num_faults:
                await start(on_events)
                return
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.owner, self.name, refuse(self.error), raising=False)
                await start(on_events)

        transport.start = refused  # type: ignore[method-assign]
        return transport


async def until(host: EngineSupervisor, state: str) -> None:
    """Wait until that is how it is."""
    while host.health().state != state:  # noqa: ASYNC110 - the host announces it to nobody
        await asyncio.sleep(0)


def num_descriptors() -> int:
    """Open ones of this process; what other tests have left behind is closed first."""
    gc.collect()
    return psutil.Process().num_fds()


def descriptors() -> dict[int, str]:
    """What each open one is: a failure that says only how many teaches nothing."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            found[int(entry.name)] = str(entry.readlink())
    return found


def num_held() -> int:
    """Open ones of the kind that a reserve holds."""
    return list(descriptors().values()).count(os.devnull)


async def back_at(before: int) -> None:
    """Wait until no more are open; threads of this process close theirs when they get to it."""
    for _ in range(500):
        if num_descriptors() <= before:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{before} were open, and now {descriptors()}")


def children() -> set[int]:
    """Ids of the processes that this one has started."""
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.long
@pytest.mark.parametrize("what", FAULTS)
async def test_a_start_that_is_refused_something_is_tried_again_and_leaves_nothing_open(what: str) -> None:
    """L3, L9: whatever is missing, the request goes on in the engine that comes at last."""
    async with hosting() as host:
        client = await Client(host, "a", request(max_tokens=6, pause_after=3)).read(3)
        before, others = num_descriptors(), children() - {host.pid}
        faulty = host._new_transport = Faulty(what, 2)
        kill(host)
        assert (await client.read_all()).tokens == list(range(6))
        assert faulty.num_starts == 3
        assert host.health().state == "serving"
        await back_at(before)
        assert children() - others == {host.pid}


@pytest.mark.long
async def test_a_connection_that_cannot_be_made_ends_the_child_that_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L3, L9: the child exists by then, and does not stay."""
    before = num_descriptors()
    transport = ProcessTransport(EngineSettings(), "scripted_engine")
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "create_unix_connection", refuse(OSError(errno.ENOMEM, "no memory")))
    with pytest.raises(MachineSetupError, match="no memory"):
        await transport.start(lambda _: None)
    with pytest.raises(ProcessLookupError):
        os.kill(transport.pid, 0)
    await back_at(before)


async def test_an_engine_thread_that_cannot_be_started_is_a_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L3, L9: the same by the other transport."""
    transport = ThreadTransport(EngineSettings(), EngineInThread)
    monkeypatch.setattr(threading.Thread, "start", refuse(RuntimeError("can't start new thread")))
    with pytest.raises(MachineSetupError, match="can't start new thread"):
        await transport.start(lambda _: None)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """The limit of this process is reached, down to the last."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors() + 64, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
async def test_an_engine_is_started_though_no_descriptor_is_left() -> None:
    """L9: some are kept for that; killed and suspended again and again, there are always enough."""

    def reserved(settings: EngineSettings) -> Transport:
        return ProcessTransport(settings, "scripted_engine", host._reserve)

    async with hosting() as host:
        host._new_transport = reserved
        client = await Client(host, "a", request(max_tokens=6, pause_after=1)).read(1)
        with no_descriptor_left():
            for life in range(2, 5):
                kill(host)
                await client.read(life)
            await host.suspend()
            await host.wake()
            await client.read(5)
        assert host.num_restarts == 3
        await client.stream.aclose()


def test_a_reserve_is_filled_as_far_as_there_are_descriptors() -> None:
    """L9: what is short is taken later; closed, nothing is held."""
    before = num_held()
    reserve = DescriptorReserve(4)
    with no_descriptor_left():
        reserve.fill()
        assert len(reserve) == 0
    reserve.fill()
    assert num_held() == before + 4
    with reserve.lent():
        assert num_held() == before
    assert len(reserve) == 4
    reserve.close()
    assert num_held() == before


async def test_an_engine_that_does_not_start_is_tried_on_and_told_of_truly() -> None:
    """L3, L9, S6: after three failures nothing is kept waiting, and it serves once the cause has gone."""
    async with hosting() as host:
        assert (host.health().state, host.health().is_alive) == ("serving", True)
        client = await Client(host, "a", request(pause_after=1)).read(1)
        faulty = host._new_transport = Faulty("a socket pair", 10**9)
        kill(host)
        assert isinstance(await client.error(), MachineSetupError)
        health = host.health()
        assert (health.state, health.is_alive, health.num_failed_starts) == ("failing", False, 3)
        assert "Too many open files" in health.reason
        assert health.next_start_s is not None
        for refused in (lambda: Client(host, "b", request()), host.check_open):
            with pytest.raises(NotReadyError, match="Too many open files") as caught:
                refused()
            assert caught.value.retry_after_s is not None
        faulty.num_faults = 0
        await until(host, "serving")
        assert host.health().reason == ""
        assert (await Client(host, "c", request(max_tokens=2)).read_all()).tokens == [0, 1]


async def test_a_resume_tries_anew_whatever_failed_before() -> None:
    """L2, L9: it is not refused for starts that failed before the suspension."""
    async with hosting() as host:
        faulty = host._new_transport = Faulty("a socket pair", 10**9)
        kill(host)
        await until(host, "failing")
        await host.suspend()
        assert host.health().state == "suspended"
        faulty.num_faults = 0
        await host.wake()
        assert host.health().state == "serving"


async def test_the_delay_between_failed_starts_grows_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """L3, L9: ever more rarely, so that a cause that lasts does not fill the log."""
    waits: list[float | None] = []
    async with hosting() as host:
        wait = host._suspension.until

        async def noted(condition: Callable[[], bool], limit_s: float | None = None) -> None:
            waits.append(limit_s)
            await wait(condition, 0.0)

        monkeypatch.setattr(host._suspension, "until", noted)
        host._new_transport = Faulty("a pipe", 9)
        kill(host)
        await until(host, "failing")
        await until(host, "serving")
    assert waits[:10] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0]
    told = [record.getMessage() for record in caplog.records if "failed starts in a row" in record.message]
    assert [int(line.partition("(")[2].split()[0]) for line in told] == [1, 2, 4, 8]
    assert "the next start is in 2.0 s" in told[-1]


async def test_a_host_that_fails_by_itself_ends_everything_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L6, L9: nothing lingers: streams, calls, health and whoever waits for the end are told why."""
    async with hosting() as host:
        client = await Client(host, "a", request(pause_after=1)).read(1)
        monkeypatch.setattr(host._backoff, "after_serving", refuse(TypeError("a bug")))
        kill(host)
        with pytest.raises(EngineError, match="TypeError: a bug"):
            await host.ended()
        await client.read_all()
        health = host.health()
        assert (health.state, health.is_alive) == ("failed", False)
        assert "a bug" in health.reason
        for refused in (host.check_open, lambda: Client(host, "b", request())):
            with pytest.raises(EngineError, match="a bug"):
                refused()
        with pytest.raises(EngineError, match="a bug"):
            await host.suspend()
        with pytest.raises(ProcessLookupError):
            os.kill(host.pid, 0)


async def test_an_end_that_was_asked_for_is_no_failure() -> None:
    """L4: whoever waits for the end is told by returning."""
    host = EngineSupervisor(serving(MODEL), new_transport=in_process)
    await host.start()
    ended = asyncio.ensure_future(host.ended())
    await host.close(0.0)
    await ended
    assert host.health().state == str(EngineState.CLOSED)
    assert not host.health().is_alive
