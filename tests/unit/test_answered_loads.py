"""Which load or unload an engine's word about a model answers, against an engine whose words a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_engine import model_info

from stoker.client.models.specs import FoundModel, ModelSource
from stoker.client.process.lifecycle import EngineState
from stoker.client.process.transport import EventSink, ExitReport
from stoker.client.supervisor import EngineSupervisor
from stoker.errors import InsufficientMemoryError, LoadCrashedError, NotReadyError, StokerError
from stoker.ipc.commands import Command, KnowModel, LoadModel, UnloadModel
from stoker.ipc.events import Event, Hello, ModelState
from stoker.ipc.model import ModelInfo, ModelSpec
from stoker.settings import EngineSettings

MODEL = ModelSpec(id="m", path="m.gguf")
LESS = replace(MODEL, n_ctx=64)
MORE = replace(MODEL, n_ctx=4096)
NO_ROOM = InsufficientMemoryError("no room")


class SpokenEngine:
    """An engine of which a test says every word.

    Attributes:
        sent: the loads and unloads that it was sent.
        known: ids of the models that it was told of.
    """

    pid, can_kill = 1, True

    def __init__(self) -> None:
        self.sent: list[LoadModel | UnloadModel] = []
        self.known: list[str] = []
        self._exit: asyncio.Future[ExitReport] = asyncio.get_running_loop().create_future()
        self._hear: asyncio.Future[EventSink] = asyncio.get_running_loop().create_future()

    async def start(self, on_events: EventSink) -> None:
        """It says nothing yet."""
        self._hear.set_result(on_events)

    def send(self, command: Command) -> None:
        """Keep it."""
        if isinstance(command, LoadModel | UnloadModel):
            self.sent.append(command)
        elif isinstance(command, KnowModel):
            self.known.append(command.spec.id)

    def kill(self) -> None:
        """It ends."""
        if not self._exit.done():
            self._exit.set_result(ExitReport(1))

    async def wait(self) -> ExitReport:
        """Until it is killed."""
        return await self._exit

    async def say(self, event: Event) -> None:
        """Say something, and let whoever hears it go on."""
        (await self._hear)([event])
        for _ in range(9):
            await asyncio.sleep(0)

    async def tell(
        self,
        state: str,
        answered: LoadModel | UnloadModel | None = None,
        *,
        error: StokerError | None = None,
    ) -> None:
        """Say where the model is; `answered`: the command of which that is the end."""
        info = model_info("m", "m.gguf") if state == "ready" else None
        told = error.info() if error else None
        answers = answered.ask_id if answered else 0
        await self.say(ModelState(model="m", state=state, info=info, error=told, answers=answers))

    async def next_sent(self, count: int) -> LoadModel | UnloadModel:
        """The command of that number, from one."""
        await until(lambda: len(self.sent) >= count)
        assert len(self.sent) == count
        return self.sent[-1]


async def until(is_so: Callable[[], bool]) -> None:
    """Let time pass until then; the next engine comes after a moment."""
    for _ in range(2000):
        if is_so():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it does not come")


@asynccontextmanager
async def serving(*engines: SpokenEngine) -> AsyncIterator[EngineSupervisor]:
    """A client whose first engine serves the model; the other engines come after it."""
    source = ModelSource(EngineSettings(), [FoundModel(MODEL, ModelInfo.bare(MODEL))])
    left = iter(engines)
    host = EngineSupervisor(source, new_transport=lambda _: next(left))
    starting = asyncio.create_task(host.start())
    await engines[0].say(Hello(1))
    await engines[0].tell("loading")
    await engines[0].tell("ready", await engines[0].next_sent(1))
    await starting
    try:
        yield host
    finally:
        for engine in engines:
            engine.kill()
        await host.close(0.0)


async def asked(coroutine: Any) -> asyncio.Task[Any]:
    """A call that has sent its command."""
    task = asyncio.create_task(coroutine)
    for _ in range(9):
        await asyncio.sleep(0)
    return task


async def load(host: EngineSupervisor, spec: ModelSpec) -> asyncio.Task[ModelInfo]:
    """A caller who asks for the model."""
    return await asked(host.loads.load(spec, ModelInfo.bare(spec)))


def served_as(host: EngineSupervisor) -> ModelSpec:
    """How the client holds the model to be loaded."""
    entry = host.registry.get("m")
    assert entry is not None
    assert entry.asked is None
    return entry.spec


# ---------------------------------------------------------------- loads


async def test_a_load_that_is_asked_for_while_an_engine_boots_is_not_answered_by_that_of_the_boot() -> None:
    """SPEC R4, L3: the engine is given it when the model is there as it was before."""
    engines = SpokenEngine(), SpokenEngine()
    async with serving(*engines) as host:
        engines[0].kill()
        await engines[1].say(Hello(2))
        booted = await engines[1].next_sent(1)
        assert host.state is EngineState.RESTARTING
        more = await load(host, MORE)
        await engines[1].tell("ready", booted)
        assert not more.done()
        second = await engines[1].next_sent(2)
        assert isinstance(second, LoadModel)
        assert second.spec == MORE
        assert host.state is EngineState.RESTARTING, "it loads what is due first"
        await engines[1].tell("ready", second)
        assert (await more).id == "m"
        assert served_as(host) == MORE
        assert host.state is EngineState.SERVING


async def test_a_model_that_need_not_go_any_more_answers_no_load() -> None:
    """SPEC R3, L5: it is ready as it was, and is loaded otherwise then."""
    engine = SpokenEngine()
    async with serving(engine) as host:
        await engine.tell("unloading")
        more = await load(host, MORE)
        await engine.tell("ready")
        assert not more.done()
        await engine.tell("ready", await engine.next_sent(2), error=NO_ROOM)
        with pytest.raises(InsufficientMemoryError):
            await more
        assert served_as(host) == MODEL


async def test_the_end_of_a_load_is_no_answer_to_the_one_that_was_asked_for_after_it() -> None:
    """SPEC R4: and where that fails, the model is as the first has left it."""
    engine = SpokenEngine()
    async with serving(engine) as host:
        less = await load(host, LESS)
        more = await load(host, MORE)
        await engine.tell("ready", engine.sent[1])
        assert not more.done()
        await engine.tell("ready", await engine.next_sent(3), error=NO_ROOM)
        with pytest.raises(InsufficientMemoryError):
            await more
        assert served_as(host) == LESS
        with suppress(NotReadyError):
            await less


async def test_a_model_that_goes_before_its_load_begins_is_still_to_be_loaded() -> None:
    """SPEC R3, R4: who waits waits on; so does the next engine's boot, if this one ends."""
    engines = SpokenEngine(), SpokenEngine()
    async with serving(*engines) as host:
        more = await load(host, MORE)
        await engines[0].tell("absent")
        assert not more.done()
        engines[0].kill()
        await engines[1].say(Hello(2))
        booted = await engines[1].next_sent(1)
        assert isinstance(booted, LoadModel)
        assert booted.spec == MORE
        await engines[1].tell("ready", booted)
        assert (await more).id == "m"


async def test_a_load_that_is_refused_while_the_model_goes_is_answered_at_once() -> None:
    """SPEC L5, R3: its requests need it as it is, and that it stays is no answer to the load."""
    engine = SpokenEngine()
    async with serving(engine) as host:
        await engine.tell("unloading")
        less = await load(host, LESS)
        await engine.tell("unloading", await engine.next_sent(2), error=NO_ROOM)
        with pytest.raises(InsufficientMemoryError):
            await asyncio.wait_for(less, 5)
        await engine.tell("ready")
        assert served_as(host) == MODEL


async def test_who_waits_for_a_load_is_told_when_another_is_asked_for() -> None:
    """SPEC R4: two callers who want the same share a load, two who want another each do not."""
    engine = SpokenEngine()
    async with serving(engine) as host:
        less, same = await load(host, LESS), await load(host, LESS)
        assert len(engine.sent) == 2
        more, longer = await load(host, MORE), await load(host, replace(MORE, keep_alive_s=5.0))
        for former in (less, same):
            with pytest.raises(NotReadyError, match="somebody has asked for it otherwise"):
                await former
        await engine.tell("ready", engine.sent[2])
        assert not more.done()
        await engine.tell("ready", await engine.next_sent(4))
        assert [info.id for info in (await more, await longer)] == ["m", "m"]
        assert served_as(host).keep_alive_s == 5.0


# ---------------------------------------------------------------- unloads


async def test_a_new_model_that_is_unloaded_while_an_engine_boots_is_known_to_it_before() -> None:
    """SPEC R3, R4: an engine answers no unload of a model that it does not know."""
    engines = SpokenEngine(), SpokenEngine()
    async with serving(*engines) as host:
        engines[0].kill()
        await engines[1].say(Hello(2))
        booted = await engines[1].next_sent(1)
        new = await load(host, replace(MODEL, id="new"))
        unloading = await asked(host.loads.unload("new"))
        with pytest.raises(NotReadyError):
            await new
        assert engines[1].known[-1] == "new"
        gone = ModelState(model="new", state="absent", answers=(await engines[1].next_sent(2)).ask_id)
        await engines[1].say(gone)
        await asyncio.wait_for(unloading, 5)
        await engines[1].tell("ready", booted)
        assert host.state is EngineState.SERVING
        assert len(engines[1].sent) == 2


async def test_an_unload_of_a_model_that_has_failed_leaves_nothing_for_the_next_load_to_trip_over() -> None:
    """SPEC R4, L1: that load's end is its own answer."""
    engine = SpokenEngine()
    async with serving(engine) as host:
        await engine.tell("absent")
        failing = await load(host, LESS)
        await engine.tell("failed", engine.sent[-1], error=NO_ROOM)
        with pytest.raises(InsufficientMemoryError):
            await failing
        await asyncio.wait_for(host.loads.unload("m"), 5)
        await engine.tell("failed", await engine.next_sent(3))
        again = await load(host, LESS)
        await engine.tell("loading")
        await engine.tell("absent", await engine.next_sent(4))
        with pytest.raises(NotReadyError, match="unloaded before it was ready"):
            await asyncio.wait_for(again, 5)


async def test_a_model_that_somebody_unloads_as_it_becomes_ready_is_not_loaded_by_the_next_engine() -> None:
    """SPEC R3, L3: that it was ready a moment ago is no answer to the unload."""
    engines = SpokenEngine(), SpokenEngine()
    async with serving(*engines) as host:
        await engines[0].tell("absent")
        more = await load(host, MORE)
        unloading = await asked(host.loads.unload("m"))
        with pytest.raises(NotReadyError):
            await more
        await engines[0].tell("ready", engines[0].sent[1])
        assert not unloading.done()
        engines[0].kill()
        await asyncio.wait_for(unloading, 5)
        await engines[1].say(Hello(2))
        await until(lambda: host.state is EngineState.SERVING)
        assert engines[1].sent == []


async def test_an_unload_of_a_model_that_is_barred_leaves_the_reason() -> None:
    """SPEC L3: nothing has changed, so it is still refused."""
    engine = SpokenEngine()
    async with serving(engine) as host:
        await engine.tell("absent")
        await engine.tell("failed", error=LoadCrashedError("a trial died"))
        for state in ("failed", "absent"):
            await asyncio.wait_for(host.loads.unload("m"), 5)
            await engine.tell(state, engine.sent[-1])
            with pytest.raises(LoadCrashedError, match="a trial died"):
                host.registry.resolve("m")
