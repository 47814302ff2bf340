"""Many prompts in one call: backpressure, order, progress, failures, cancelling."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from scripted_engine import model_info

import stoker.sync
from stoker import Answer, FinishReason, Runtime, TextDelta
from stoker.errors import (
    AnswerInvalidError,
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    ServerBusyError,
    StokerError,
)
from stoker.ipc.model import ModelInfo
from stoker.tasks import form
from stoker.tasks.backpressure import Backpressure
from stoker.tasks.batch import AnswerRate, BatchProgress, batch

FAKE = "fake:eog_period=0"


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """Two slots and a line of 32, of which jobs may take 16: less than a batch asks at once."""
    async with Runtime(
        FAKE, isolation="thread", slots=2, ctx_size=2048, max_queue=32, drain_s=0.0
    ) as started:
        yield started


async def test_600_prompts_have_600_answers_beside_a_person(runtime: Runtime):
    """No QueueFullError in a line of 16, each answer its own, and people are answered meanwhile (D16)."""
    prompts = [f"prompt {index}" for index in range(600)]
    beside: list[Answer] = []
    at_done: list[int] = []

    async def person() -> None:
        beside.append(await runtime.ask("me first", max_tokens=3, seed=1))

    tasks = []

    def told(progress: BatchProgress) -> None:
        at_done.append(progress.num_done)
        if progress.num_done % 100 == 50:
            tasks.append(asyncio.create_task(person()))

    how: dict[str, Any] = {"max_tokens": 3, "seed": 5, "raw": True}
    answers = await runtime.batch(prompts, progress=told, **how)
    await asyncio.gather(*tasks)
    assert at_done == list(range(1, 601))
    assert len(answers) == 600
    assert all(answer.error is None and answer.usage.completion_tokens == 3 for answer in answers)
    assert len(beside) == 6
    for index in (0, 299, 599):
        assert answers[index].text == (await runtime.ask(prompts[index], **how)).text
    assert len({answer.request_id for answer in answers}) == 600
    assert runtime.stats()["num_live_requests"] == 0


async def test_a_batch_is_background_work_with_ids_of_its_own(runtime: Runtime):
    """Q1: people go first; one of the prompts is cancelled by its id, and has the text that there was."""
    seen: set[str] = set()
    asked: asyncio.Task[list[Answer]] | None = None
    async with aclosing(runtime.events()) as events:
        async for event in events:
            asked = asked or asyncio.create_task(
                runtime.batch(["a", "b"], request_id="job", max_tokens=1500, raw=True)
            )
            if event.fields.get("what") == "admitted":
                seen.add(event.fields["request_id"])
            if len(seen) == 2:
                break
    status = await runtime.status()
    assert {slot.priority for slot in status.engine.slots if slot.request_id} == {"background"}
    await runtime.cancel("job-0")
    assert asked is not None
    first, second = await asked
    assert (first.finish_reason, first.request_id) == (FinishReason.CANCELLED, "job-0")
    assert (second.finish_reason, second.request_id) == (FinishReason.LENGTH, "job-1")


async def test_leaving_a_batch_ends_what_it_has_asked(runtime: Runtime):
    """S5: nothing of it is left, running or waiting."""
    first = asyncio.Event()
    asked = asyncio.create_task(
        runtime.batch(["a"] * 9, max_tokens=900, raw=True, progress=lambda _: first.set())
    )
    await first.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert (await runtime.ask("b", max_tokens=1)).error is None
    assert runtime.stats()["num_live_requests"] == 0


def test_an_interrupted_script_leaves_nothing_of_a_batch_behind():
    """S5: Ctrl-C while the main thread waits ends what the runtime's thread does for it."""
    main = threading.main_thread().ident
    assert main is not None
    with stoker.sync.Runtime(FAKE, isolation="thread", slots=2, drain_s=0.0) as runtime:
        with pytest.raises(KeyboardInterrupt):
            runtime.batch(
                ["a"] * 99,
                max_tokens=900,
                raw=True,
                progress=lambda told: told.num_done == 1 and signal.pthread_kill(main, signal.SIGINT),
            )
        assert runtime.ask("b", max_tokens=1).error is None
        assert runtime.stats()["num_live_requests"] == 0


async def test_a_prompt_that_fails_has_its_error_in_its_place(runtime: Runtime):
    """FOUND library: the others are answered; the text of an answer that is not of the schema is kept."""
    told: list[BatchProgress] = []
    answers = await runtime.batch(
        ["a", "x" * 9000, "c"], max_tokens=2, schema=list[bool], progress=told.append, seed=1
    )
    kinds = [type(answer.error) for answer in answers]
    assert kinds == [AnswerInvalidError, ContextLengthError, AnswerInvalidError]
    assert all(answer.finish_reason is FinishReason.ERROR for answer in answers)
    assert answers[0].text == answers[0].error.details["text"] != ""
    assert (told[-1].num_done, told[-1].num_failed, told[-1].num_total) == (3, 3, 3)
    assert told[-1].eta_s == 0.0


async def test_an_id_that_is_in_use_is_the_error_of_its_prompt_alone():
    """I8: each prompt has an id of its own, so the others are answered."""
    async with (
        Runtime(f"{FAKE},step_delay_s=0.01") as runtime,
        aclosing(runtime.generate("a", request_id="job-1", max_tokens=900)) as other,
    ):
        await anext(other)
        answers = await runtime.batch(["a", "b", "c"], request_id="job", max_tokens=2)
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert "'job-1' is in use" in str(answers[1].error)


async def test_a_schema_is_read_once_for_all_prompts(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    """What pydantic makes of a class takes milliseconds, on the loop that all requests share."""
    read: list[object] = []
    of_class = form._of_class
    monkeypatch.setattr(form, "_of_class", lambda given: (read.append(given), of_class(given))[1])
    answers = await runtime.batch(["a", "b"], schema=bool, max_tokens=20, seed=1)
    assert [answer.parsed in {True, False} for answer in answers] == [True, True]
    assert read == [bool]


async def test_what_is_wrong_with_all_is_raised(runtime: Runtime):
    """Before, or with the first one; no prompt could be answered (D17, D27)."""
    for fields, error, text in (
        ({"temprature": 1}, InvalidRequestError, "did you mean 'temperature'"),
        ({"model": "x"}, ModelNotFoundError, "no model 'x'"),
        ({"schema": "x"}, InvalidRequestError, "schema is a class"),
        ({"max_tokens": "9"}, InvalidRequestError, "max_tokens: expected"),
        ({"concurrency": 0}, InvalidRequestError, "1 or more"),
        ({"concurrency": "x"}, InvalidRequestError, "1 or more"),
    ):
        with pytest.raises(error, match=text):
            await runtime.batch(["a", "b"], **fields)
    for prompts in ("abc", None, 3):
        with pytest.raises(InvalidRequestError, match="prompts is a list"):
            await runtime.batch(prompts)
    assert await runtime.batch([]) == []
    with pytest.raises(ZeroDivisionError):
        await runtime.batch(["a"], max_tokens=1, progress=lambda told: told.index / 0)


def test_a_script_runs_a_batch():
    """I9: progress is told on the runtime's thread."""
    told: list[int] = []
    with stoker.sync.Runtime(FAKE, isolation="thread", drain_s=0.0) as runtime:
        answers = runtime.batch(["a", "b"], max_tokens=2, progress=lambda one: told.append(one.num_done))
    assert [answer.usage.completion_tokens for answer in answers] == [2, 2]
    assert told == [1, 2]


# ------------------------------------------------------------ backpressure


class FullAtFirst:
    """A runtime whose queue is full of others' requests for some calls."""

    def __init__(self, num_refused: int, refusal: type[StokerError] = QueueFullError) -> None:
        self.num_refused = num_refused
        self.refusal = refusal
        self.num_asked = 0

    def resolve(self, model: str | None) -> ModelInfo:
        """Some model."""
        return model_info("m", "m.gguf")

    def chat(self, messages: Any, **fields: Any) -> AsyncGenerator[TextDelta, None]:
        """As a completion."""
        return self.generate(messages, **fields)

    async def generate(self, prompt: Any, **fields: Any) -> AsyncGenerator[TextDelta, None]:
        """Refused at first, then one delta."""
        self.num_asked += 1
        if self.num_asked <= self.num_refused:
            raise self.refusal("full", retry_after_s=0.0)
        yield TextDelta(text=str(prompt), request_id=fields["request_id"], finish_reason=FinishReason.STOP)


@pytest.mark.parametrize("refusal", [QueueFullError, ServerBusyError])
async def test_a_queue_full_of_others_is_asked_again_after_what_it_says(refusal: type[StokerError]):
    """The batch waits for `retry_after_s`; not one prompt is lost (D16), at a server neither."""
    runtime = FullAtFirst(100, refusal)
    answers = await batch(runtime, ["a", "b", "c"], raw=True)
    assert [answer.text for answer in answers] == ["a", "b", "c"]
    assert runtime.num_asked == 103


async def test_a_full_queue_lets_fewer_run_at_once_and_more_later():
    """Q11: what is refused waits for one of the call's own to end; the number grows again with answers."""
    pressure, room, live, most = Backpressure(8), 2, 0, [0]

    async def asked() -> None:
        nonlocal live
        if live >= room:
            raise QueueFullError("full")
        live += 1
        most[-1] = max(most[-1], live)
        await asyncio.sleep(0)
        live -= 1

    await asyncio.gather(*(pressure.run(asked) for _ in range(40)))
    assert most == [2]
    room = 8
    most.append(0)
    await asyncio.gather(*(pressure.run(asked) for _ in range(40)))
    assert 2 < most[1] <= 8


async def test_a_queue_that_others_fill_refuses_who_is_alone():
    """Q11: waiting for one's own end would be for ever."""

    async def refused() -> None:
        raise QueueFullError("full")

    with pytest.raises(QueueFullError):
        await Backpressure().run(refused)


def test_the_rest_takes_what_the_last_answers_took():
    """The rate of now; since the beginning while there are few (D12)."""
    rate = AnswerRate(100.0)
    rate.note(102.0)
    assert rate.eta_s(10) == 20.0
    for second in range(64):
        rate.note(110.0 + second * 0.5)
    assert rate.eta_s(10) == pytest.approx(10 * (141.5 - 102.0) / 64)
    rate.note(142.0)
    assert rate.eta_s(10) == pytest.approx(10 * 32.0 / 64)
    assert rate.eta_s(0) == 0.0
