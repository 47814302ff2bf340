"""A recorded course of heat, to critical and back: jobs rest, nothing is loaded, people are served slowly."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from real_server import MODEL, Answer, RealServer, is_a, serving

FAKE = "fake:eog_period=0,step_delay_s=0.03"
TRACE = "0,nominal\n4,critical  # the engine's clock: from its first look on\n5.5,nominal\n"
SETTINGS = {"slots": 2, "ctx_size": 2048, "memory_margin": 0}
NUM_JOB_TOKENS = 160
"""More than there is time for before it gets hot: 33 a second at most."""
NUM_TOKENS = 20
HALF = 0.5
SLACK = 0.1


class People:
    """Somebody who asks again and again, and looks at each answer."""

    def __init__(self, server: RealServer) -> None:
        self._server = server
        self._is_over = False
        self.texts: list[str] = []

    async def ask(self) -> None:
        """Until told to end."""
        while not self._is_over:
            answer = Answer(f"person-{len(self.texts)}")
            await self._server.stream(answer, "Somebody asks", NUM_TOKENS)
            self.texts.append(answer.text)

    def end(self) -> None:
        """After the answer of the moment."""
        self._is_over = True


async def busy_share(server: RealServer, num_answers: int, people: People) -> float:
    """The part of the time that is spent in steps while so many further answers come."""
    begun_s, before = time.monotonic(), (await server.status())["counters"]["step_busy_s"]
    wanted = len(people.texts) + num_answers
    await server.until(lambda _: len(people.texts) >= wanted)
    after = (await server.status())["counters"]["step_busy_s"]
    return (after - before) / (time.monotonic() - begun_s)


def standing(status: dict[str, Any]) -> list[str]:
    """The classes of those that do not run: it may have become hot before they began."""
    return [waiting["class"] for waiting in status["parked"] + status["queue"]]


@pytest.mark.slow
async def test_a_machine_that_gets_hot_rests_and_recovers_by_itself(tmp_path: Path) -> None:
    """SPEC M6: background parked, loads refused with the reason, interactive at half speed; then as ever."""
    trace = tmp_path / "heat.csv"
    trace.write_text(TRACE)
    async with serving(FAKE, MODEL, heat_trace=trace, **SETTINGS) as server:
        model = server.models[1]
        await server.unload(model)
        await server.suspend()  # however long the start took: the next engine plays the trace anew
        await server.resume()
        num_before = len(server.tape.events)
        job, people = Answer("job"), People(server)
        working = asyncio.create_task(server.stream(job, "A long job", NUM_JOB_TOKENS, service_tier="flex"))
        asking = asyncio.create_task(people.ask())

        await server.until(lambda status: status["heat"] == "critical")
        await server.until(lambda status: standing(status) == ["background"])
        num_job_tokens = len(job.tokens)
        with pytest.raises(openai.APIError, match=r"too hot to load a model \(critical\)") as refused:
            await server.stream(Answer("refused"), "x", 1, model=model)
        assert refused.value.code == "too_hot"
        answer = await server.load(model)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_hot")
        assert (await server.status())["heat"] == "critical"
        hot_share = await busy_share(server, 2, people)
        assert len(job.tokens) == num_job_tokens, "background goes on"
        assert hot_share < HALF + SLACK

        await server.tape.until(
            lambda events: any(is_a(e, "heat", level="nominal") for e in events[num_before:])
        )
        share = await busy_share(server, 2, people)
        assert share > hot_share
        assert (await server.load(model)).json()["state"] == "ready"
        assert (await working).finish == "length"
        assert len(job.tokens) == NUM_JOB_TOKENS
        people.end()
        await asyncio.wait_for(asking, 60)
        assert len(set(people.texts)) == 1, "an answer differs from the others"
        print(f"\nin steps: {hot_share:.0%} of the time while hot, {share:.0%} afterwards")  # noqa: T201
