"""The machine's sleep: a runtime on a private bus where logind is a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from stoker.errors import NotReadyError
from stoker.power.sleep import SleepWatch

if sys.platform != "linux":
    pytest.skip("logind is Linux's", allow_module_level=True)
from logind_stand_in import DAEMON, LogindStandIn, PrivateBus

pytestmark = pytest.mark.skipif(not DAEMON, reason="needs dbus-daemon")


class RuntimeStandIn:
    """Notes what it is asked; `gate` holds a suspend up."""

    def __init__(self) -> None:
        self.is_suspended = False
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self._news = asyncio.Event()

    async def suspend(self, reason: str = "sleep", *, grace_s: float | None = None) -> None:
        """Suspended once the gate is open."""
        self._note(f"suspend {reason} {grace_s}")
        if self.error:
            raise self.error
        await self.gate.wait()
        self.is_suspended = True
        self._note("suspended")

    async def resume(self) -> None:
        """Serving at once."""
        self.is_suspended = False
        self._note("resume")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self._news.set()

    async def until(self, *calls: str) -> None:
        """Wait until exactly these have happened."""
        while self.calls != list(calls):
            self._news.clear()
            await self._news.wait()


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateBus]:
    """One bus for this module."""
    found = PrivateBus(tmp_path_factory.mktemp("bus"))
    yield found
    found.stop()


@pytest.fixture
async def logind(bus: PrivateBus) -> AsyncIterator[LogindStandIn]:
    """The stand-in on it."""
    async with LogindStandIn(bus.address) as found:
        yield found


@contextlib.asynccontextmanager
async def watching(runtime: RuntimeStandIn, address: str) -> AsyncIterator[asyncio.Task[None]]:
    """A watch that runs beside the block."""
    task = asyncio.create_task(SleepWatch(runtime, address).run())
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until(holds: Callable[[], bool]) -> None:
    """Ask again at each turn of the loop."""
    while not holds():  # noqa: ASYNC110 - a descriptor that is closed tells nobody
        await asyncio.sleep(0.001)


SLEPT = ("suspend sleep 0.0", "suspended")


async def test_a_runtime_sleeps_and_wakes_with_its_machine(bus, logind):
    """SPEC L2: a delay lock, suspend without grace, the lock given up after it; at waking the next lock."""
    runtime = RuntimeStandIn()
    runtime.gate.clear()
    async with watching(runtime, bus.address):
        await logind.has_been_asked(1)
        assert logind.asked[0][0::3] == ["sleep", "delay"]
        assert logind.asked[0][1] == "Stoker"
        logind.tell(is_asleep=True)
        await runtime.until(SLEPT[0])
        assert logind.is_held(0)  # the machine waits for us
        runtime.gate.set()
        await runtime.until(*SLEPT)
        await until(lambda: not logind.is_held(0))
        logind.tell(is_asleep=False)
        await runtime.until(*SLEPT, "resume")
        await logind.has_been_asked(2)
        assert logind.is_held(1)
        logind.tell(is_asleep=True)
        await runtime.until(*SLEPT, "resume", *SLEPT)
    await until(lambda: not logind.is_held(1))


async def test_who_was_suspended_before_the_machine_slept_stays_so(bus, logind):
    """SPEC L2: a person's suspend is not undone by opening the lid."""
    runtime = RuntimeStandIn()
    runtime.is_suspended = True
    async with watching(runtime, bus.address):
        await logind.has_been_asked(1)
        logind.tell(is_asleep=True)
        await runtime.until(*SLEPT)
        logind.tell(is_asleep=False)
        await logind.has_been_asked(2)
        await runtime.resume()  # the person's
        logind.tell(is_asleep=True)
        await runtime.until(*SLEPT, "resume", *SLEPT)
        logind.tell(is_asleep=False)
        await runtime.until(*SLEPT, "resume", *SLEPT, "resume")


async def test_a_machine_that_does_not_sleep_after_all_resumes_before_the_suspend_is_through(bus, logind):
    """SPEC L2: waking does not wait for the end of the suspend."""
    runtime = RuntimeStandIn()
    runtime.gate.clear()
    async with watching(runtime, bus.address):
        await logind.has_been_asked(1)
        logind.tell(is_asleep=True)
        await runtime.until(SLEPT[0])
        logind.tell(is_asleep=False)
        await runtime.until(SLEPT[0], "resume")
        await logind.has_been_asked(2)
        runtime.gate.set()
        await until(lambda: not logind.is_held(0))
        assert logind.is_held(1)  # the lock of the next sleep is another


async def test_a_suspend_that_fails_lets_the_machine_sleep(bus, logind, caplog):
    """SPEC L2: an error of ours costs the machine no five seconds, and is told."""
    runtime = RuntimeStandIn()
    for number, error in enumerate((NotReadyError("not started"), RuntimeError("a bug"))):
        runtime.error = error
        async with watching(runtime, bus.address):
            await logind.has_been_asked(number + 1)
            logind.tell(is_asleep=True)
            await until(lambda number=number: not logind.is_held(number))
        assert str(error) in caplog.text


async def test_only_logind_is_believed(bus, logind):
    """SPEC L2: another process on the bus cannot suspend us by sending the signal to us."""
    runtime = RuntimeStandIn()
    async with watching(runtime, bus.address), LogindStandIn(bus.address, name="") as stranger:
        await logind.has_been_asked(1)
        stranger.tell(is_asleep=True, to=logind.askers[0])
        stranger.tell(is_asleep=True)
        await stranger.is_through()
        logind.tell(is_asleep=True)
        await runtime.until(*SLEPT)
        logind.tell(is_asleep=False)
        await runtime.until(*SLEPT, "resume")


async def test_without_a_bus_or_without_logind_nothing_is_followed(tmp_path, bus, caplog):
    """SPEC L2: a debug line, no more; containers have neither."""
    caplog.set_level(logging.DEBUG, "stoker")
    for address in (f"unix:path={tmp_path}/none", "nonsense", bus.address):
        caplog.clear()
        await SleepWatch(RuntimeStandIn(), address).run()
        assert [record.levelno for record in caplog.records] == [logging.DEBUG]
        assert "not followed" in caplog.text


async def test_a_refused_lock_ends_the_watch(bus, logind, caplog):
    """SPEC L2: with a debug line too."""
    caplog.set_level(logging.DEBUG, "stoker")
    logind.refuses = True
    await SleepWatch(RuntimeStandIn(), bus.address).run()
    assert "AccessDenied" in caplog.text


async def test_a_lock_refused_at_waking_does_not_keep_the_runtime_asleep(bus, logind, caplog):
    """SPEC L2: it resumes, and its next sleep is followed without a lock."""
    runtime = RuntimeStandIn()
    async with watching(runtime, bus.address):
        await logind.has_been_asked(1)
        logind.tell(is_asleep=True)
        await runtime.until(*SLEPT)
        logind.refuses = True
        logind.tell(is_asleep=False)
        await runtime.until(*SLEPT, "resume")
        logind.tell(is_asleep=True)
        await runtime.until(*SLEPT, "resume", *SLEPT)
    assert "no time to save states" in caplog.text


async def test_a_bus_that_goes_away_while_the_machine_sleeps_leaves_nobody_asleep(tmp_path, caplog):
    """SPEC L2: nobody would tell of the waking, so the runtime resumes."""
    bus = PrivateBus(tmp_path)
    runtime = RuntimeStandIn()
    logind = await LogindStandIn(bus.address).__aenter__()
    watch = asyncio.create_task(SleepWatch(runtime, bus.address).run())
    await logind.has_been_asked(1)
    logind.tell(is_asleep=True)
    await runtime.until(*SLEPT)
    bus.stop()
    await watch
    assert runtime.calls == [*SLEPT, "resume"]
    assert "the system's bus is gone" in caplog.text
    with contextlib.suppress(EOFError, OSError):
        await logind.__aexit__()
