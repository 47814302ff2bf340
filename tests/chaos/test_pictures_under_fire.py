"""Engine processes killed, crashed and suspended while they look and listen: nobody's answer changes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker import GenerateRequest, Runtime, Sampling
from stoker.client.requests.stream import StreamEvent
from stoker.errors import EngineCrashedError, NotReadyError
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.events import Delta, Finished
from stoker.ipc.request import IMAGE_MARKER, Picture, Sound
from stoker.ipc.status import EngineStatus

MODEL = "fake:eog_period=0,vision=20,hearing=20,step_delay_s=0.005"
SETTINGS = {"ctx_size": 4096, "slots": 8, "n_batch": 32, "threads": 1, "repeatable": "on"}
"""Steps of so few tokens that reading a picture takes two."""
WAIT_S = 30.0
PAUSE_S = 0.005
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 100, "maximum": 999}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GREEDY = Sampling(temperature=0.0)


def picture(shade: int) -> Picture:
    """Of one colour."""
    return Picture(width=2, height=2, rgb=bytes([shade, 9, 9] * 4))


def about(*shades: int, sampling: Sampling = GREEDY, **fields: object) -> GenerateRequest:
    """A question about pictures of these shades."""
    pictures = fields.get("pictures", shades)
    prompt = "look: " + IMAGE_MARKER * len(pictures) + " what is it, and what was it before? " * 3
    given = {"max_tokens": 24, "pictures": tuple(map(picture, shades)), "sampling": sampling, **fields}
    return GenerateRequest(prompt=prompt, **given)


REQUESTS = {
    "greedy": about(10),
    "seeded": about(20, sampling=Sampling(temperature=1.2, seed=5, repeat_penalty=1.2)),
    "two choices": about(20, sampling=Sampling(temperature=1.0, seed=6), n=2),
    "three pictures": about(30, 10, 40, sampling=Sampling(temperature=0.9, seed=7)),
    "schema": about(
        20, max_tokens=200, constraint=Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(SCHEMA))
    ),
    "recording": about(
        sampling=Sampling(temperature=0.9, seed=8), pictures=(Sound(16_000, b"\x05\x07" * 80_000),)
    ),
    "text": GenerateRequest(prompt="no picture at all", max_tokens=60, sampling=GREEDY),
}

SCHEMA_ALONE = GenerateRequest(prompt="x", max_tokens=1, constraint=REQUESTS["schema"].constraint)


@dataclass
class Answer:
    """What one client was given; `ends` counts terminal events."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    ends: int = 0

    def take(self, event: StreamEvent) -> None:
        """Note what the stream said."""
        if isinstance(event, Delta):
            self.tokens.setdefault(event.index, []).extend(event.token_ids)
            self.text[event.index] = self.text.get(event.index, "") + event.text
            if event.finish_reason:
                assert event.index not in self.reasons
                self.reasons[event.index] = event.finish_reason
        self.ends += isinstance(event, Finished)


class Crowd:
    """All requests at once in one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.answers = {name: Answer() for name in REQUESTS}

    async def run(self) -> None:
        """To their ends; the schema has been translated before, so that nobody comes late."""
        async for _ in self.runtime.stream(SCHEMA_ALONE):
            pass
        await asyncio.gather(*(self._read(name) for name in REQUESTS))

    async def _read(self, name: str) -> None:
        async with aclosing(self.runtime.stream(REQUESTS[name], name)) as events:
            async for event in events:
                self.answers[name].take(event)

    @property
    def num_tokens(self) -> int:
        """Given to the greedy one, who looks at a picture."""
        return len(self.answers["greedy"].tokens.get(0, ()))

    @property
    def is_begun(self) -> bool:
        """Every request is the runtime's, or has been."""
        num_ended = sum(answer.ends for answer in self.answers.values())
        return self.runtime.stats()["num_live_requests"] + num_ended == len(REQUESTS)

    async def reach(self, moment: str) -> None:
        """Wait until the engine is there; nobody who looks at a picture has ended before."""
        async with asyncio.timeout(WAIT_S):
            while not (self.is_begun and MOMENTS[moment](self, (await self.runtime.status()).engine)):
                assert not self.answers["greedy"].ends, f"it is too late for {moment}"
                await asyncio.sleep(PAUSE_S)

    async def signal(self, number: signal.Signals) -> None:
        """Send it to the engine's process."""
        os.kill((await self.runtime.status()).pid, number)


def is_encoding(_: Crowd, engine: EngineStatus) -> bool:
    """Somebody's picture is not encoded yet, and is waited for."""
    return engine.counters.get("images_encoded_total") == 0 and engine.counters["num_prefill"] > 0


def is_in_prefill(_: Crowd, engine: EngineStatus) -> bool:
    """The first half of a picture is in its cells."""
    return any(slot.state == "prefill" and len("look: [") < slot.num_tokens < 40 for slot in engine.slots)


def is_answering(crowd: Crowd, engine: EngineStatus) -> bool:
    """Text has come, and there is more to come."""
    return bool(engine.slots) and crowd.num_tokens >= 4


MOMENTS: dict[str, Callable[[Crowd, EngineStatus], bool]] = {
    "encode": is_encoding,
    "prefill": is_in_prefill,
    "answer": is_answering,
}
SOME_MOMENTS = ["encode", *(pytest.param(name, marks=pytest.mark.slow) for name in ("prefill", "answer"))]
Trouble = Callable[[Crowd], Awaitable[None]]


async def answers_with(trouble: Trouble | None, **settings: object) -> dict[str, Answer]:
    """What everybody is given where that happens meanwhile."""
    async with Runtime(MODEL, **{**SETTINGS, **settings}) as runtime:
        crowd = Crowd(runtime)
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.run())
            if trouble is not None:
                await trouble(crowd)
        status = await runtime.status()
        assert {slot.state for slot in status.engine.slots} == {"idle"}
        assert runtime.stats()["num_live_requests"] == 0
    return crowd.answers


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Answer]:
    """What every answer has to equal."""
    with ThreadPoolExecutor() as beside:  # a test's own loop may not run yet, or run already
        answers = beside.submit(asyncio.run, answers_with(None)).result()
    assert all(answer.ends == 1 for answer in answers.values())
    assert len({str(answer.tokens) for answer in answers.values()}) == len(REQUESTS)
    json.loads(answers["schema"].text[0])
    return answers


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_engine_killed_costs_no_answer(undisturbed: dict[str, Answer], moment: str) -> None:
    """SPEC L3, L6: in an encode, in a picture's prefill, in the answers; streams, choices and a schema."""

    async def kill(crowd: Crowd) -> None:
        await crowd.reach(moment)
        await crowd.signal(signal.SIGKILL)

    assert await answers_with(kill) == undisturbed


@pytest.mark.slow
async def test_an_engine_killed_again_and_again_costs_no_answer(undisturbed: dict[str, Answer]) -> None:
    """SPEC L3: at each of the moments in turn, and in the next engine's encode too."""

    async def kill(crowd: Crowd) -> None:
        for moment in ("encode", "encode", "prefill", "encode", "answer"):
            await crowd.reach(moment)
            pid = (await crowd.runtime.status()).pid
            await crowd.signal(signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                while (await crowd.runtime.status()).pid == pid:  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(PAUSE_S)

    assert await answers_with(kill) == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("moment", SOME_MOMENTS)
async def test_a_suspend_costs_no_answer(undisturbed: dict[str, Answer], moment: str) -> None:
    """SPEC L2, Q4: the engine leaves and comes back."""

    async def suspend(crowd: Crowd) -> None:
        await crowd.reach(moment)
        await crowd.runtime.suspend()
        await crowd.runtime.resume()

    assert await answers_with(suspend) == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("moment", SOME_MOMENTS)
async def test_requests_with_pictures_outlast_the_program(
    undisturbed: dict[str, Answer], moment: str, tmp_path: Path
) -> None:
    """SPEC L2: suspended and ended; the next program runs them on, and clients come back by id."""
    settings = {**SETTINGS, "run_dir": tmp_path}
    async with Runtime(MODEL, **settings) as runtime:
        crowd = Crowd(runtime)
        task = asyncio.create_task(crowd.run())
        await crowd.reach(moment)
        await runtime.suspend()
    with pytest.raises(NotReadyError, match="its next start goes on"):
        await task
    ended = {name: answer for name, answer in crowd.answers.items() if answer.ends}
    answers = {name: Answer() for name in REQUESTS if name not in ended}
    assert "greedy" in answers
    async with Runtime(MODEL, **settings) as runtime:

        async def attach(name: str) -> None:
            async with aclosing(runtime.attach(name)) as events:
                async for event in events:
                    answers[name].take(event)

        await asyncio.gather(*map(attach, answers))
    assert answers | ended == undisturbed


@pytest.mark.long
async def test_a_request_paused_while_its_picture_is_encoded_goes_on_after_a_kill(
    undisturbed: dict[str, Answer],
) -> None:
    """SPEC Q17, L3: paused by id in the encode, asleep through a crash, resumed."""

    async def pause(crowd: Crowd) -> None:
        await crowd.reach("encode")
        for name in ("greedy", "three pictures"):
            await crowd.runtime.pause_request(name)
        await crowd.signal(signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            while not crowd.answers["seeded"].tokens:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(PAUSE_S)
        assert not crowd.answers["greedy"].tokens
        for name in ("greedy", "three pictures"):
            await crowd.runtime.resume_request(name)

    assert await answers_with(pause) == undisturbed


@pytest.mark.slow
async def test_a_picture_that_crashes_the_engine_fails_its_request_alone(
    undisturbed: dict[str, Answer],
) -> None:
    """SPEC L3, Q12: native code aborts in the encode of one picture, three times; the others lose nothing."""

    async def poison(crowd: Crowd) -> None:
        await crowd.reach("encode")
        deadly = about(1, pictures=(Picture(width=1, height=1, rgb=bytes([1, 1, 1])),))
        with pytest.raises(EngineCrashedError, match="died 3 times"):
            async for _ in crowd.runtime.generate(deadly):
                pass
        assert (await crowd.runtime.status()).restarts == 3

    assert await answers_with(poison) == undisturbed
