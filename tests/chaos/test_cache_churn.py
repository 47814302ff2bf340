"""A thousand conversations pass through a small cache: memory and disk stay within what they may take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
import pytest

from conversing import Ask, ask
from stoker import GenerateRequest, Runtime, Sampling
from stoker.cache.disk.files import FOLDER_NAME, PrefixFolder
from tiny_models import TINY

SLACK_BYTES = 64 * 2**20
RAM_BYTES = 8 * 2**20
DISK_BYTES = 16 * 2**20
BATCH = 100
NUM_AT_ONCE = 8
LONG_AGO = 80
"""Conversations after which one is asked again: by then memory has no room for it."""


@dataclass
class Figures:
    """What was seen after a batch, in bytes."""

    ram: int
    disk: int
    folder: int
    parked: int
    rss: int


def model(folder: Path) -> str:
    """A small model of random weights."""
    return str(TINY["jamba"](folder / "tiny.gguf"))


def turns(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two prompts that no other conversation has; the second goes on from the first."""
    random = Random(number)
    first = tuple(random.choices(range(3, 259), k=random.randint(100, 180)))
    return first, first + tuple(random.choices(range(3, 259), k=random.randint(10, 40)))


def conversation(number: int) -> Iterator[Ask]:
    """Both of its turns, and the last of one that ended a while ago."""
    for prompt in (*turns(number), turns(max(0, number - LONG_AGO))[1]):
        request = GenerateRequest(prompt=prompt, max_tokens=2, sampling=Sampling(temperature=0.0))
        yield Ask(request, None, is_cancel=False, expected=[], gaps=[], sure=[])


async def batch(runtime: Runtime, numbers: range) -> None:
    """Those conversations, some at once."""
    waiting = iter(numbers)

    async def worker() -> None:
        for number in waiting:
            for question in conversation(number):
                await ask(runtime, question)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(worker())


def size_of(folder: Path) -> int:
    """What all files in it take, in bytes; one that goes meanwhile takes nothing."""
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


async def look(runtime: Runtime, folder: Path) -> Figures:
    """The engine's own account, and the machine's."""
    status = await runtime.status()
    cache = status.engine.cache
    assert cache.disk_problem == ""
    return Figures(
        cache.ram_bytes,
        cache.disk_bytes,
        size_of(folder),
        int(status.engine.counters["parked_bytes"]),
        psutil.Process(status.pid).memory_info().rss,
    )


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow) for n in (200, 1000)])
async def test_memory_and_disk_stay_within_their_bounds_over_many_conversations(tmp_path, number):
    """C7, C14: after each batch, by the engine's account, the folder's size and the process's memory."""
    seen = []
    settings = {"slots": 4, "ctx_size": 2048, "threads": 1, "cache_dir": tmp_path, "repeatable": "on"}
    settings |= {"cache_ram_bytes": RAM_BYTES, "cache_disk_bytes": DISK_BYTES, "park_bytes": RAM_BYTES}
    prefixes = tmp_path / FOLDER_NAME
    async with Runtime(model(tmp_path), **settings) as runtime:
        await batch(runtime, range(BATCH))  # what the first requests allocate is there from here on
        before = await look(runtime, prefixes)
        for start in range(BATCH, BATCH + number, BATCH):
            await batch(runtime, range(start, start + BATCH))
            seen.append(await look(runtime, prefixes))
        counters = (await runtime.status()).engine.counters
    files = PrefixFolder(prefixes, DISK_BYTES).files()
    entry_bytes = max(file.size_bytes for file in files)
    for figures in seen:
        assert figures.ram <= RAM_BYTES + entry_bytes
        assert max(figures.disk, figures.folder) <= DISK_BYTES + entry_bytes
        grown = (figures.rss - before.rss) - (figures.ram + figures.parked - before.ram - before.parked)
        assert abs(grown) < SLACK_BYTES
    assert counters["cache_evicted_total"] > BATCH
    assert counters["cache_damaged_total"] == 0
    assert sum(file.size_bytes for file in files) <= DISK_BYTES
    report(seen, before, entry_bytes, counters)


def report(seen: list[Figures], before: Figures, entry_bytes: int, counters: dict[str, float]) -> None:
    """The figures, to look at."""
    most = {name: max(getattr(f, name) for f in seen) / 2**20 for name in ("ram", "disk", "folder", "parked")}
    told = ", ".join(f"{name} {value:.1f}" for name, value in most.items())
    grown = max(f.rss for f in seen) - before.rss
    print(f"\nMiB at most: {told}; RSS grew {grown / 2**20:.1f}; an entry {entry_bytes / 2**20:.2f}")  # noqa: T201
    print({name: int(value) for name, value in counters.items() if "cache" in name})  # noqa: T201
