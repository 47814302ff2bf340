"""A site on a cluster of Ray, deployed by the command: replicas come and go under streams, and lose none.

Slow: Ray starts a process for each replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.ray_head import ENVIRONMENT, ray_head

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 120.0
POLL_S = 0.3
FILE = """\
port = {port}
slots = {slots}
run_dir = "{folder}/run"
cache_dir = "{folder}/cache"
{server}
[models.story]
file = "fake:eog_period=0,step_delay_s=0.02"
[ray]
name = "tested"
ingress = "{ingress}"
min_replicas = {least}
max_replicas = {most}
cpus = 0.2
door_cpus = 0.2
scale_wait_s = 0.5
scale_out_after_s = 1
scale_in_after_s = 3
"""


@dataclass(frozen=True)
class Cluster:
    """One that runs.

    Attributes:
        address: of its head.
        port: of its sites, which Ray's proxies keep once they have it.
    """

    address: str
    port: int


@contextlib.contextmanager
def new_cluster(folder: Path) -> Iterator[Cluster]:
    """One on which nothing was deployed."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with ray_head(folder) as address:
        yield Cluster(address, port)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests but those of Ray's proxies."""
    with new_cluster(tmp_path_factory.mktemp("ray")) as one:
        yield one


class DeployedSite:
    """The site of a file on the cluster.

    Args:
        cluster: where it is deployed.
        folder: for the file, and what the site stores.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.url = f"http://127.0.0.1:{cluster.port}"

    async def deploy(
        self, *, slots: int = 2, least: int = 1, most: int = 1, ingress: str = "auto", server: str = ""
    ) -> str:
        """What the command says; `server`: more settings of the server."""
        file = self._folder / "site.toml"
        own = {"port": self._cluster.port, "folder": self._folder}
        text = FILE.format(slots=slots, least=least, most=most, ingress=ingress, server=server, **own)
        file.write_text(text, encoding="utf-8")
        return await self.run("deploy", str(file))

    async def run(self, *words: str) -> str:
        """The output of `stoker ray`; it ends well."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stoker.cli", "ray", *words, "--address", self._cluster.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | ENVIRONMENT,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()


@asynccontextmanager
async def deployed(cluster: Cluster, folder: Path, **how: Any) -> AsyncIterator[DeployedSite]:
    """A site that is deleted at the end."""
    site = DeployedSite(cluster, folder)
    assert (await site.deploy(**how)).strip() == site.url
    yield site
    await site.run("delete", "tested")


async def told(
    http: httpx.AsyncClient, number: int, num_tokens: int, priority: str = "interactive"
) -> tuple[str, list[str]]:
    """One stream's text, and the reasons of its ends."""
    body = {"prompt": f"Story {number}", "max_tokens": num_tokens, "seed": number, "stream": True}
    body["priority"] = priority
    text, ends = "", []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, ends


async def until_machines(http: httpx.AsyncClient, is_so: Callable[[list[dict[str, object]]], bool]) -> None:
    """Wait until the door says that of its replicas."""
    async with asyncio.timeout(WAIT_S):
        while True:
            machines = (await http.get("/v1/runtime")).json()["machines"]
            if is_so([one for one in machines if one["state"] == "up"]):
                return
            await asyncio.sleep(POLL_S)


def environments_of(title: str) -> list[dict[str, str]]:
    """Of the processes that Ray gave a title that begins so."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(title):
                found.append(process.environ())
    return found


async def test_replicas_come_for_people_who_wait_and_go_again(cluster: Cluster, tmp_path: Path) -> None:
    """P31: from one to three and back, and every stream has the text of an undisturbed run."""
    async with (
        deployed(cluster, tmp_path, least=1, most=3) as site,
        httpx.AsyncClient(base_url=site.url, timeout=WAIT_S) as http,
    ):
        crowd = [asyncio.ensure_future(told(http, number, 300)) for number in range(16)]
        await until_machines(http, lambda up: len(up) == 3)
        found = await asyncio.gather(*crowd)
        jobs = [asyncio.ensure_future(told(http, number, 800, "background")) for number in range(6)]
        await until_machines(http, lambda up: len(up) == 1)
        assert not all(job.done() for job in jobs)
        long = await asyncio.gather(*jobs)
        assert [ends for _, ends in found + long] == [["length"]] * 22
        again = [told(http, number, 800) for number in range(6)]
        assert [text for text, _ in await asyncio.gather(*again)] == [text for text, _ in long]
        assert [text for text, _ in found[:6]] == [text[:300] for text, _ in long]


async def test_what_ray_starts_has_the_quick_way_between_its_processes(tmp_path: Path) -> None:
    """P42, P43: on a cluster that was started without it too; Ray's proxies answer there, and stay."""
    kinds = ("ProxyActor", "ServeReplica:tested")
    with new_cluster(tmp_path) as cluster:
        async with deployed(cluster, tmp_path, ingress="proxy") as site:
            found = {kind: environments_of(f"ray::{kind}") for kind in kinds}
            await site.deploy(ingress="auto")
            async with httpx.AsyncClient(base_url=site.url, timeout=WAIT_S) as http:
                assert (await http.get("/-/healthz")).status_code == 200
                assert (await told(http, 1, 20))[1] == ["length"]
    assert {one.get("RAY_SERVE_PROXY_USE_GRPC") for one in found["ProxyActor"]} == {"1"}
    own_loop = [one.get("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD") for one in found["ServeReplica:tested"]]
    assert own_loop == ["0", "0"]


async def test_another_door_takes_over_the_port_before_the_old_one_goes(
    cluster: Cluster, tmp_path: Path
) -> None:
    """P43: no request is refused meanwhile, and what the old one has ends there."""
    async with (
        deployed(cluster, tmp_path) as site,
        httpx.AsyncClient(base_url=site.url, timeout=WAIT_S) as http,
    ):
        assert environments_of("ray::ProxyActor") == []
        long = asyncio.ensure_future(told(http, 1, 1000))
        is_over = asyncio.Event()

        async def again_and_again() -> list[list[str]]:
            found = []
            while not is_over.is_set():
                async with httpx.AsyncClient(base_url=site.url, timeout=WAIT_S) as one:  # a new connection
                    found.append((await told(one, 2, 3))[1])
            return found

        asking = asyncio.ensure_future(again_and_again())
        await site.deploy(server="strict = true")
        async with asyncio.timeout(WAIT_S):
            while (await http.post("/v1/completions", json={"prompt": "a", "maxx": 1})).status_code != 400:  # noqa: ASYNC110 - another program's
                await asyncio.sleep(POLL_S)
        is_over.set()
        assert {tuple(ends) for ends in await asking} == {("length",)}
        assert (await long)[1] == ["length"]


async def test_a_rolling_update_under_streams_loses_none(cluster: Cluster, tmp_path: Path) -> None:
    """P33: replicas of other settings replace those that are there; each stream ends once, with its text."""
    async with (
        deployed(cluster, tmp_path, least=2, most=2) as site,
        httpx.AsyncClient(base_url=site.url, timeout=WAIT_S) as http,
    ):
        await until_machines(http, lambda up: len(up) == 2)
        calm = await asyncio.gather(*(told(http, number, 200) for number in range(4)))
        is_over = asyncio.Event()

        async def again_and_again(number: int) -> list[tuple[str, list[str]]]:
            found = []
            while not is_over.is_set():
                found.append(await told(http, number, 200))
            return found

        load = [asyncio.ensure_future(again_and_again(number)) for number in range(4)]
        await site.deploy(slots=3, least=2, most=2)
        await until_machines(http, lambda up: [one["num_slots"] for one in up] == [3, 3])
        is_over.set()
        for number, found in enumerate(await asyncio.gather(*load)):
            assert found
            assert all(one == calm[number] for one in found)
