"""Another program takes the memory of SmolLM2's control group and gives it back, while streams run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from control_group import MemoryGroup, memory_group
from real_server import MODEL, Answer, RealServer, is_a, serving

from stoker.machine.ladder import LADDER, Rung

LIMIT_BYTES = 3 * 2**29
SETTINGS = {"slots": 4, "ctx_size": 4096, "memory_margin": "128MiB"}
PROMPTS = {
    "job": "Here is a long list of things that can be found in a kitchen:",
    "capital": "The capital of France is",
    "tale": "Once upon a time",
    "water": "Water boils at",
}
NUM_TOKENS = 40
WARNING, CRITICAL = 0.78, 0.92
SQUEEZER = """
import mmap, sys
held = []
for line in sys.stdin:
    while len(held) < int(line):
        held.append(mmap.mmap(-1, 2**23))
        held[-1].write(b"x" * 2**23)
    while len(held) > int(line):
        held.pop().close()
    print(len(held), flush=True)
"""
"""Holds as many blocks of 8 MiB, every page of them touched, as each line says."""
BLOCK_BYTES = 2**23


class Squeezer:
    """A program in the group that takes memory to order."""

    def __init__(self, group: MemoryGroup, process: asyncio.subprocess.Process) -> None:
        self._group = group
        self._process = process
        self._num_blocks = 0

    async def fill(self, part: float) -> None:
        """Take as much as fills the group to that part of its limit."""
        missing_bytes = int(part * self._group.limit_bytes) - self._group.used_bytes()
        await self._hold(self._num_blocks + missing_bytes // BLOCK_BYTES)

    async def give_back(self) -> None:
        """All of it."""
        await self._hold(0)

    async def _hold(self, num_blocks: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_blocks}\n".encode())
        assert int(await self._process.stdout.readline()) == num_blocks
        self._num_blocks = num_blocks


@asynccontextmanager
async def squeezing(group: MemoryGroup) -> AsyncIterator[Squeezer]:
    """One of them for a while."""
    pipe = asyncio.subprocess.PIPE
    command = group.enter(sys.executable, "-c", SQUEEZER)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        yield Squeezer(group, process)
    finally:
        process.kill()
        await process.communicate()


class Streams:
    """Four clients, one of them with background work, who ask again as soon as they have their answer."""

    def __init__(self, server: RealServer) -> None:
        self._server = server
        self._is_over = False
        self.answers: list[Answer] = []

    async def ask_once(self, name: str) -> Answer:
        """One stream."""
        tier = "flex" if name == "job" else "default"
        answer = Answer(name)
        self.answers.append(answer)
        return await self._server.stream(answer, PROMPTS[name], NUM_TOKENS, service_tier=tier)

    async def ask_all(self) -> None:
        """Until told to end."""
        await asyncio.gather(*map(self._ask, PROMPTS))

    async def _ask(self, name: str) -> None:
        while not self._is_over:
            await self.ask_once(name)

    def end(self) -> None:
        """After the answers of the moment."""
        self._is_over = True


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """Room for the model and as much again."""
    with memory_group(LIMIT_BYTES) as made:
        yield made


async def squeeze(server: RealServer, squeezer: Squeezer, back_to: Rung) -> list[tuple[str, bool]]:
    """Into warning, into critical and back; returns the ladder's moves until that rung is undone."""
    num_before = len(server.tape.events)

    async def until_moved(rung: Rung, *, is_undone: bool) -> None:
        await server.tape.until(
            lambda events: any(is_a(e, "rung", rung=rung, is_undone=is_undone) for e in events[num_before:])
        )

    await squeezer.fill(WARNING)
    await until_moved(Rung.DROP_IDLE_CELLS, is_undone=False)
    await squeezer.fill(CRITICAL)
    await until_moved(Rung.PARK_INTERACTIVE, is_undone=False)
    await squeezer.give_back()
    await until_moved(back_to, is_undone=True)
    told = server.tape.events[num_before:]
    levels = [event["level"] for event in told if is_a(event, "pressure")]
    assert {"warning", "critical"} <= set(levels)
    assert levels[-1] == "normal"
    return [(event["rung"], event["is_undone"]) for event in told if is_a(event, "rung")]


async def over_squeezes(group: MemoryGroup, number: int, back_to: Rung) -> None:
    """So many squeezes while streams run."""
    undone = LADDER[LADDER.index(back_to) :]
    climb = [(rung.value, False) for rung in LADDER]
    descent = [(rung.value, True) for rung in reversed(undone)]
    async with serving(MODEL, group=group, **SETTINGS) as server, squeezing(group) as squeezer:
        alone = Streams(server)
        expected = dict(zip(PROMPTS, await asyncio.gather(*map(alone.ask_once, PROMPTS)), strict=True))
        streams = Streams(server)
        asking = asyncio.create_task(streams.ask_all())
        for _ in range(number):
            assert await squeeze(server, squeezer, back_to) == climb + descent
        streams.end()
        await asking
        for answer in streams.answers:
            answer.assert_equals(expected[answer.name])
        status = await server.status()
        assert status["memory"]["pressure"] == "normal"
        assert len(status["memory"]["rungs"]) <= LADDER.index(back_to)
        assert [model["state"] for model in status["models"]] == ["ready"]
        assert status["engine"]["restarts"] == 0
    assert group.num_kills() == 0


@pytest.mark.slow
async def test_a_squeeze_to_the_top_of_the_ladder_costs_no_stream_a_token(group: MemoryGroup) -> None:
    """SPEC M3, M4: rungs are taken in order and undone in order until all run again; every text is whole."""
    await over_squeezes(group, 1, back_to=Rung.PAUSE_BACKGROUND)


@pytest.mark.slow
async def test_after_two_squeezes_everything_is_as_before(group: MemoryGroup) -> None:
    """SPEC M3, M4: likewise twice, and each time until no rung is taken any more."""
    await over_squeezes(group, 2, back_to=LADDER[0])
