"""A server suspended in the middle of six streams: the machine is free at once, nobody's text changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import openai
import psutil
import pytest
from real_server import MODEL, Answer, RealServer, serving

SETTINGS = {"slots": 4, "ctx_size": 4096, "memory_margin": 0}
LONG = " ".join(f"In the year {year} nothing of note was written down." for year in range(1400, 1440))
PROMPTS = {
    "first-job": "Here is a long list of things that can be found in a kitchen:",
    "second-job": "Once upon a time there was a lighthouse keeper who",
    "river": "The three largest rivers of Europe are",
    "season": "My favourite season is",
    "water": "Water boils at",
    "year": LONG,
}
NUM_TOKENS = 28


def new_answers() -> dict[str, Answer]:
    """Nothing delivered yet."""
    return {name: Answer(name) for name in PROMPTS}


def ask(server: RealServer, answer: Answer, **fields: Any) -> asyncio.Task[Answer]:
    """Stream one of them; jobs are background."""
    if answer.name.endswith("job"):
        fields["service_tier"] = "flex"
    return asyncio.create_task(server.stream(answer, PROMPTS[answer.name], NUM_TOKENS, **fields))


async def undisturbed() -> dict[str, Answer]:
    """All of them where nobody disturbs them."""
    answers = new_answers()
    async with serving(MODEL, **SETTINGS) as server:
        await asyncio.gather(*(ask(server, answer) for answer in answers.values()))
    return answers


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    """What every test's answers have to equal."""
    with ThreadPoolExecutor() as beside:  # a test's own loop may not run yet, or run already
        return beside.submit(asyncio.run, undisturbed()).result()


async def begin(server: RealServer, answers: dict[str, Answer]) -> list[asyncio.Task[Answer]]:
    """All six: four slots, two jobs parked for others, and one whose prompt is being read."""
    tasks = []
    for pair in batched(answers.values()):
        tasks += [ask(server, answer) for answer in pair]
        for answer in pair:
            if answer.name != "year":
                await answer.reach(2)
    status = await server.until(lambda status: "prefill" in states(status))
    assert states(status).count("prefill") == 1
    assert len(status["parked"]) == 2
    assert {waiting["class"] for waiting in status["parked"]} == {"background"}
    assert [answer.finish for answer in answers.values()] == [None] * 6
    return tasks


def batched(answers: Iterable[Answer]) -> Iterator[tuple[Answer, Answer]]:
    """Two and two."""
    each = iter(answers)
    return zip(each, each, strict=True)


def states(status: dict) -> list[str]:
    """Of the slots."""
    return [slot["state"] for slot in status["slots"]]


async def suspend(server: RealServer) -> None:
    """Suspend; the engine's process is gone, and with it all memory but the front's own."""
    before, engine_pid = server.rss_bytes(), (await server.status())["engine"]["pid"]
    begun_s = time.monotonic()
    await server.suspend()
    took_s = time.monotonic() - begun_s
    assert not psutil.pid_exists(engine_pid)
    others = [process for process in server.processes() if process.pid != server.pid]
    _, left = await asyncio.to_thread(psutil.wait_procs, others, timeout=10)  # workers end a moment later
    assert left == []
    print(f"\nsuspended in {took_s:.2f} s: {before / 2**20:.0f} MiB to {server.rss_bytes() / 2**20:.0f} MiB")  # noqa: T201
    status = await server.status()
    assert status["engine"]["state"] == "suspended"
    assert {model["state"] for model in status["models"]} == {"suspended"}


@pytest.mark.long
async def test_six_streams_outlast_a_suspend(expected: dict[str, Answer]) -> None:
    """SPEC L2: two are parked, one is in prefill; the engine leaves, comes back, and each text is whole."""
    async with serving(MODEL, **SETTINGS) as server:
        answers = new_answers()
        tasks = await begin(server, answers)
        await suspend(server)
        num_before = sum(len(answer.tokens) for answer in answers.values())
        newcomer = ask(server, Answer("water"))
        await server.resume()
        await asyncio.gather(*tasks)
        assert sum(len(answer.tokens) for answer in answers.values()) > num_before
        for name, answer in answers.items():
            answer.assert_equals(expected[name])
        (await newcomer).assert_equals(expected["water"])
        assert (await server.status())["engine"]["restarts"] == 0


@pytest.mark.slow
async def test_six_requests_outlast_the_server(expected: dict[str, Answer]) -> None:
    """SPEC L2: ended while suspended and started again, it runs them on; clients come back by id."""
    async with serving(MODEL, **SETTINGS) as server:
        answers = new_answers()
        tasks = await begin(server, answers)
        await suspend(server)
        assert await server.end() == 0
        for task in tasks:
            with suppress(openai.APIError):
                await task
    for answer in answers.values():
        assert len(answer.tokens) < NUM_TOKENS, f"{answer.name} had ended before"
    async with serving(MODEL, **SETTINGS) as server:
        kept = (await server.http.get("/v1/runtime/requests")).json()["data"]
        assert {name for entry in kept if entry["is_kept"] for name in entry["names"]} >= set(PROMPTS)
        again = new_answers()
        await asyncio.gather(*map(server.attach, again.values()))
        for name, answer in again.items():
            answer.assert_equals(expected[name])
            assert answer.text.startswith(answers[name].text)
