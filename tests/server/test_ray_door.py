"""A door and two replicas on a cluster of Ray: clients that leave, and a replica that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.ray_cluster import ClusterSite, ray_site

MODEL = "fake:eog_period=0,step_delay_s=0.02"
NUM_STREAMS = 8
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSite]:
    """Two replicas of a fake model."""
    folder: Path = tmp_path_factory.mktemp("ray")
    with ray_site(folder, 2, {"models": [MODEL]}) as started:
        yield started


async def told(http: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> tuple[str, list[str]]:
    """One stream's text, and the reasons of its ends."""
    body = {
        "prompt": f"Story {number}",
        "max_tokens": NUM_TOKENS,
        "seed": number,
        "stream": True,
    }
    text, ends = "", []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]
                text += choice["text"]
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                begun.release()
    return text, ends


async def crowd(url: str, *, victim: psutil.Process | None) -> list[tuple[str, list[str]]]:
    """All streams at once; a process is killed when some tokens have come."""
    begun = asyncio.Semaphore(0)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = [asyncio.ensure_future(told(http, number, begun)) for number in range(NUM_STREAMS)]
        if victim is not None:
            for _ in range(8 * NUM_STREAMS):
                await begun.acquire()
            victim.kill()
        return await asyncio.gather(*asking)


async def machines(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The replicas as the door shows them."""
    found: list[dict[str, Any]] = (await http.get("/v1/runtime")).json()["machines"]
    return found


async def num_busy_until(http: httpx.AsyncClient, num: int) -> None:
    """Until so many slots of all replicas compute."""
    async with asyncio.timeout(30):
        while sum(one["num_busy"] for one in await machines(http)) != num:  # noqa: ASYNC110 - another program's
            await asyncio.sleep(0.1)


@pytest.mark.long
async def test_a_client_that_leaves_cancels_in_the_replica(site: ClusterSite) -> None:
    """P40: its slot there is free again, long before the request would have ended."""
    async with httpx.AsyncClient(base_url=site.url, timeout=60) as http:
        body = {"prompt": "For ever", "max_tokens": 10_000, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            await num_busy_until(http, 1)
            await lines.aclose()
        await num_busy_until(http, 0)


@pytest.mark.long
async def test_streams_outlive_a_replica_of_ray(site: ClusterSite) -> None:
    """P40: each ends once, with the text of an undisturbed run."""
    calm = await crowd(site.url, victim=None)
    replicas = site.replicas()
    assert len(replicas) == 2
    assert await crowd(site.url, victim=replicas[0]) == calm
    assert [ends for _, ends in calm] == [["length"]] * NUM_STREAMS
