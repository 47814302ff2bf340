"""Five hundred requests of every kind through one runtime, its engine killed four times meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections import Counter
from random import Random

import psutil
import pytest
from soak import Client, Crowd, clients

from stoker import Runtime

FAKE = "fake:eog_period=0,step_delay_s=0.001"
NUM_REQUESTS = 500
NUM_AT_ONCE = 40
KILL_AT = [60, 140, 220, 300]
SLACK_BYTES = 64 * 2**20


def runtime() -> Runtime:
    """Eight slots over a pool that holds about half of what they want, and room for a few snapshots."""
    return Runtime(
        FAKE,
        slots=8,
        ctx_size=640,
        park_bytes=4000,
        background_patience_s=0.1,
        watchdog_s=5.0,
    )


async def soak(crowd_of: list[Client]) -> Counter[str]:
    """Run them all, kill the engine now and then, and look at what is left; returns the forms of parking."""
    async with runtime() as served:
        rss = _front_bytes()
        crowd = Crowd(served)
        await crowd.run(crowd_of, NUM_AT_ONCE, KILL_AT, lambda: kill(served))
        assert crowd.stray_events == []
        assert crowd.ends == {client.request_id: 1 for client in crowd_of}
        await assert_nothing_is_left(served)
        assert _front_bytes() - rss < SLACK_BYTES
    return crowd.forms


async def kill(served: Runtime) -> None:
    """SIGKILL to the engine process of the moment."""
    os.kill((await served.status()).pid, signal.SIGKILL)


async def assert_nothing_is_left(served: Runtime) -> None:
    """Neither the front nor the engine holds anything of anybody."""
    held = served.stats()
    assert held.pop("num_restarts") == len(KILL_AT)
    assert set(held.values()) == {0}, held
    engine = (await served.status()).engine
    assert (engine.queue, engine.parked, engine.paused) == ([], [], [])
    assert [slot.state for slot in engine.slots] == ["idle"] * 8
    for name in ("parked_bytes", "num_preparing", "num_waiting", "num_parked", "num_paused", "num_running"):
        assert engine.counters[name] == 0, name


def _front_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


async def check_soak(seed: int) -> None:
    """One soak and its books."""
    crowd_of = clients(Random(seed), NUM_REQUESTS)
    front = psutil.Process()
    tasks, processes, num_files = asyncio.all_tasks(), front.children(recursive=True), front.num_fds()
    forms = await soak(crowd_of)
    for client in crowd_of:
        client.check()
    assert set(forms) == {"cells", "snapshot", "tokens"}
    assert asyncio.all_tasks() == tasks
    assert front.children(recursive=True) == processes
    assert front.num_fds() <= num_files


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)])
async def test_each_of_five_hundred_requests_ends_once_with_the_tokens_it_gets_alone(seed: int) -> None:
    """L3, L6, Q4, Q12, Q17: some cancelled, left, paused, out of time, preempted; the engine killed."""
    await check_soak(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 105))
async def test_the_same_holds_over_five_further_crowds(seed: int) -> None:
    """L3, L6, Q4, Q12, Q17: as above."""
    await check_soak(seed)
