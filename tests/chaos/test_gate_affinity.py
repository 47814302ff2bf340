"""What three real servers behind a gate find computed beside one, and a beginning that everybody uses."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from pathlib import Path

import httpx
import pytest
from bench.fleet_site import Answered, Homes, Players, Words, site, words_of
from bench.fleet_trace import Arrival, Conversation, Next

from stoker.ipc.request import Priority

NUM_CONVERSATIONS, NUM_TURNS = 12, 5
NUM_VIRAL, SYSTEM_TOKENS = 24, 1200
SETTINGS = ("--model", "fake:eog_period=0,step_delay_s=0.02", "--slots", "4", "--cache-disk-bytes", "0")
TIMEOUT_S = 300.0

pytestmark = pytest.mark.slow


def conversations() -> list[Arrival]:
    """They begin at once, each with a text of its own."""
    found = []
    for number in range(NUM_CONVERSATIONS):
        talk = Conversation(number, Priority.INTERACTIVE, deque([Next(0.05, 20, 8)] * NUM_TURNS))
        talk.add(100)
        found.append(Arrival(0.0, talk))
    return found


def viral() -> list[Arrival]:
    """One turn each, all with one system prompt, while the first conversations go on."""
    found = []
    for number in range(1000, 1000 + NUM_VIRAL):
        talk = Conversation(number, Priority.INTERACTIVE, deque([Next(0.0, 0, 24)]))
        talk.chain, talk.tokens = [1], [SYSTEM_TOKENS]  # as it is everybody's
        talk.add(20)
        found.append(Arrival(0.0, talk))
    return found


def hit_rate(answers: list[Answered]) -> float:
    """By tokens."""
    return sum(one.num_cached for one in answers) / sum(one.num_prompt for one in answers)


async def played(http: httpx.AsyncClient, url: str, words: Words, arrivals: list[Arrival]) -> list[Answered]:
    """All of them, by one address."""
    return await Players(http, words, lambda _: url).play(arrivals)


async def test_three_machines_find_nearly_as_much_computed_as_one(tmp_path: Path) -> None:
    """P2: the prefix hit rate of 12 conversations of 5 turns is at least 0.9 of one machine's."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
        with site(tmp_path / "one", 1, *SETTINGS) as servers:
            words = await words_of(http, servers.gate)
            one = hit_rate(await played(http, servers.machines[0], words, conversations()))
        with site(tmp_path / "three", 3, *SETTINGS) as servers:
            three = hit_rate(await played(http, servers.gate, words, conversations()))
    assert one > 0.6
    assert three >= 0.9 * one


async def test_a_viral_beginning_breaks_no_affinity_and_is_spread(tmp_path: Path) -> None:
    """P3: what others have computed is found as without it, and no machine has over 1.25 of the mean."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as http:
        with site(tmp_path, 3, *SETTINGS) as servers:
            words = await words_of(http, servers.gate)
            calm = await played(http, servers.gate, words.salted("calm"), conversations())
            async with Homes(http, servers.machines) as homes:
                others, crowd = await asyncio.gather(
                    played(http, servers.gate, words, conversations()),
                    played(http, servers.gate, words, viral()),
                )
                home = await homes.of([*others, *crowd])
    assert hit_rate(others) >= 0.9 * hit_rate(calm)
    talks = {(home[one.answer_id], one.talk) for one in (*others, *crowd)}
    num_talks = Counter(machine for machine, _ in talks)
    assert len(num_talks) == 3
    assert max(num_talks.values()) <= math.ceil(1.25 * (NUM_CONVERSATIONS + NUM_VIRAL) / 3)
