"""Calls that are many requests and have one id: cancelled, paused, resumed and listed as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import pytest

from stoker import GenerateRequest, Runtime
from stoker.client.event_bus import EventBus
from stoker.client.models.registry import ModelRegistry
from stoker.client.requests.group import KnownAs, RequestGroup
from stoker.client.requests.history import RequestHistory
from stoker.client.requests.record import RequestRecord
from stoker.client.requests.requests import Requests
from stoker.client.requests.table import RequestTable
from stoker.errors import (
    InvalidRequestError,
    RequestCancelledError,
    RequestNotFoundError,
    RequestTimeoutError,
)
from stoker.ipc.events import Finished
from stoker.ipc.request import Priority
from stoker.ipc.status import CallKind, GroupStatus
from stoker.ipc.usage import Timings, Usage
from stoker.tasks.backpressure import MAX_IN_FLIGHT
from stoker.tasks.tensor_call import TaskRuntime, answers_of

ENCODER = "fake:encoder=1,step_delay_s=0.005"
RANKER = "fake:encoder=1,pooling=rank,step_delay_s=0.005"
DECODER = "fake:eog_period=0,step_delay_s=0.02"
TEXTS = [f"text {at}" for at in range(500)]
CHOICES = [f"answer {at}" for at in range(40)]
LONG = "word " * 60

Call = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def running(model: str, **fields: Any) -> AsyncIterator[Runtime]:
    """A runtime of one slow fake."""
    settings = {"isolation": "thread", "slots": 2, "ctx_size": 1024, "drain_s": 0.0} | fields
    async with Runtime(model, **settings) as runtime:
        yield runtime


async def group_of(runtime: Runtime, group_id: str) -> GroupStatus | None:
    """How far the call of that id is."""
    groups = (await runtime.status()).groups
    return next((group for group in groups if group.id == group_id), None)


async def until(
    runtime: Runtime,
    work: asyncio.Future[Any],
    is_so: Callable[[GroupStatus], bool],
    group_id: str = "mine",
) -> GroupStatus:
    """The status of the call of that id, which `work` waits for, as soon as that holds of it."""
    while not work.done():
        group = await group_of(runtime, group_id)
        if group is not None and is_so(group):
            return group
    raise AssertionError(f"it was over before: {work}")


def embed(runtime: Runtime, **fields: Any) -> Awaitable[Any]:
    """An embedding of 500 texts."""
    return runtime.embed(TEXTS, **fields)


def rerank(runtime: Runtime, **fields: Any) -> Awaitable[Any]:
    """500 documents in order."""
    return runtime.rerank("query", TEXTS, **fields)


def choose(runtime: Runtime, **fields: Any) -> Awaitable[Any]:
    """One of forty choices."""
    return runtime.choose(LONG, CHOICES, **fields)


def states(runtime: Runtime, **fields: Any) -> Awaitable[Any]:
    """The states after several prompts."""
    return runtime.states.embed_all([f"{LONG}{at}" for at in range(20)], **fields)


each_call = pytest.mark.parametrize(
    ("model", "call", "kind", "num_members"),
    [
        (ENCODER, embed, CallKind.EMBED, 500),
        (RANKER, rerank, CallKind.RERANK, 500),
        (DECODER, choose, CallKind.CHOOSE, 1),
        (DECODER, states, CallKind.STATE, 20),
    ],
)


def shown(result: Any) -> Any:
    """What of an answer has to be equal whatever interrupted it."""
    if isinstance(result, list):
        return [each.data for each in result]
    return result.vectors if hasattr(result, "vectors") else result.results


@each_call
async def test_a_call_is_cancelled_by_its_id(
    model: str, call: Call, kind: CallKind, num_members: int
) -> None:
    """SPEC I4, S5: all of its requests end, those that had not begun never do, and the call says why."""
    async with running(model) as runtime:
        work = asyncio.ensure_future(call(runtime, request_id="mine", names=("also",), owner="key"))
        group = await until(runtime, work, lambda group: runtime.stats()["num_live_requests"] > 0)
        assert (group.kind, group.num_members, group.model) == (kind, num_members, runtime.models[0].id)
        assert runtime.owner_of("mine") == "key"
        await runtime.cancel("mine")
        with pytest.raises(RequestCancelledError, match="mine"):
            await work
        assert runtime.stats()["num_live_requests"] == 0
        assert (await runtime.status()).groups == []
        with pytest.raises(RequestNotFoundError):
            await runtime.cancel("mine")
        assert runtime.owner_of("mine") == ""
        assert len(shown(await call(runtime, request_id="mine"))) > 0  # the id is free again


@each_call
async def test_a_paused_call_stands_still_and_goes_on_by_its_id(
    model: str, call: Call, kind: CallKind, num_members: int
) -> None:
    """SPEC Q17: nothing of it is computed meanwhile, later requests wait too; the same answer."""
    async with running(model) as runtime:
        expected = shown(await call(runtime))
        work = asyncio.ensure_future(call(runtime, request_id="mine"))
        await until(runtime, work, lambda group: runtime.stats()["num_live_requests"] > 0)
        await runtime.pause_request("mine")
        await runtime.pause_request("mine")
        group = await until(runtime, work, lambda group: group.state == "paused")
        assert (group.position, group.eta_s) == (None, None)
        await all_stand_still(runtime)
        before = await group_of(runtime, "mine")
        assert before is not None
        assert before.num_done < num_members
        await call(runtime)  # others go on
        after = await group_of(runtime, "mine")
        assert after is not None
        assert after.num_done == before.num_done
        assert not work.done()
        await runtime.resume_request("mine")
        assert shown(await work) == expected


async def all_stand_still(runtime: Runtime) -> None:
    """Until every live request is paused; those without an engine stand still anyway."""
    async with asyncio.timeout(60):
        while True:
            stats, engine = runtime.stats(), (await runtime.status()).engine
            paused = {waiting.request_id for waiting in engine.paused}
            if len(paused) + stats["num_held_requests"] == stats["num_live_requests"]:
                return


@pytest.mark.long
async def test_a_call_tells_how_far_it_is() -> None:
    """SPEC I4, Q14: class, deadline, place, what is done, and what that took."""
    async with running("fake:encoder=1,step_delay_s=0.05") as runtime:
        texts = [f"before {at}" for at in range(60)]
        before = asyncio.ensure_future(runtime.embed(texts, request_id="before"))
        await until(runtime, before, lambda group: group.num_done > 0, "before")
        work = asyncio.ensure_future(
            runtime.embed(TEXTS[:40], request_id="mine", priority=Priority.BACKGROUND, timeout_s=300.0)
        )
        waits = await until(runtime, work, lambda group: group.position is not None)
        assert (waits.state, waits.priority, waits.num_done) == ("queued", Priority.BACKGROUND, 0)
        assert waits.deadline_s is not None
        assert 0 < waits.deadline_s < 300.0
        begun = await until(runtime, work, lambda group: group.num_done > 0)
        later = await until(runtime, work, lambda group: group.num_done > begun.num_done)
        assert later.usage.prompt_tokens > begun.usage.prompt_tokens > 0
        assert later.timings.prefill_s + later.timings.queue_s > 0
        assert later.age_s > begun.age_s
        assert (later.deadline_s or 0) < waits.deadline_s
        found = await work
        assert found.usage.prompt_tokens >= later.usage.prompt_tokens
        await before


async def test_a_calls_deadline_is_one_for_all_of_it_while_it_is_paused_too() -> None:
    """SPEC Q6: the time that the first texts took is not given to the later ones."""
    async with running("fake:encoder=1,step_delay_s=0.05") as runtime:
        work = asyncio.ensure_future(runtime.embed(TEXTS, request_id="mine", timeout_s=3.0))
        await until(runtime, work, lambda group: group.num_done > 0)
        await runtime.pause_request("mine")
        with pytest.raises(RequestTimeoutError):
            await work
        while runtime.stats()["num_live_requests"]:  # noqa: ASYNC110 - the engine confirms the end of those it had
            await asyncio.sleep(0)


async def test_ids_are_unique_over_requests_and_calls() -> None:
    """SPEC I4: an id leads to one request or one call."""
    async with running(ENCODER) as runtime:
        work = asyncio.ensure_future(runtime.embed(TEXTS, request_id="mine"))
        await until(runtime, work, lambda group: True)
        with pytest.raises(InvalidRequestError, match="in use"):
            await runtime.embed("x", request_id="mine")
        await runtime.cancel("mine")
        with pytest.raises(RequestCancelledError):
            await work
    async with running(DECODER) as runtime:
        work = asyncio.ensure_future(runtime.choose(LONG, CHOICES, request_id="mine"))
        await until(runtime, work, lambda group: True)
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(runtime.stream(GenerateRequest(prompt="x"), "mine"))
        await runtime.cancel("mine")
        with pytest.raises(RequestCancelledError):
            await work


@each_call
async def test_a_call_goes_on_over_the_end_of_its_engine(
    model: str, call: Call, kind: CallKind, num_members: int
) -> None:
    """SPEC L3, Q17: paused it stays paused, and cancelled meanwhile it ends."""
    async with running(model, isolation="process") as runtime:
        expected = shown(await call(runtime))
        work = asyncio.ensure_future(call(runtime, request_id="mine"))
        await until(runtime, work, lambda group: runtime.stats()["num_live_requests"] > 0)
        await runtime.pause_request("mine")
        pid = (await runtime.status()).pid
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while True:
                status = await runtime.status()
                if status.pid != pid and status.state == "serving":
                    break
        assert (await until(runtime, work, lambda group: True)).state == "paused"
        await all_stand_still(runtime)
        assert not work.done()
        await runtime.resume_request("mine")
        assert shown(await work) == expected


async def test_a_call_is_cancelled_while_there_is_no_engine() -> None:
    """SPEC L2: those that no engine has end at once."""
    async with running(ENCODER) as runtime:
        work = asyncio.ensure_future(runtime.embed(TEXTS, request_id="mine", timeout_s=60.0))
        await until(runtime, work, lambda group: group.num_done > 0)
        await runtime.suspend()
        await runtime.cancel("mine")
        with pytest.raises(RequestCancelledError):
            await work
        assert runtime.stats()["num_live_requests"] == 0


class Nowhere:
    """No engine."""

    absence = "there is none"

    def send(self, command: object) -> None:
        """Nothing hears it."""

    def hand_out(self) -> None:
        """Nothing is given."""


async def test_a_request_that_comes_after_the_cancel_of_its_call_is_refused() -> None:
    """SPEC S5: its grammar may have been prepared meanwhile; it never reaches an engine."""
    table = RequestTable()
    history = RequestHistory(table, EventBus(), lambda _: True)
    requests = Requests(table, 4, ModelRegistry([]), Nowhere(), history)
    asked = GenerateRequest(prompt="x", model="m")

    def run(*_: object) -> AsyncGenerator[Any, None]:
        raise AssertionError("nothing is run")

    group = RequestGroup(CallKind.READ, asked, 1, KnownAs("mine"), run)
    with table.grouped(group):
        requests.cancel("mine")
        with pytest.raises(RequestCancelledError, match="mine"):
            requests.submit(RequestRecord("mine-0", asked, 0.0, group=group))
    assert len(table) == 0


class OneGroup:
    """A runtime whose requests wait for the cancel of their call, and end one after the other."""

    def __init__(self) -> None:
        self.num_begun = self.num_ended = 0
        self.is_full, self.cancelled = asyncio.Event(), asyncio.Event()
        self.of_call: RequestGroup | None = None

    @contextmanager
    def group(self, *call: Any) -> Iterator[RequestGroup]:
        """One call."""
        group = self.of_call = RequestGroup(*call, self._run)
        yield group

    async def _run(self, record: RequestRecord) -> AsyncGenerator[Any, None]:
        self.num_begun += 1
        turns = self.num_begun
        if turns == MAX_IN_FLIGHT:
            self.is_full.set()
        await self.cancelled.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        self.num_ended += 1
        if turns == MAX_IN_FLIGHT // 2:
            raise RequestTimeoutError("its time was over")
        yield Finished(request_id=record.request_id, usage=Usage(), timings=Timings())


async def test_a_cancelled_call_ends_when_the_last_of_its_requests_has() -> None:
    """SPEC I4, S5: the engine may tell the end of each by itself, one may fail; others never begin."""
    runtime, asked = OneGroup(), GenerateRequest(prompt="x", model="m")
    work = asyncio.ensure_future(
        answers_of(cast("TaskRuntime", runtime), CallKind.EMBED, [asked] * 500, KnownAs("mine"))
    )
    await runtime.is_full.wait()
    assert runtime.of_call is not None
    runtime.of_call.is_cancelled = True
    runtime.cancelled.set()
    with pytest.raises(RequestCancelledError, match="mine was cancelled with 0 of 500 done"):
        await work
    assert runtime.num_ended == runtime.num_begun == MAX_IN_FLIGHT


async def test_an_id_may_be_used_again_as_soon_as_its_call_has_ended() -> None:
    """SPEC I4: requests of the call before that the engine still has do not block it."""
    async with running("fake:encoder=1,step_delay_s=0.2") as runtime:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await runtime.embed(TEXTS[:20], request_id="mine")
        found = await runtime.embed(TEXTS[:2], request_id="mine")
        assert len(found.vectors) == 2


async def test_counters_may_be_read_from_another_thread() -> None:
    """SPEC O1: `stoker.sync` reads them in the caller's thread while requests come and go."""
    async with running(ENCODER) as runtime:
        work = asyncio.ensure_future(runtime.embed(TEXTS))
        while not work.done():
            await asyncio.to_thread(runtime.stats)
        await work


async def test_a_calls_deadline_stands_still_while_the_engine_is_suspended() -> None:
    """SPEC Q6, L2: what is shown of it too."""
    async with running(ENCODER) as runtime:
        work = asyncio.ensure_future(runtime.embed(TEXTS, request_id="mine", timeout_s=300.0))
        await until(runtime, work, lambda group: group.num_done > 0)
        await runtime.suspend(grace_s=0.0)
        (before,) = (await runtime.status()).groups
        await asyncio.sleep(0.02)  # time that must not count
        (after,) = (await runtime.status()).groups
        assert (after.deadline_s, after.age_s) == (before.deadline_s, before.age_s)
        await runtime.resume()
        assert len((await work).vectors) == len(TEXTS)
