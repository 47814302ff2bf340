"""The façade on the fake backend: an application's view, with the engine in a thread."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

import pytest

import stoker.sync
from stoker import EngineSettings, FinishReason, GenerateRequest, Runtime, Sampling, TextDelta
from stoker.client.requests.stream import StreamEvent
from stoker.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    ModelTooLargeError,
    NotReadyError,
    QueueFullError,
    RequestNotFoundError,
    StokerError,
)
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.events import Delta, Finished, ModelState, Paused, Resumed

FAKE = "fake:eog_period=0"


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """A runtime with two fake models' worth of room."""
    async with Runtime(FAKE, isolation="thread", ctx_size=512, slots=4, drain_s=0.0) as started:
        yield started


async def collect(deltas: AsyncIterator[TextDelta]) -> list[TextDelta]:
    """All deltas."""
    return [delta async for delta in deltas]


async def test_the_last_delta_carries_reason_usage_and_timings(runtime: Runtime) -> None:
    """I9: and no other does."""
    *early, last = await collect(runtime.generate("hello", max_tokens=7))
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage is not None
    assert last.usage.completion_tokens == 7
    assert last.timings is not None
    assert not any(delta.finish_reason or delta.usage for delta in early)
    assert sum(len(delta.token_ids) for delta in [*early, last]) == 7


async def test_every_choice_gets_its_own_text_and_end(runtime: Runtime) -> None:
    """I9, Q16: two choices, told apart by their index; only the very last has the usage."""
    deltas = await collect(runtime.generate("hello", max_tokens=5, n=2, seed=3))
    assert {index: sum(len(d.token_ids) for d in deltas if d.index == index) for index in (0, 1)} == {
        0: 5,
        1: 5,
    }
    assert sorted(d.index for d in deltas if d.finish_reason) == [0, 1]
    assert [d.usage is not None for d in deltas].count(True) == 1
    assert deltas[-1].usage is not None


async def test_an_echo_comes_before_the_completion(runtime: Runtime) -> None:
    """I9, D6: once for each choice."""
    deltas = await collect(runtime.generate("hello", max_tokens=2, echo=True))
    assert deltas[0].text == "hello"
    assert deltas[0].token_ids == []


async def test_a_seed_repeats_and_its_absence_does_not(runtime: Runtime) -> None:
    """D1: a seed is picked where none is given, so that a replay of this request draws the same."""

    async def text(**fields: Any) -> str:
        deltas = await collect(runtime.generate("hello", max_tokens=24, temperature=5.0, min_p=0.0, **fields))
        return "".join(delta.text for delta in deltas)

    assert await text(seed=5) == await text(seed=5)
    assert await text() != await text()


async def test_fields_are_checked_like_a_strangers(runtime: Runtime) -> None:
    """I9: wrong names and types are typed errors, before anything runs."""
    for fields in ({"max_token": 3}, {"max_tokens": "many"}, {"temperature": -1.0}, {"stop": [""]}):
        with pytest.raises(InvalidRequestError):
            await collect(runtime.generate("hello", **fields))
    request = GenerateRequest(prompt="hello", max_tokens=3, sampling=Sampling(temperature=0.0))
    assert len(await collect(runtime.generate(request, max_tokens=5))) == 5
    assert runtime.stats()["num_live_requests"] == 0


async def test_an_unknown_model_is_named_in_the_error(runtime: Runtime) -> None:
    """S3: with what is served."""
    with pytest.raises(ModelNotFoundError, match="no model 'x' is served; served: fake"):
        await collect(runtime.generate("hello", model="x"))
    assert runtime.resolve(None) == runtime.resolve("default") == runtime.models[0]


async def test_leaving_a_stream_frees_its_slot(runtime: Runtime) -> None:
    """S5: nothing of the request is left, in front or engine."""
    async with aclosing(runtime.stream(GenerateRequest(prompt="hello"))) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
    await collect(runtime.generate("hello", max_tokens=1))
    status = await runtime.status()
    assert {slot.state for slot in status.engine.slots} == {"idle"}
    assert runtime.stats()["num_live_requests"] == 0


async def test_a_request_is_cancelled_by_its_id(runtime: Runtime) -> None:
    """L6: the stream ends as cancelled, with what it had."""
    events = []
    async for event in runtime.stream(GenerateRequest(prompt="hello"), "mine"):
        events.append(event)
        if len(events) == 5:
            await runtime.cancel("mine")
    assert isinstance(events[-1], Finished)
    assert [e.finish_reason for e in events if isinstance(e, Delta)][-1] is FinishReason.CANCELLED
    with pytest.raises(RequestNotFoundError):
        await runtime.cancel("mine")


async def test_a_request_is_paused_and_goes_on_by_its_id() -> None:
    """Q17, I9: no token between `Paused` and `Resumed`, the text of an undisturbed run in all."""
    asked = GenerateRequest(prompt="hello", max_tokens=60, sampling=Sampling(seed=5))
    async with Runtime(f"{FAKE},step_delay_s=0.005", isolation="thread", slots=2) as runtime:
        expected = [e async for e in runtime.stream(asked) if isinstance(e, Delta)]
        events = []
        async for event in runtime.stream(asked, "mine"):
            events.append(event)
            if sum(isinstance(e, Delta) for e in events) == 5 and isinstance(event, Delta):
                await runtime.pause_request("mine")
                await runtime.pause_request("mine")
            if isinstance(event, Paused):
                paused = (await runtime.status()).engine.paused
                assert [waiting.request_id for waiting in paused] == ["mine"]
                await collect(runtime.generate("other", max_tokens=2))
                await runtime.resume_request("mine")
        kinds = [type(event) for event in events]
        assert (kinds.count(Paused), kinds.count(Resumed)) == (1, 1)
        assert kinds[kinds.index(Paused) + 1] is Resumed
        deltas = [event for event in events if isinstance(event, Delta)]
        assert [d.token_ids for d in deltas] == [d.token_ids for d in expected]
        for act in (runtime.pause_request, runtime.resume_request):
            with pytest.raises(RequestNotFoundError):
                await act("mine")


async def test_a_paused_request_is_still_paused_in_the_next_engine() -> None:
    """Q17, L3: killed meanwhile; the status shows it paused again, and no token is lost."""
    asked = GenerateRequest(prompt="hello", max_tokens=40, n=2, sampling=Sampling(seed=5))
    async with Runtime(f"{FAKE},step_delay_s=0.005", slots=4) as runtime:
        expected = [e for e in [e async for e in runtime.stream(asked)] if isinstance(e, Delta)]
        events = []
        async for event in runtime.stream(asked, "mine"):
            events.append(event)
            if len(events) == 10:
                await runtime.pause_request("mine")
            if isinstance(event, Paused):
                os.kill((await runtime.status()).pid, signal.SIGKILL)
                await collect(runtime.generate("other", max_tokens=2))
                status = await runtime.status()
                assert [waiting.request_id for waiting in status.engine.paused] == ["mine", "mine"]
                assert status.restarts == 1
                await runtime.resume_request("mine")
        deltas = [event for event in events if isinstance(event, Delta)]
        assert tokens_by_choice(deltas) == tokens_by_choice(expected)
        assert [type(event) for event in events].count(Paused) == 1


def tokens_by_choice(deltas: list[Delta]) -> dict[int, list[int]]:
    """All token ids of each choice."""
    return {index: [t for d in deltas if d.index == index for t in d.token_ids] for index in (0, 1)}


async def test_generating_shows_nothing_of_a_pause() -> None:
    """I9, Q17: the text arrives later, that is all."""
    async with Runtime(f"{FAKE},step_delay_s=0.005", isolation="thread", slots=2) as runtime:
        deltas = []
        async for delta in runtime.generate("hello", max_tokens=40):
            deltas.append(delta)
            if len(deltas) == 3:
                (slot,) = [s for s in (await runtime.status()).engine.slots if s.request_id]
                assert slot.request_id
                await runtime.pause_request(slot.request_id)
                await collect(runtime.generate("other", max_tokens=2))
                await runtime.resume_request(slot.request_id)
        assert sum(len(delta.token_ids) for delta in deltas) == 40


async def test_a_full_line_is_refused_before_anything_is_computed() -> None:
    """Q11: `max_queue` people, half as many jobs; whoever leaves makes room."""
    async with Runtime(FAKE, isolation="thread", slots=1, max_queue=2, drain_s=0.0) as runtime:
        streams = [runtime.generate("hello", max_tokens=500) for _ in range(3)]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        for priority in ("interactive", "background"):
            with pytest.raises(QueueFullError) as caught:
                await collect(runtime.generate("more", priority=priority))
            assert (caught.value.retry_after_s or 0.0) >= 1.0
        await asyncio.gather(*waiting)
        for stream in streams:
            await stream.aclose()
        assert len(await collect(runtime.generate("more", max_tokens=2))) == 2


async def test_text_becomes_tokens_and_back(runtime: Runtime) -> None:
    """I9: with the bytes of each token."""
    tokens, pieces = await runtime.tokenize("héllo", add_special=False)
    assert b"".join(pieces).decode() == "héllo"
    assert await runtime.detokenize(tokens) == "héllo"
    with pytest.raises(StokerError):
        await runtime.detokenize([10**9])


async def test_a_chat_is_rendered_by_the_models_template(runtime: Runtime) -> None:
    """I9: and generation goes on from it."""
    messages = [{"role": "user", "content": "hi"}]
    assert "hi" in runtime.render_chat(messages)
    deltas = await collect(runtime.chat(messages, max_tokens=3))
    assert deltas[-1].usage is not None


async def test_the_status_shows_engine_and_slots(runtime: Runtime) -> None:
    """I4: pid, state, restarts, label, threads and the engine's own figures."""
    status = await runtime.status()
    assert (status.state, status.restarts, len(status.engine.slots)) == ("serving", 0, 4)
    assert status.label == runtime.models[0].label
    for name in ("slots", "queue", "parked", "paused", "models", "memory", "cache", "counters"):
        assert getattr(status, name) is getattr(status.engine, name)


async def test_loads_are_reported_and_names_must_differ() -> None:
    """I9, R4: the hook sees loading and ready; two models of one name are refused."""
    states: list[ModelState] = []
    runtime = Runtime(FAKE, isolation="thread")
    runtime.on_load = states.append
    assert not runtime.is_ready
    with pytest.raises(NotReadyError):
        runtime.resolve(None)
    async with runtime:
        assert runtime.is_ready
    assert not runtime.is_ready
    assert [state.state for state in states][:: len(states) - 1] == ["loading", "ready"]
    with pytest.raises(InvalidRequestError, match="two models"):
        await Runtime(FAKE, models=["fake:"], isolation="thread").start()
    await Runtime(FAKE).close()


async def test_a_runtime_is_closed_once_and_not_started_again() -> None:
    """L4: closing is idempotent, a second start is told what to do."""
    runtime = Runtime(settings=EngineSettings(models=(FAKE,), isolation="thread", drain_s=0.0))
    async with runtime:
        waiting = asyncio.ensure_future(collect(runtime.generate("hello")))
        await anext(runtime.generate("hello"))
    assert (await waiting)[-1].finish_reason is not None
    await runtime.close()
    with pytest.raises(InvalidRequestError, match="make a new one"):
        await runtime.start()
    with pytest.raises(NotReadyError):
        await collect(runtime.generate("hello"))


def test_a_script_needs_no_event_loop() -> None:
    """I9: stoker.sync mirrors the runtime; leaving an iteration early cancels its request."""
    with stoker.sync.Runtime(FAKE, isolation="thread", slots=2, drain_s=0.0) as runtime:
        assert runtime.is_ready
        deltas = list(runtime.generate("hello", max_tokens=4, temperature=0.0))
        assert deltas[-1].usage is not None
        for _ in runtime.generate("hello"):
            break
        assert list(runtime.chat([{"role": "user", "content": "hi"}], max_tokens=2))
        tokens, _ = runtime.tokenize("hi", add_special=False)
        assert runtime.detokenize(tokens) == "hi"
        assert "hi" in runtime.render_chat([{"role": "user", "content": "hi"}])
        assert runtime.status().state == "serving"
        assert runtime.stats()["num_live_requests"] == 0
        with pytest.raises(ModelNotFoundError):
            list(runtime.generate("hello", model="x"))
        for act in (runtime.cancel, runtime.pause_request, runtime.resume_request):
            with pytest.raises(RequestNotFoundError):
                act("nobody")
    runtime.close()
    with pytest.raises(RuntimeError, match="not running"):
        runtime.status()


def test_a_script_hears_why_its_model_does_not_start() -> None:
    """L6: and nothing is left running."""
    runtime = stoker.sync.Runtime("no/such/file.gguf")
    with pytest.raises(ModelNotFoundError, match="no such model file"):
        runtime.start()
    assert not runtime._loop.is_running


async def test_a_request_is_listed_and_cancelled_while_its_constraint_is_translated(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC S5, Q11: it is live from its arrival, and its place is taken, whatever its grammar takes."""
    never: Future[Any] = Future()
    monkeypatch.setattr(runtime._client.workers, "submit", lambda *_, **__: never)
    request = GenerateRequest(
        prompt="hello", model="fake", constraint=Constraint(kind=ConstraintKind.REGEX, source="a+")
    )

    async def read() -> list[StreamEvent]:
        return [event async for event in runtime.stream(request, request_id="mine")]

    reader = asyncio.ensure_future(read())
    while not runtime.with_client():
        assert not reader.done(), reader
        await asyncio.sleep(0)
    assert [kept.id for kept in runtime.with_client()] == ["mine"]
    await runtime.cancel("mine")
    *_, end, finished = await reader
    assert never.cancelled()
    assert isinstance(end, Delta)
    assert end.finish_reason is FinishReason.CANCELLED
    assert isinstance(finished, Finished)
    assert runtime.with_client() == []


async def test_a_limit_below_what_stoker_itself_takes_is_told_as_a_sum_that_is_true() -> None:
    """SPEC R1: what may be used, what is taken and what has to stay free are named apart."""
    with pytest.raises(ModelTooLargeError) as refused:
        async with Runtime("fake:eog_period=5", memory_limit="100MB"):
            pass
    text = refused.value.message
    assert "of the 95.4 MiB that may be used here Stoker itself takes" in text
    assert text.endswith("and 512 MiB have to stay free (memory_margin)")
