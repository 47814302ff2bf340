"""Suspend, resume, load and unload at the supervisor, with a scripted engine in a child or a thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from scripted_engine import request, text_of
from test_supervisor import MODEL, Client, both, hosting, in_process, in_thread, kill, serving

from stoker.client.process.lifecycle import EngineState
from stoker.client.process.transport import NewTransport
from stoker.client.supervisor import EngineSupervisor
from stoker.errors import (
    InsufficientMemoryError,
    ModelFileError,
    ModelNotFoundError,
    NotReadyError,
    RequestTimeoutError,
)
from stoker.ipc.commands import GetStatus, Tokenize
from stoker.ipc.events import Finished, Paused, Resumed
from stoker.ipc.model import ModelSpec


@pytest.fixture(autouse=True)
def _stand_in_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path  # noqa: PLC0415 - as test_supervisor's own

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


async def turns_until(condition: Callable[[], bool]) -> None:
    """Until it holds; a turn of the event loop each, no time."""
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0)


def ends(client: Client) -> int:
    """Terminal events it was shown."""
    return sum(isinstance(event, Finished) for event in client.events)


@both
async def test_streams_go_on_after_a_suspension_where_they_stood(transport: NewTransport) -> None:
    """SPEC L2: nothing lost or repeated, told once that they wait and once that they go on."""
    async with hosting(transport) as host:
        clients = [Client(host, str(i), request(max_tokens=6, pause_after=3)) for i in range(3)]
        for client in clients:
            await client.read(3)
        await host.suspend()
        assert (host.state, host.is_suspended, host.is_taking) == (EngineState.SUSPENDED, True, True)
        assert [status.state for status in host.loads.statuses()] == ["suspended"]
        newcomer = Client(host, "new", request(max_tokens=2))
        await host.wake()
        assert host.state is EngineState.SERVING
        for client in clients:
            await client.read_all()
            assert client.text == text_of(0, range(6))
            kinds = [type(event) for event in client.events]
            assert (kinds.count(Paused), kinds.count(Resumed), ends(client)) == (1, 1, 1)
        assert (await newcomer.read_all()).tokens == [0, 1]
        assert host.num_restarts == 0
        assert [status.state for status in host.loads.statuses()] == ["ready"]


async def test_suspending_and_waking_again_and_again_is_one_of_each() -> None:
    """SPEC L2: idempotent, side by side and one after the other."""
    async with hosting(in_thread) as host:
        await host.wake()
        await asyncio.gather(host.suspend(), host.suspend(), host.suspend())
        await host.suspend()
        assert host.state is EngineState.SUSPENDED
        await asyncio.gather(host.wake(), host.wake())
        assert host.state is EngineState.SERVING
        assert (await host.ask(Tokenize(call_id=0, model="m", text="hi")))["tokens"] == [104, 105]


async def test_waking_within_the_grace_changes_nothing() -> None:
    """SPEC L2: an absence shorter than the grace leaves the engine as it was."""
    async with hosting(in_process) as host:
        pid = host.pid
        suspending = asyncio.create_task(host.suspend(grace_s=3600.0))
        await asyncio.sleep(0)
        await host.wake()
        await suspending
        assert (host.pid, host.state, host.is_suspended) == (pid, EngineState.SERVING, False)


async def test_a_shorter_grace_does_not_wait_for_a_longer_one() -> None:
    """SPEC L2: sleep comes at once, also where a background grace runs; both calls return."""
    async with hosting(in_thread) as host:
        long = asyncio.create_task(host.suspend(grace_s=3600.0))
        await asyncio.sleep(0)
        await host.suspend()
        await long
        assert host.state is EngineState.SUSPENDED


@both
async def test_waking_while_it_leaves_brings_it_back(transport: NewTransport) -> None:
    """SPEC L2: the engine that was told to go goes, and the next one goes on with everything."""
    async with hosting(transport) as host:
        client = await Client(host, "a", request(max_tokens=6, pause_after=3)).read(3)
        suspending = asyncio.create_task(host.suspend())
        await turns_until(lambda: host.is_suspended)
        await host.wake()
        await suspending
        assert (await client.read_all()).tokens == list(range(6))
        assert ends(client) == 1
        assert host.num_restarts == 0


async def test_an_engine_that_does_not_leave_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC L2: memory is given back whatever it does."""
    monkeypatch.setattr("stoker.client.process.instance.LEAVE_LIMIT_S", 0.05)
    async with hosting(in_process) as host:
        client = await Client(host, "a", request(max_tokens=4, pause_after=2, is_deaf=True)).read(2)
        await host.suspend()
        await host.wake()
        assert (await client.read_all()).tokens == list(range(4))
        assert host.num_restarts == 0


async def test_suspending_while_the_engine_is_away_ends_its_restart() -> None:
    """SPEC L2, L3: during the back-off there is nothing to save; nothing starts until it is woken."""
    async with hosting(in_process) as host:
        client = await Client(host, "a", request(max_tokens=4, pause_after=2)).read(2)
        kill(host)
        await turns_until(lambda: host.state is EngineState.RESTARTING)
        await host.suspend()
        assert host.state is EngineState.SUSPENDED
        await host.wake()
        assert (await client.read_all()).tokens == list(range(4))


@pytest.mark.parametrize("transport", [in_process, in_thread])
async def test_suspending_before_the_first_model_is_there_delays_the_start(transport: NewTransport) -> None:
    """SPEC L2: `start` returns once it was woken and serves."""
    host = EngineSupervisor(serving(MODEL), new_transport=transport)
    starting = asyncio.create_task(host.start())
    await asyncio.sleep(0)
    await host.suspend()
    assert host.state is EngineState.SUSPENDED
    assert not starting.done()
    await host.wake()
    await starting
    assert host.state is EngineState.SERVING
    await host.close(0.0)


async def test_suspending_in_the_middle_of_a_load_loads_it_anew() -> None:
    """SPEC L2, R4: whoever waits for the model goes on waiting."""
    async with hosting(in_thread) as host:
        spec = ModelSpec(id="s", path="slow")
        loading = asyncio.create_task(host.loads.load(spec, host.registry.get("m").info))
        await turns_until(lambda: host.loads.statuses()[-1].stage == "weights")
        await host.suspend()
        assert [status.state for status in host.loads.statuses()] == ["suspended", "suspended"]
        waking = asyncio.create_task(host.wake())
        await turns_until(lambda: host.loads.statuses()[-1].stage == "weights")
        assert not loading.done()
        await host.loads.unload("s")
        with pytest.raises(NotReadyError, match="unloaded"):
            await loading
        await waking


async def test_time_spent_suspended_does_not_count_against_a_deadline() -> None:
    """SPEC L2, Q6: one that would have run out by then still runs; its own time runs out as ever."""
    async with hosting(in_thread) as host:
        asked = request(max_tokens=4, pause_after=2)
        client = await Client(host, "a", _with_timeout(asked, 1.0)).read(2)
        await host.suspend()
        await asyncio.sleep(1.1)  # the time that must not count
        await host.wake()
        assert (await client.read_all()).tokens == list(range(4))
        late = Client(host, "b", _with_timeout(request(is_waiting=True), 0.05))
        assert isinstance(await late.error(), RequestTimeoutError)


def _with_timeout(asked: Any, timeout_s: float) -> Any:
    import msgspec  # noqa: PLC0415 - one use

    return msgspec.structs.replace(asked, timeout_s=timeout_s)


async def test_a_request_is_paused_resumed_and_cancelled_while_suspended() -> None:
    """SPEC L2, Q17: what its caller wants holds when the engine is back, and a cancel ends it at once."""
    async with hosting(in_thread) as host:
        kept = await Client(host, "a", request(max_tokens=4, pause_after=2)).read(2)
        gone = await Client(host, "b", request(max_tokens=4, pause_after=2)).read(2)
        await host.suspend()
        host.requests.cancel("b")
        await gone.read_all()
        assert ends(gone) == 1
        host.requests.pause("a")
        await host.wake()
        host.requests.resume("a")
        assert (await kept.read_all()).tokens == list(range(4))
        assert [type(event) for event in kept.events].count(Paused) == 1


async def test_a_question_waits_and_one_about_the_engine_is_refused() -> None:
    """SPEC L2: state is idle, never an error; nothing wakes it."""
    async with hosting(in_thread) as host:
        await host.suspend()
        answer = asyncio.create_task(host.ask(Tokenize(call_id=0, model="m", text="hi")))
        with pytest.raises(NotReadyError):
            await host.ask(GetStatus(0))
        assert host.state is EngineState.SUSPENDED
        await host.wake()
        assert (await answer)["tokens"] == [104, 105]


@pytest.mark.parametrize("when", ["suspended", "leaving", "grace"])
async def test_closing_while_suspended_ends_everybody_once(when: str) -> None:
    """SPEC L4, L6: each stream gets its one end, those who wait for the engine are told."""
    host = EngineSupervisor(serving(MODEL), new_transport=in_process)
    await host.start()
    client = await Client(host, "a", request(max_tokens=6, pause_after=3)).read(3)
    suspending = asyncio.create_task(host.suspend(grace_s=3600.0 if when == "grace" else 0.0))
    if when == "suspended":
        await suspending
    elif when == "leaving":
        await turns_until(lambda: host.is_suspended)
    else:
        await asyncio.sleep(0)
    await asyncio.gather(host.close(0.0), host.close(0.0))
    if when == "grace":
        await client.read_all()
        with pytest.raises(NotReadyError):
            await suspending
    else:
        assert isinstance(await client.error(), NotReadyError)
        await suspending
    for late in (host.suspend, host.wake):
        with pytest.raises(NotReadyError):
            await late()
    assert host.stats()["num_live_requests"] == 0


@both
async def test_exactly_the_models_that_were_loaded_come_back(transport: NewTransport) -> None:
    """SPEC L2: not one that was unloaded, and not one that never fitted."""
    specs = [MODEL, ModelSpec(id="b", path="good"), ModelSpec(id="big", path="large")]
    async with hosting(transport, *specs) as host:
        assert states(host) == {"m": "ready", "b": "ready", "big": "absent"}
        await host.loads.unload("m")
        await host.suspend()
        assert states(host) == {"m": "absent", "b": "suspended", "big": "absent"}
        await host.wake()
        assert states(host) == {"m": "absent", "b": "ready", "big": "absent"}


def states(host: EngineSupervisor) -> dict[str, str]:
    """State of each model."""
    return {status.id: status.state for status in host.loads.statuses()}


async def test_twenty_who_ask_for_one_model_share_its_load() -> None:
    """SPEC R4: one load; and who asks for what is there has it at once."""
    async with hosting(in_thread) as host:
        spec = ModelSpec(id="b", path="good")
        infos = await asyncio.gather(*[host.loads.load(spec, host.registry.get("m").info) for _ in range(20)])
        assert {info.id for info in infos} == {"b"}
        assert (await host.loads.load(spec, host.registry.get("m").info)).id == "b"
        assert host.stats()["num_waiting_for_models"] == 0


async def test_a_load_cancelled_by_all_who_asked_is_stopped() -> None:
    """SPEC R4: not by the first of them."""
    async with hosting(in_thread) as host:
        spec = ModelSpec(id="s", path="slow")
        asking = [asyncio.create_task(host.loads.load(spec, host.registry.get("m").info)) for _ in range(2)]
        await turns_until(lambda: states(host).get("s") == "loading" and len(host.loads) == 2)
        for task in asking:
            assert states(host)["s"] == "loading"
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await turns_until(lambda: states(host)["s"] == "absent")


@pytest.mark.parametrize("begun", ["before", "meanwhile"])
async def test_a_load_that_waits_for_the_next_engine_ends_when_its_model_is_unloaded(begun: str) -> None:
    """SPEC R4, L2: whenever it was begun; no engine will say what became of it."""
    async with hosting(in_thread) as host:
        if begun == "meanwhile":
            await host.suspend()
        spec = ModelSpec(id="s", path="slow")
        loading = asyncio.create_task(host.loads.load(spec, host.registry.get("m").info))
        await turns_until(lambda: states(host).get("s") == "loading")
        await host.suspend()
        await asyncio.wait_for(host.loads.unload("s"), 5)
        with pytest.raises(NotReadyError, match="unloaded"):
            await asyncio.wait_for(loading, 5)
        assert host.stats()["num_waiting_for_models"] == 0
        await host.wake()
        assert states(host) == {"m": "ready", "s": "absent"}


@pytest.mark.parametrize(("path", "kind"), [("bad", ModelFileError), ("refused", InsufficientMemoryError)])
async def test_a_load_that_fails_raises_its_own_error_and_leaves_the_others(
    path: str, kind: type[Exception]
) -> None:
    """SPEC R4: a model of which nobody has ever had anything leaves neither a row nor a name."""
    async with hosting(in_thread) as host:
        with pytest.raises(kind):
            await host.loads.load(ModelSpec(id="b", path=path), host.registry.get("m").info)
        assert states(host) == {"m": "ready"}
        assert (await Client(host, "a", request(max_tokens=2)).read_all()).tokens == [0, 1]


async def test_a_model_that_is_not_served_can_be_neither_unloaded_nor_pinned() -> None:
    """SPEC R3: the error names those that are."""
    async with hosting(in_thread) as host:
        acts: list[Callable[[], Coroutine[Any, Any, None]]] = [lambda: host.loads.unload("x"), _pinning(host)]
        for act in acts:
            with pytest.raises(ModelNotFoundError, match="served: m"):
                await act()
        host.loads.pin("m", is_pinned=True)
        assert host.loads.statuses()[0].is_pinned


def _pinning(host: EngineSupervisor) -> Callable[[], Coroutine[Any, Any, None]]:
    async def pin() -> None:
        host.loads.pin("x", is_pinned=True)

    return pin


@both
async def test_a_start_goes_on_without_a_model_that_does_not_fit(transport: NewTransport) -> None:
    """SPEC R1: and fails where nothing is left to serve."""
    async with hosting(transport, ModelSpec(id="b", path="refused"), MODEL) as host:
        assert states(host) == {"b": "failed", "m": "ready"}
    with pytest.raises(InsufficientMemoryError):
        async with hosting(transport, ModelSpec(id="b", path="refused")):
            pass
