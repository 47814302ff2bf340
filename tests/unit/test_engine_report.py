"""What an engine posts of itself while somebody watches, and how often (SPEC O21)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from stoker import GenerateRequest, Runtime
from stoker.cache.entry import Entry
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.cache.prefix_tree import JUNCTION, Reader
from stoker.cache.radix import key_of
from stoker.client.dispatcher import Dispatcher
from stoker.ipc.commands import Watch
from stoker.machine.ledger import Ledger
from stoker.scheduler.cost import StepTally

SLOW = "fake:eog_period=0,step_delay_s=0.01"


async def spend(stream: Any) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


def test_a_tally_begins_anew_when_it_is_taken() -> None:
    """SPEC O21: sums, and the longest."""
    tally = StepTally()
    tally.took(0.5)
    tally.took(0.25)
    tally.num_rows += 3
    taken = tally.taken()
    assert (taken.num_steps, taken.took_s, taken.longest_s, taken.num_rows) == (2, 0.75, 0.5, 3)
    assert tally == StepTally()


async def test_steps_are_told_while_it_computes_and_once_when_it_falls_idle() -> None:
    """SPEC O21: what was computed and drawn adds up to what requests got."""
    async with (
        Runtime(SLOW, isolation="thread", slots=2, ctx_size=1024, drain_s=0.0) as runtime,
        aclosing(runtime.events()) as events,
    ):
        first = (await anext(events)).fields
        asking = asyncio.create_task(spend(runtime.generate("one two three", max_tokens=80)))
        steps: list[dict[str, Any]] = []
        async for event in events:
            if event.event == "steps":
                steps.append(event.fields)
                if not event.fields["num_steps"]:
                    break
        await asking
        usage = (await runtime.status()).recent[-1]
    assert first["memory"]["limit"] > 0
    assert sum(each["tokens"] for each in steps) == usage.completion_tokens == 80
    assert sum(each["prompt_tokens"] for each in steps) == usage.prompt_tokens
    assert len(steps) >= 3
    busy = steps[:-1]
    assert all(each["model"] == "fake" and each["step_ms"] >= 10 for each in busy)
    assert all(each["longest_ms"] >= each["step_ms"] for each in busy)
    assert max(each["num_decode"] for each in busy) == 1
    assert steps[-1]["num_decode"] == 0


async def test_a_hundred_readers_cost_the_engine_as_much_as_one(monkeypatch: Any) -> None:
    """SPEC O21: it is told once, and again when the last has left; those who only log count for none."""
    sent: list[Any] = []
    send = Dispatcher.send

    def noted(self: Dispatcher, command: Any) -> None:
        sent.append(command)
        send(self, command)

    monkeypatch.setattr(Dispatcher, "send", noted)
    async with Runtime(SLOW, isolation="thread", drain_s=0.0) as runtime:
        sent.clear()
        readers = [runtime.events() for _ in range(100)]
        snapshots = [await anext(reader) for reader in readers]
        logging = runtime.events(kinds=("request",))
        await anext(logging)
        assert sent == [Watch(is_watched=True)]
        assert all(event.fields["memory"] for event in snapshots)
        for reader in readers:
            await reader.aclose()
        assert sent == [Watch(is_watched=True), Watch(is_watched=False)]
        await logging.aclose()


async def test_an_idle_engine_that_is_watched_tells_nothing_new(monkeypatch: Any) -> None:
    """SPEC O21: figures that have not moved are no events."""
    monkeypatch.setattr("stoker.engine.report.MEMORY_EVERY_S", 0.01)
    monkeypatch.setattr("stoker.engine.report.CACHE_EVERY_S", 0.01)
    monkeypatch.setattr("stoker.engine.report.NEWS_SHARE", 2.0)
    async with Runtime(SLOW, isolation="thread", drain_s=0.0) as runtime:
        told: list[str] = []
        async with aclosing(runtime.events()) as events:
            await anext(events)
            await spend(runtime.stream(GenerateRequest(prompt="x", max_tokens=100), "r"))
            async for event in events:
                told.append(event.event)
                if event.fields.get("what") == "finished":
                    break
    assert told.count("memory") <= 3  # a lease comes and goes


def stored(*lengths_and_starts: tuple[int, int]) -> PrefixCache:
    """A cache of prefixes that have their first tokens in common, and then none."""
    cache = PrefixCache(CacheLimits(ram_bytes=2**20), Ledger())
    for common, own in lengths_and_starts:
        tokens = [*range(common), *range(own, own + 100)]
        entry = Entry(b"n" * 32, "m", "file.gguf", key_of(tokens), 10 * len(tokens))
        assert cache.store(entry, 1.0) is entry
        cache.filled(entry, b"x" * entry.size_bytes, 1.0)
    return cache


def test_stored_prefixes_are_a_tree_of_what_begins_alike() -> None:
    """SPEC C14, O21: what several have in common is their parent; who goes on from one is named."""
    cache = stored((200, 1000), (200, 2000), (0, 3000))
    tokens = [*range(200), *range(1000, 1100), 7, 8]
    reader = Reader("req-1", b"n" * 32, key_of(tokens))
    found = cache.prefixes(8, [reader], {"file.gguf": "m"}, 8.0)
    junction = next(each for each in found if each.where == JUNCTION)
    children = [each for each in found if each.parent == junction.id]
    assert (junction.num_tokens, junction.parent, junction.ram_bytes) == (200, None, 0)
    assert [(each.num_tokens, each.own_tokens) for each in children] == [(300, 100), (300, 100)]
    assert sorted(each.used_by for each in children) == [[], ["req-1"]]
    assert [each.num_tokens for each in found if each.parent is None] == [200, 100]
    assert len({each.id for each in found}) == 4
    assert len(cache.prefixes(2, [], {}, 8.0)) == 2
