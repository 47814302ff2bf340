"""Workloads in which something could be found again: a crowd, conversations, agents; the cost of looking."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import cache_overhead, status
from bench.client import Client
from bench.errors import BenchError
from bench.peers import Shape, StokerServer
from bench.prompts import random_prompt, shuffled
from bench.target import Target
from bench.workloads import WORKLOADS, agents, shared, turns
from bench_stand_in import Remembering, StandInProcess, num_common, serving

DEFAULT = Shape(num_slots=8, ctx_size=16384, num_threads=2)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in needs no time."""
    monkeypatch.setattr(shared, "HEAD_START_S", 0)


def aim(url: str) -> Target:
    """A target without a process."""
    return Target("x", Client(url))


# ---------------------------------------------------------------- shared and taken over


def test_the_prefix_is_measured_by_as_many_other_words() -> None:
    """C4: another order of the same words is as long, and shares too little to be found."""
    prompt = random_prompt(200, "a")
    other = shuffled(prompt, "b")
    assert sorted(other.split()) == sorted(prompt.split())
    assert num_common(other.split(), prompt.split()) < 8
    assert shuffled(prompt, "b") == other


async def test_a_prefix_computed_once_is_seen_as_computed_once() -> None:
    """C4: by the engine's counter, which is looked at before and after the crowd."""
    stand_in = Remembering()
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["shared"]().run(aim(url), seed=3)
    assert 0.99 < outcome.values["prefix_times"] <= 1.0
    assert 0.99 < outcome.values["prefix_computed"] <= 1.0
    assert outcome.values["hit_rate"] == pytest.approx(15 * 638 / (16 * 658), abs=0.005)
    assert [stage.name for stage in outcome.stages] == ["all at once"]
    assert len(stand_in.bodies) == 17
    assert len({body["prompt"] for body in stand_in.bodies}) == 17


@pytest.mark.parametrize(
    "stand_in", [Remembering(remembers=False), Remembering(remembers=False, is_stoker=False)]
)
async def test_a_prefix_computed_for_each_is_seen_so(stand_in: Remembering) -> None:
    """C4: by the counter where there is one, else by what the answers say of their own prompts."""
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["shared"]().run(aim(url), seed=3)
    assert outcome.values["prefix_times"] == 16
    assert outcome.values["hit_rate"] == 0


async def test_the_counter_is_believed_before_the_answers() -> None:
    """C4: work for a request that ended without an answer is in the counter alone."""
    stand_in = Remembering()
    async with serving(stand_in) as url:
        crowd = shared._Crowd(Client(url), "x")
        cold = await crowd.measure_prefix()
        before = await status.counter(Client(url), status.COMPUTED)
        streams = [await Client(url).complete(request) for request in crowd.requests[:2]]
        stand_in.num_computed += 319
        work = await crowd.work_of(streams, cold, before)
    assert work.prefix_times == pytest.approx(1.5, abs=0.01)


@dataclass
class Held(Remembering):
    """Does not go on with one prompt until all others were asked."""

    prompt: str = ""
    num_others: int = 0
    all_came: asyncio.Event = field(default_factory=asyncio.Event)

    async def timer(self, body: bytes, index: int) -> None:
        """At the first piece: the leader waits, the others are counted."""
        asked = json.loads(body) if body else {}
        if index or asked.get("max_tokens") != shared.NUM_TOKENS:
            return
        if asked["prompt"] == self.prompt:
            await self.all_came.wait()
        else:
            self.num_others += 1
            if self.num_others == shared.NUM_OTHERS:
                self.all_came.set()


async def test_the_first_leaves_and_the_others_are_answered() -> None:
    """C4: the leader is given up long before its first token; fifteen whole answers."""
    stand_in = Held(prompt=shared._Crowd(Client("http://h"), "takeover 3").requests[0].prompt)
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["takeover"]().run(aim(url), seed=3)
    assert outcome.values["left_early"] == 1
    assert outcome.values["complete"] == 15
    assert [trace.is_complete for trace in outcome.traces] == [False] + [True] * 15


# ---------------------------------------------------------------- turns


@dataclass
class Counting(Remembering):
    """Notes how many requests are open at once."""

    num_open: int = 0
    most_open: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One more while it is answered."""
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await super().answer(reader, writer)
        self.num_open -= 1


@pytest.mark.parametrize(("name", "num_at_once"), [("turns", 4), ("turns_alone", 1), ("turns_tight", 2)])
async def test_a_conversation_goes_on_from_what_was_said_when_all_others_had_a_turn(
    name: str, num_at_once: int
) -> None:
    """C2: a later prompt is the earlier one, its answer and more; some turns are open at a time."""
    stand_in = Counting()
    async with serving(stand_in) as url:
        outcome = await WORKLOADS[name]().run(aim(url), seed=3)
    prompts = [body["prompt"] for body in stand_in.bodies]
    answer = "".join(f" t{index}" for index in range(turns.ANSWER_TOKENS))
    first = prompts[:12]
    assert len({prompt[:80] for prompt in first}) == 12
    for begun, grown in ((first, prompts[12:24]), (prompts[12:24], prompts[24:])):
        assert sorted(begun) == sorted(
            prompt for prompt in begun if any(g.startswith(f"{prompt}{answer}\n") for g in grown)
        )
    assert min(num_at_once, 2) <= stand_in.most_open <= num_at_once
    assert outcome.values["complete"] == 36
    assert outcome.values["hit_rate"] > 0.8
    assert [stage.name for stage in outcome.stages] == ["turn 1", "turn 2", "turn 3"]


@dataclass
class Forgetful(Remembering):
    """Cuts the answers of one conversation short from its second turn on."""

    seed: str = ""

    def _documents(self) -> list[dict[str, Any]]:
        prompt = self.bodies[-1]["prompt"]
        self.num_missing = int(prompt.startswith(random_prompt(20, self.seed)) and "\n" in prompt)
        return super()._documents()


async def test_a_turn_that_fails_is_counted_with_those_that_would_have_followed() -> None:
    """Q12: two of thirty-six are missing, and the run goes on."""
    stand_in = Forgetful(seed="turns_tight 3 5")
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["turns_tight"]().run(aim(url), seed=3)
    assert outcome.values["complete"] == 34
    assert len(stand_in.bodies) == 35


async def test_a_server_that_answers_no_turn_takes_the_limit() -> None:
    """L6: no answer is not a fast one."""
    async with serving(Remembering(num_missing=1)) as url:
        outcome = await WORKLOADS["turns_tight"]().run(aim(url), seed=3)
    assert outcome.values["complete"] == 0
    assert outcome.values["ttft_later_ms"] == outcome.values["ttft_first_ms"] == turns.TURN_LIMIT_S * 1e3
    assert outcome.stages == ()


def test_the_cells_for_two_conversations_do_not_hold_three() -> None:
    """C7: slots for four, so that cells are what is short."""
    shape = WORKLOADS["turns_tight"]().shape(DEFAULT)
    whole = turns.PROMPT_WORDS + turns.NUM_TURNS * turns.ANSWER_TOKENS
    whole += (turns.NUM_TURNS - 1) * turns.USER_WORDS
    assert shape.num_slots == 4
    assert 2 * whole < shape.ctx_size < 3 * whole
    assert WORKLOADS["turns"]().shape(DEFAULT).ctx_size > 12 * whole


# ---------------------------------------------------------------- agents


async def test_every_burst_has_the_tools_in_common_and_chats_come_between() -> None:
    """C2: six tasks, four chats that are like nothing else, six tasks."""
    stand_in = Remembering()
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["agents"]().run(aim(url), seed=3)
    tools = random_prompt(agents.TOOLS_WORDS, "agents 3")
    kinds = [body["prompt"].startswith(tools) for body in stand_in.bodies]
    assert kinds == ([True] * 6 + [False] * 4) * 3 + [True] * 6
    tails = {body["prompt"].removeprefix(tools) for body in stand_in.bodies}
    assert len(tails) == 36
    assert {20 <= len(t.split()) <= 40 for t in tails if not t.startswith("Notes")} == {True}
    assert outcome.values["hit_rate"] > 0.9
    assert outcome.stages[0].hit_rate < outcome.stages[1].hit_rate


# ---------------------------------------------------------------- overhead


def test_a_lookup_is_timed_for_every_kind_and_finds_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: each shape of the tree with whole, half and no match, each with a limit; a lookup must find."""
    figures = cache_overhead.measure_lookups(num_entries=40, num_lookups=20)
    assert len(figures) == len({figure.key for figure in figures}) == 12
    assert {figure.limit for figure in figures} == {1.0}
    with monkeypatch.context() as patched:
        patched.setattr(cache_overhead.RadixTree, "insert", lambda *_: None)
        with pytest.raises(BenchError, match="0 tokens were found where 2000 are stored"):
            cache_overhead.measure_lookups(num_entries=40, num_lookups=20)


async def test_the_crowd_without_anything_to_find_is_all_different() -> None:
    """C10: no prompt begins like another, and throughput is of every token."""
    stand_in = Remembering()
    async with serving(stand_in) as url:
        outcome = await cache_overhead.UniquePrompts().run(aim(url), seed=3)
    assert len({body["prompt"][:40] for body in stand_in.bodies}) == cache_overhead.NUM_REQUESTS
    assert outcome.values["tokens_per_s"] > 0


async def test_two_modes_of_one_server_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """C10: with the cache and without, each with a folder of its own."""
    started: list[tuple[str, Path | None]] = []

    class Started(StandInProcess):
        def __init__(self, server: StokerServer, _shape: Shape, _folder: Path, environment: dict[str, str]):
            super().__init__(address)
            started.append((environment["STOKER_CACHE_MODE"], server.cache_dir))

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(cache_overhead, "ServerProcess", Started)
    monkeypatch.setattr("bench.contest.SETTLE_S", 0)
    async with serving(Remembering()) as address:
        comparison = await cache_overhead.compare_modes(Path("m.gguf"), DEFAULT, range(1, 3))
    assert [mode for mode, _ in started] == ["live+snapshot", "off"]
    assert len({folder for _, folder in started}) == 2
    assert len(comparison.series[0].ratios) == 2
