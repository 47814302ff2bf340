"""Models that come and go over HTTP: one load for all who ask, none for who has left, nothing left behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from real_server import MODEL, Answer, Event, RealServer, copies, is_a, serving

ALONE = {"slots": 2, "ctx_size": 2048, "memory_margin": 0}
SLOW = "fake:load_s=120,eog_period=0,weights_mib=600"
ONE_FITS = {"slots": 2, "ctx_size": 2048, "memory_margin": 0, "memory_limit": "800MiB"}
SLACK_BYTES = 64 * 2**20


@pytest.mark.long
async def test_twenty_first_requests_cause_one_load(tmp_path: Path) -> None:
    """SPEC R4: all of them wait for the same load, and each gets its own answer."""
    (other,) = copies(tmp_path, "other")
    async with serving("fake:eog_period=0", other, **ALONE) as server:
        await server.unload("other")
        await server.tape.until(
            lambda events: any(is_a(e, "model", model="other", state="absent") for e in events)
        )
        num_before = len(server.tape.events)
        answers = [Answer(f"first-{number}") for number in range(20)]
        asks = [server.stream(answer, f"Number {answer.name} is", 2, model="other") for answer in answers]
        await asyncio.gather(*asks)
        assert [(answer.finish, len(answer.tokens)) for answer in answers] == [("length", 2)] * 20
        told = [
            event
            for event in server.tape.events[num_before:]
            if is_a(event, "model", model="other", what="moved")
        ]
        assert [event["state"] for event in told].count("ready") == 1
        assert [event.get("stage") for event in told].count("header") == 1
        fractions = [event["fraction"] for event in told if event["state"] == "loading"]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        assert len(fractions) < 100, "events of a load drive the others out of a watcher's buffer"


@pytest.mark.long
async def test_a_load_that_nobody_waits_for_any_more_stops() -> None:
    """SPEC R4: its only requester leaves or cancels, or it is unloaded; the other model is there at once."""
    async with serving(MODEL, SLOW, **ONE_FITS) as server:
        assert await server.model_state("fake") == "absent"  # there was no room for it beside the first
        for give_up in (leave, cancel, unload, leave_the_load):
            ask = (
                server.load("fake") if give_up in (unload, leave_the_load) else server.stream(*slow_request())
            )
            asking = asyncio.create_task(ask)
            num_before = len(server.tape.events)
            await server.tape.until(lambda events, since=num_before: is_loading(events[since:]))
            begun_s = time.monotonic()
            await give_up(server, asking)
            answer = await server.stream(Answer("other"), "Water boils at", 2)
            took_s = time.monotonic() - begun_s
            assert (answer.finish, await server.model_state("fake")) == ("length", "absent")
            print(f"\n{give_up.__name__}: stopped, and the other model answered, after {took_s:.2f} s")  # noqa: T201
        assert (await server.status())["engine"]["restarts"] == 0


def slow_request() -> tuple[Answer, str, int, str]:
    """For the model that takes two minutes to load."""
    return Answer("only"), "x", 4, "fake"


def is_loading(events: list[Event]) -> bool:
    """Whether the loader is at it."""
    return any(is_a(event, "model", model="fake", stage="weights") for event in events)


async def leave(server: RealServer, asking: asyncio.Task) -> None:
    """The client of the request disconnects."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


leave_the_load = leave


async def cancel(server: RealServer, asking: asyncio.Task) -> None:
    """The request is cancelled by its id."""
    (await server.http.post("/v1/runtime/requests/only/cancel")).raise_for_status()
    assert (await asking).finish == "cancelled"


async def unload(server: RealServer, asking: asyncio.Task) -> None:
    """Somebody else wants the model gone: who waited for it hears so."""
    (await server.unload("fake")).raise_for_status()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


@pytest.mark.long
async def test_five_loads_leave_nothing_behind() -> None:
    """SPEC R10: server and engine together hold no more after five loads, uses and unloads than after one."""
    async with serving("fake:eog_period=0", MODEL, **ALONE) as server:
        model = server.models[1]
        sizes = []
        for number in range(6):
            (await server.load(model)).raise_for_status()
            answer = await server.stream(Answer(f"use-{number}"), "Water boils at", 2, model=model)
            assert answer.finish == "length"
            loaded = server.rss_bytes()
            (await server.unload(model)).raise_for_status()
            sizes.append(server.rss_bytes())
            assert loaded - sizes[-1] > 100 * 2**20, "it was not in memory, or did not go"
        print("\nMiB after each unload:", [size // 2**20 for size in sizes])  # noqa: T201
        assert max(sizes) - sizes[0] < SLACK_BYTES
