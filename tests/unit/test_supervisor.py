"""The supervisor against a scripted engine, in a real child or a thread: what clients see when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_engine import NUM_SLOTS, ScriptedEngine, model_info, request, text_of

from stoker.client.models.specs import FoundModel, ModelSource
from stoker.client.process.lifecycle import EngineState
from stoker.client.process.transport import (
    ExitReport,
    NewTransport,
    ProcessTransport,
    ThreadTransport,
    Transport,
)
from stoker.client.requests.record import RequestRecord
from stoker.client.requests.stream import RequestStream
from stoker.client.supervisor import EngineSupervisor
from stoker.engine.process import EngineInThread
from stoker.errors import (
    EngineCrashedError,
    InvalidRequestError,
    LoadCrashedError,
    MachineSetupError,
    ModelFileError,
    ModelLoadError,
    NotReadyError,
    QueueFullError,
    RequestNotFoundError,
    RequestTimeoutError,
)
from stoker.ipc.commands import GetStatus, LoadModel, Submit, Tokenize
from stoker.ipc.events import (
    Delta,
    Event,
    Failed,
    Finished,
    Heartbeat,
    ModelState,
    Paused,
    PromptEcho,
    Queued,
    Resumed,
)
from stoker.ipc.model import ModelInfo, ModelSpec
from stoker.ipc.request import FinishReason, GenerateRequest, Priority
from stoker.settings import EngineSettings

MODEL = ModelSpec(id="m", path="good")


def in_process(settings: EngineSettings) -> Transport:
    """The stand-in as a real child."""
    return ProcessTransport(settings, module="scripted_engine")


def in_thread(settings: EngineSettings) -> Transport:
    """The stand-in in a thread."""
    return ThreadTransport(settings, partial(EngineInThread, make_engine=ScriptedEngine))


def serving(*specs: ModelSpec, **fields: Any) -> ModelSource:
    """Models of which no file is read."""
    return ModelSource(EngineSettings(**fields), [FoundModel(spec, ModelInfo.bare(spec)) for spec in specs])


both = pytest.mark.parametrize("transport", [in_process, in_thread])


@pytest.fixture(autouse=True)
def _stand_in_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@asynccontextmanager
async def hosting(
    transport: Callable[[EngineSettings], Transport] = in_process, *specs: ModelSpec, **fields: Any
) -> AsyncIterator[EngineSupervisor]:
    """A started supervisor, closed at the end."""
    host = EngineSupervisor(serving(*(specs or [MODEL]), **fields), new_transport=transport)
    await host.start()
    try:
        yield host
    finally:
        await host.close(0.0)


class Client:
    """One request's consumer: what it has been shown."""

    def __init__(self, host: EngineSupervisor, request_id: str, asked: GenerateRequest) -> None:
        self.stream = RequestStream(partial(host.requests.cancel, request_id))
        self.events: list[Event] = []
        record = RequestRecord(request_id, asked, time.monotonic())
        record.sinks.append(self.stream.push)
        host.submit(record)

    async def read(self, num_tokens: int) -> Client:
        """Read until so many tokens were delivered in all."""
        while len(self.tokens) < num_tokens:
            self.events.append(await anext(self.stream))
        return self

    async def read_until(self, kind: type[Event]) -> Client:
        """Read until an event of that kind was shown."""
        while not (self.events and isinstance(self.events[-1], kind)):
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


def kill(host: EngineSupervisor) -> int:
    """Kill -9, as anybody might; the pid that was killed."""
    pid = host.pid
    os.kill(pid, signal.SIGKILL)
    return pid


@both
async def test_a_request_is_answered_to_its_end(transport: NewTransport) -> None:
    """L6: deltas, then one terminal event, by either transport."""
    async with hosting(transport) as host:
        client = await Client(host, "a", request(max_tokens=6, n=2)).read_all()
        assert sorted(client.tokens) == [*range(6), *range(100, 106)]
        assert sum(isinstance(event, Finished) for event in client.events) == 1
        assert host.stats()["num_live_requests"] == 0
        assert host.stats()["num_sinks"] == 0


async def test_four_streams_survive_a_kill_with_nothing_lost_or_repeated() -> None:
    """L3: the delivered part stays, the rest continues, no client sees an error."""
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


@pytest.mark.long
async def test_ten_kills_in_a_row_lose_nothing_and_fail_no_request() -> None:
    """L3: a kill -9 from outside is not charged to a request."""
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
    """L3: the same replay by the other transport."""
    async with hosting(in_thread) as host:
        victim = Client(host, "a", request(max_tokens=6, pause_after=3))
        await victim.read(3)
        killer = Client(host, "k", request(die="raise", die_at=2))
        assert isinstance(await killer.error(), EngineCrashedError)
        assert (await victim.read_all()).tokens == list(range(6))


async def test_a_step_that_never_ends_is_killed_and_continued() -> None:
    """L3: heartbeats go on, but they say that the step is over its limit."""
    async with hosting(watchdog_s=20.0) as host:
        client = await Client(host, "a", request(max_tokens=6, hang_at=3)).read_all()
        assert client.tokens == list(range(6))
        assert host.num_restarts == 1


async def test_a_stopped_engine_is_killed_after_the_watchdog_and_continued() -> None:
    """L3: SIGSTOP silences the heartbeats; the stream pauses and goes on elsewhere."""
    async with hosting(watchdog_s=1.5) as host:
        client = await Client(host, "a", request(max_tokens=6, pause_after=3)).read(3)
        stopped = host.pid
        os.kill(stopped, signal.SIGSTOP)
        await client.read_all()
        assert client.text == text_of(0, range(6))
        assert host.pid != stopped
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_repeated_crashes_on_one_request_fail_it_alone(is_silent) -> None:
    """L3: the culprit is convicted; sooner where the engine was still preparing it (docs/adr/0015)."""
    async with hosting() as host:
        others = [Client(host, str(i), request(max_tokens=12, pause_after=3)) for i in range(3)]
        for other in others:
            await other.read(3)
        culprit = Client(host, "k", request(die="SIGSEGV", die_at=0, is_silent=is_silent))
        error = await culprit.error()
        assert isinstance(error, EngineCrashedError)
        assert error.details["crashes"] == (2 if is_silent else 3)
        for other in others:
            await other.read(6)  # each life after a crash lets them go on by three
        while any(len(other.tokens) < 12 for other in others):
            with suppress(ProcessLookupError):  # the last crash may be on its way still
                kill(host)
            for other in others:
                await other.read(min(12, len(other.tokens) + 3))
        assert [other.tokens for other in others] == [list(range(12))] * 3


async def test_a_convicted_request_keeps_what_was_delivered() -> None:
    """L3: the token that it dies on ends it after three tries; those before it stand."""
    async with hosting() as host:
        killer = Client(host, "k", request(die="SIGABRT", die_at=2, max_tokens=9))
        assert isinstance(await killer.error(), EngineCrashedError)
        assert killer.tokens == [0, 1]
        assert host.num_restarts == 3


async def test_an_engine_that_leaves_without_a_word_is_replaced() -> None:
    """L3: even status 0 is no answer; with a bound on waiting, the request goes on elsewhere."""
    async with hosting() as host:
        client = await Client(host, "a", request(max_tokens=4, pause_after=2)).read(2)
        leaver = Client(host, "x", request(die="exit", die_at=1))
        await client.read_all()
        assert client.tokens == list(range(4))
        await leaver.stream.aclose()


async def test_a_tokenizer_that_crashes_the_engine_fails_its_call_alone() -> None:
    """L3: a question is asked again, but not for ever."""
    async with hosting() as host:
        with pytest.raises(EngineCrashedError):
            await host.ask(Tokenize(call_id=0, model="m", text="die"))
        assert (await host.ask(Tokenize(call_id=0, model="m", text="hi")))["tokens"] == [104, 105]


async def test_a_question_asked_while_the_engine_is_away_is_answered_by_the_next() -> None:
    """L3: pending calls are asked again; only one about the dead engine's state is refused."""
    async with hosting() as host:
        kill(host)
        answer = asyncio.create_task(host.ask(Tokenize(call_id=0, model="m", text="hi")))
        await asyncio.wait_for(_until(host, EngineState.RESTARTING), 20)
        with pytest.raises(NotReadyError):
            await host.ask(GetStatus(0))
        assert (await answer)["tokens"] == [104, 105]


async def _until(host: EngineSupervisor, state: EngineState) -> None:
    while host.state is not state:  # noqa: ASYNC110 - the host announces no state; a turn of the loop, no time
        await asyncio.sleep(0)


@both
async def test_a_model_that_cannot_be_loaded_fails_the_start(transport: NewTransport) -> None:
    """L6: start() raises the model's own error and leaves nothing running."""
    host = EngineSupervisor(serving(ModelSpec(id="x", path="bad")), new_transport=transport)
    with pytest.raises(ModelFileError, match="no such file"):
        await host.start()
    assert host.state is EngineState.CLOSED


async def test_a_model_whose_load_crashes_twice_fails_the_start() -> None:
    """L3: the model is charged, not tried for ever."""
    host = EngineSupervisor(serving(MODEL, ModelSpec(id="x", path="crash")), new_transport=in_process)
    with pytest.raises(ModelLoadError, match="SIGSEGV") as caught:
        await host.start()
    assert caught.value.details == {"model": "x", "crashes": 2}
    assert "scripted.cpp:1: ASSERT(false) failed" in caught.value.message
    assert host.num_restarts == 2


async def test_a_load_that_ends_the_engine_leaves_the_others_served() -> None:
    """L3: their streams go on, what crashed is tried in a child, and is refused at once from then on."""
    bad = ModelSpec(id="x", path="crash once")
    async with hosting() as host:
        client = await Client(host, "a", request(max_tokens=9, pause_after=3)).read(3)
        with pytest.raises(LoadCrashedError, match="a trial died"):
            await host.loads.load(bad, model_info("x", "crash once"))
        assert host.num_restarts == 1
        assert (await client.read(6)).tokens == list(range(6))
        with pytest.raises(LoadCrashedError):
            host.registry.resolve("x")
        kill(host)
        assert (await client.read_all()).tokens == list(range(9))
        assert host.num_restarts == 2


async def test_requests_are_not_charged_with_a_load_that_ends_the_engine() -> None:
    """L3: those that wait in the line had no part in it."""
    bad = ModelSpec(id="x", path="crash")
    async with hosting() as host:
        waiting = Client(host, "a", request(is_waiting=True))
        assert isinstance(await anext(waiting.stream), Queued)
        with pytest.raises(LoadCrashedError, match=r"ended the engine 2 times, last: .*SIGSEGV: .*ASSERT"):
            await host.loads.load(bad, model_info("x", "crash"))
        assert host.num_restarts == 2
        (live,) = host.requests.table.live()
        assert live.charges == 0
        await waiting.stream.aclose()


async def test_an_engine_that_does_not_come_up_is_told_plainly() -> None:
    """L6: start() ends with an error instead of trying for ever."""
    host = EngineSupervisor(serving(MODEL), new_transport=lambda s: ProcessTransport(s, "no_such_module"))
    with pytest.raises(MachineSetupError, match="does not start"):
        await host.start()
    assert host.state is EngineState.CLOSED


@both
async def test_closing_twice_ends_what_is_left_exactly_once(transport: NewTransport) -> None:
    """L4, L6: intake stops, the rest is cancelled with one terminal event, a second close waits too."""
    async with hosting(transport) as host:
        client = await Client(host, "a", request(max_tokens=6, pause_after=2)).read(2)
        await asyncio.gather(host.close(0.0), host.close(0.0))
        await host.close()
        await client.read_all()
        assert client.deltas[-1].finish_reason is FinishReason.CANCELLED
        assert sum(isinstance(event, Finished | Failed) for event in client.events) == 1
        with pytest.raises(NotReadyError):
            Client(host, "b", request())
        if transport is in_process:
            with pytest.raises(ProcessLookupError):
                os.kill(host.pid, 0)


async def test_closing_while_the_engine_is_away_ends_what_began_and_refuses_what_waits() -> None:
    """L4, L6: no request is left without a terminal event."""
    async with hosting() as host:
        client = await Client(host, "a", request(pause_after=2)).read(2)
        kill(host)
        await _until(host, EngineState.RESTARTING)
        waiting = Client(host, "b", request())
        await host.close(5.0)
        assert (await client.read_all()).deltas[-1].finish_reason is FinishReason.CANCELLED
        assert isinstance(await waiting.error(), NotReadyError)


async def test_an_engine_that_ignores_its_shutdown_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """L4: closing takes a bounded time, whatever the engine does."""
    monkeypatch.setattr("stoker.client.supervisor.EXIT_LIMIT_S", 0.2)
    async with hosting() as host:
        client = await Client(host, "a", request(pause_after=2)).read(2)
        os.kill(host.pid, signal.SIGSTOP)
        await host.close(0.0)
        await client.read_all()
        assert client.deltas[-1].finish_reason is FinishReason.CANCELLED
        assert isinstance(client.events[-1], Finished)
        with pytest.raises(ProcessLookupError):
            os.kill(host.pid, 0)


async def test_an_answer_that_has_begun_is_cut_short_when_the_engine_dies_during_a_shutdown() -> None:
    """L4, L6: it ends with `cancelled` and keeps its text; only what never began is refused."""
    async with hosting() as host:
        client = await Client(host, "a", request(pause_after=2)).read(2)
        closing = asyncio.ensure_future(host.close(10.0))
        await asyncio.sleep(0)
        kill(host)
        await closing
        await client.read_all()
        assert client.tokens == [0, 1]
        assert client.deltas[-1].finish_reason is FinishReason.CANCELLED


@both
async def test_a_client_that_leaves_cancels_its_request(transport: NewTransport) -> None:
    """S5: the engine is told at once and nothing of the request stays."""
    async with hosting(transport) as host:
        client = await Client(host, "a", request(pause_after=2)).read(2)
        await client.stream.aclose()
        await client.stream.aclose()
        other = await Client(host, "b", request(max_tokens=3)).read_all()
        assert other.tokens == [0, 1, 2]
        assert host.stats()["num_live_requests"] == 0


async def test_a_request_cancelled_while_the_engine_is_away_ends_at_once() -> None:
    """L6: no engine is needed to end it, and it is not replayed."""
    async with hosting() as host:
        client = await Client(host, "a", request(n=2, pause_after=4)).read(4)
        kill(host)
        await _until(host, EngineState.RESTARTING)
        host.requests.cancel("a")
        await client.read_all()
        assert [delta.finish_reason for delta in client.deltas[-2:]] == [FinishReason.CANCELLED] * 2
        assert host.state is EngineState.RESTARTING
        with pytest.raises(RequestNotFoundError):
            host.requests.cancel("a")


class NeverUp:
    """A transport whose engine starts and says nothing."""

    pid = 0
    can_kill = True

    def __init__(self) -> None:
        self._is_killed = asyncio.Event()

    async def start(self, on_events: Callable[[list[Event]], None]) -> None:
        """Nothing to start."""

    def send(self, command: object) -> None:
        """Nothing listens."""

    def kill(self) -> None:
        """End it."""
        self._is_killed.set()

    async def wait(self) -> ExitReport:
        """Until it is killed."""
        await self._is_killed.wait()
        return ExitReport(-signal.SIGKILL)


async def test_a_deadline_that_passes_while_the_engine_is_away_is_kept() -> None:
    """Q6, L6: the client enforces `timeout_s` where no engine can."""
    async with hosting(watchdog_s=0.4) as host:
        asked = msgspec.structs.replace(request(pause_after=1), timeout_s=1.0)
        client = await Client(host, "a", asked).read(1)
        host._new_transport = lambda settings: NeverUp()
        kill(host)
        assert isinstance(await client.error(), RequestTimeoutError)
        assert host.state is EngineState.RESTARTING


async def test_an_engine_that_never_says_hello_is_killed_and_blamed_thrice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L3, L6: a start has a limit of its own."""
    monkeypatch.setattr("stoker.client.process.instance.START_LIMIT_S", 0.2)
    host = EngineSupervisor(serving(MODEL, watchdog_s=0.4), new_transport=lambda settings: NeverUp())
    with pytest.raises(MachineSetupError, match="no Hello within"):
        await host.start()


async def test_requests_are_failed_when_no_engine_comes_up_again() -> None:
    """L6: no request waits for ever, and intake says so."""
    async with hosting() as host:
        client = await Client(host, "a", request(pause_after=1)).read(1)
        host._new_transport = lambda settings: ProcessTransport(settings, "no_such_module")
        kill(host)
        assert isinstance(await client.error(), MachineSetupError)
        assert not host.is_taking


async def test_an_echo_is_delivered_once_however_often_the_engine_dies() -> None:
    """L3, D6: the replay repeats the echo, the client does not see it again."""
    async with hosting() as host:
        client = await Client(host, "a", request(max_tokens=4, echo=True, pause_after=2)).read(2)
        kill(host)
        await client.read_all()
        assert sum(isinstance(event, PromptEcho) for event in client.events) == 1
        assert client.tokens == list(range(4))


async def test_a_replay_keeps_its_place_when_the_fresh_line_is_full() -> None:
    """L3, Q11: what was accepted once is not refused after a restart."""
    async with hosting() as host:
        clients = [Client(host, str(i), request(max_tokens=4, pause_after=2)) for i in range(3)]
        for client in clients:
            await client.read(2)
        for live in host.requests.table.live():  # the next engine's line is shorter than what was running
            live.request = request(max_tokens=4, pause_after=2, max_line=1)
        kill(host)
        for client in clients:
            assert (await client.read_all()).tokens == list(range(4))


async def test_waiting_for_the_engine_is_bounded() -> None:
    """Q11: while the engine is away its queue is the client's; eight will have a slot, two more may wait."""
    async with hosting(max_queue=2) as host:
        kill(host)
        await _until(host, EngineState.RESTARTING)
        waiting = [Client(host, str(i), request(max_tokens=2)) for i in range(NUM_SLOTS + 2)]
        with pytest.raises(QueueFullError):
            Client(host, "more", request())
        for client in waiting:
            assert (await client.read_all()).tokens == [0, 1]


BACKGROUND = Priority.BACKGROUND


async def test_a_full_line_is_refused_without_asking_the_engine() -> None:
    """Q11: at once, though a step of the engine never ends; background first, at half the bound."""
    async with hosting(in_thread, max_queue=4) as host:
        running = [Client(host, f"run{i}", request(pause_after=0)) for i in range(NUM_SLOTS)]
        waiting = [Client(host, f"wait{i}", request(is_waiting=True)) for i in range(2)]
        for client in (*running, *waiting):
            assert isinstance(await anext(client.stream), Queued)
        hanging = Client(host, "hang", request(pause_after=0))  # not heard of: it waits too
        with pytest.raises(QueueFullError) as caught:
            Client(host, "job", msgspec.structs.replace(request(), priority=BACKGROUND))
        assert caught.value.details == {"num_waiting": 3, "max_queue": 2}
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s >= 1.0
        person = Client(host, "person", request(is_waiting=True))
        with pytest.raises(QueueFullError):
            Client(host, "more", request())
        assert host.stats()["num_live_requests"] == NUM_SLOTS + 4
        for client in (*running, *waiting, hanging, person):
            await client.stream.aclose()


async def test_a_paused_request_leaves_its_slot_and_counts_as_waiting() -> None:
    """Q11, Q17: pausing is no way round the bound."""
    async with hosting(in_thread, max_queue=2) as host:
        clients = [Client(host, str(i), request(is_waiting=True)) for i in range(NUM_SLOTS + 2)]
        host.requests.pause("0")
        await clients[0].read_until(Paused)
        with pytest.raises(QueueFullError):
            Client(host, "more", request())
        for client in clients:
            await client.stream.aclose()


@both
async def test_a_paused_request_stands_still_until_it_is_resumed(transport: NewTransport) -> None:
    """Q17: after `Paused` no token comes; after `Resumed` the same text goes on. Twice is once."""
    async with hosting(transport) as host:
        client = await Client(host, "a", request(max_tokens=10**9)).read(3)
        host.requests.pause("a")
        host.requests.pause("a")
        await client.read_until(Paused)
        num_before = len(client.tokens)
        assert (await Client(host, "b", request(max_tokens=3)).read_all()).tokens == [0, 1, 2]
        host.requests.resume("a")
        host.requests.resume("a")
        await client.read(num_before + 3)
        kinds = [type(event) for event in client.events]
        assert kinds[kinds.index(Paused) + 1] is Resumed
        assert (kinds.count(Paused), kinds.count(Resumed)) == (1, 1)
        assert client.tokens == list(range(len(client.tokens)))
        await client.stream.aclose()


async def test_an_unknown_request_is_neither_paused_nor_resumed() -> None:
    """Q17: a typed error, as for cancelling."""
    async with hosting(in_thread) as host:
        for act in (host.requests.pause, host.requests.resume):
            with pytest.raises(RequestNotFoundError, match="nobody"):
                act("nobody")


async def test_a_paused_request_stays_paused_over_a_restart() -> None:
    """Q17, L3: the next engine gets it paused; the client is told once, and nothing is lost."""
    async with hosting() as host:
        client = await Client(host, "a", request(max_tokens=6, pause_after=3)).read(3)
        host.requests.pause("a")
        await client.read_until(Paused)
        kill(host)
        await _until(host, EngineState.RESTARTING)
        other = await Client(host, "b", request(max_tokens=3)).read_all()  # the engine is back
        assert other.tokens == [0, 1, 2]
        host.requests.resume("a")
        assert (await client.read_all()).tokens == list(range(6))
        kinds = [type(event) for event in client.events]
        assert (kinds.count(Paused), kinds.count(Resumed)) == (1, 1)


async def test_a_request_is_paused_and_resumed_while_the_engine_is_away() -> None:
    """Q17: the client remembers, and says so at once."""
    async with hosting() as host:
        client = await Client(host, "a", request(max_tokens=6, pause_after=3)).read(3)
        kill(host)
        await _until(host, EngineState.RESTARTING)
        host.requests.pause("a")
        assert await anext(client.stream) == Paused("a")
        host.requests.resume("a")
        assert await anext(client.stream) == Resumed("a")
        host.requests.pause("a")
        await Client(host, "b", request(max_tokens=1)).read_all()
        assert await anext(client.stream) == Paused("a")
        host.requests.resume("a")
        assert (await client.read_all()).tokens == list(range(6))


@both
async def test_a_paused_request_is_cancelled(transport: NewTransport) -> None:
    """Q17, L6: its stream ends with what it had."""
    async with hosting(transport) as host:
        client = await Client(host, "a", request(pause_after=2)).read(2)
        host.requests.pause("a")
        await client.read_until(Paused)
        host.requests.cancel("a")
        await client.read_all()
        assert client.tokens == [0, 1]
        assert client.deltas[-1].finish_reason is FinishReason.CANCELLED


async def test_a_paused_request_keeps_its_deadline() -> None:
    """Q6, Q17: `timeout_s` counts on, in the engine."""
    async with hosting(in_thread) as host:
        asked = msgspec.structs.replace(request(pause_after=1), timeout_s=0.5)
        client = await Client(host, "a", asked).read(1)
        host.requests.pause("a")
        assert isinstance(await client.error(), RequestTimeoutError)


@pytest.mark.long
async def test_a_paused_request_is_not_charged_for_its_neighbours_crashes() -> None:
    """L3, Q17: it is in no step; the culprit alone fails."""
    async with hosting() as host:
        client = await Client(host, "a", request(max_tokens=6, pause_after=3)).read(3)
        host.requests.pause("a")
        await client.read_until(Paused)
        culprit = Client(host, "k", request(die="SIGSEGV"))
        assert isinstance(await culprit.error(), EngineCrashedError)
        (live,) = host.requests.table.live()
        assert (live.request_id, live.charges) == ("a", 0)
        host.requests.resume("a")
        assert (await client.read_all()).tokens == list(range(6))


async def test_an_id_in_use_is_refused() -> None:
    """L6: two live requests never share an id."""
    async with hosting(in_thread) as host:
        client = Client(host, "a", request(pause_after=1))
        with pytest.raises(InvalidRequestError, match="in use"):
            Client(host, "a", request())
        assert (await client.read(1)).tokens == [0]


async def engine_alone() -> tuple[ProcessTransport, asyncio.Queue[Event]]:
    """An engine process that has loaded its model, without a host."""
    said: asyncio.Queue[Event] = asyncio.Queue()
    transport = ProcessTransport(EngineSettings(), "scripted_engine")

    def hear(events: list[Event]) -> None:
        for event in events:
            said.put_nowait(event)

    await transport.start(hear)
    transport.send(LoadModel(MODEL))
    await until_said(said, ModelState, "ready")
    return transport, said


async def until_said(said: asyncio.Queue[Event], kind: type, state: str = "") -> None:
    """Wait for an event of that kind."""
    while True:
        event = await said.get()
        if isinstance(event, kind) and state in ("", getattr(event, "state", "")):
            return


async def leave(transport: ProcessTransport) -> ExitReport:
    """Close the client's end of the socket, as its exit would, and wait for the engine's."""
    assert transport._transport is not None
    transport._transport.abort()
    return await transport.wait()


async def test_an_engine_leaves_with_its_front() -> None:
    """L4: the end of the socket ends an idle engine in order."""
    transport, _ = await engine_alone()
    assert (await leave(transport)).status == 0


async def test_even_a_hung_engine_leaves_with_its_front() -> None:
    """L4: no orphan keeps the device, though its step never ends."""
    transport, said = await engine_alone()
    transport.send(Submit(request_id="a", request=request(hang_at=0)))
    while True:
        event = await said.get()
        if isinstance(event, Heartbeat) and event.step_s > 0:
            break
    assert (await leave(transport)).status == 1


async def test_an_engine_ignores_what_the_terminal_sends() -> None:
    """L4: Ctrl-C and SIGTERM are for the client, which shuts the engine down in order."""
    async with hosting() as host:
        client = await Client(host, "a", request(max_tokens=4, pause_after=2)).read(2)
        os.kill(host.pid, signal.SIGINT)
        os.kill(host.pid, signal.SIGTERM)
        status = await host.ask(Tokenize(call_id=0, model="m", text="a"))
        assert status["tokens"] == [97]
        assert host.num_restarts == 0
        assert client.tokens == [0, 1]
