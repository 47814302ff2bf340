"""SmolLM2's engine killed while streams run, wait, are parked and are paused: nobody's tokens change."""

import asyncio
import os
import signal
from contextlib import aclosing

import pytest

from conftest import MODEL
from stoker import GenerateRequest, Runtime, Sampling
from stoker.ipc.events import Delta, Finished, Parked, Paused, Queued
from stoker.ipc.request import Priority

NUM_TOKENS = 64
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "seeded": Sampling(temperature=0.8, seed=7, repeat_penalty=1.1),
}
PROMPTS = {
    "first job": "Here is a long list of things that can be found in a kitchen:",
    "second job": "Once upon a time there was a lighthouse keeper who",
    "paused": "The three largest rivers of Europe are",
    "two choices": "My favourite season is",
    "runs": "Water boils at",
    "waits": "The best way to learn a language is",
}


class Stream:
    """One request that reads itself."""

    def __init__(self, runtime, name, request):
        self._runtime = runtime
        self._name = name
        self._request = request
        self._news = asyncio.Condition()
        self.seen = set()
        self.tokens = {index: [] for index in range(request.n)}
        self.text = dict.fromkeys(range(request.n), "")
        self.num_ends = 0

    async def read(self):
        """To the end."""
        async with aclosing(self._runtime.stream(self._request, self._name)) as events:
            async for event in events:
                async with self._news:
                    self._note(event)
                    self._news.notify_all()

    def _note(self, event):
        self.seen.add(type(event))
        if isinstance(event, Delta):
            self.tokens[event.index] += event.token_ids
            self.text[event.index] += event.text
        self.num_ends += isinstance(event, Finished)

    async def reach(self, num_tokens):
        """Wait until every choice has so many tokens."""
        async with self._news:
            await self._news.wait_for(lambda: all(len(got) >= num_tokens for got in self.tokens.values()))

    async def hear(self, kind):
        """Wait until it was told that."""
        async with self._news:
            await self._news.wait_for(lambda: kind in self.seen)


def streams(runtime, sampling):
    """Six of them by name, none of them begun."""
    return {
        name: Stream(
            runtime,
            name,
            GenerateRequest(
                prompt=prompt,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                sampling=sampling,
                n=2 if name == "two choices" else 1,
                priority=Priority.BACKGROUND if "job" in name else Priority.INTERACTIVE,
            ),
        )
        for name, prompt in PROMPTS.items()
    }


async def one_by_one(sampling):
    """Each alone in the engine."""
    async with Runtime(str(MODEL), slots=2, ctx_size=2048, threads=1, repeatable="on") as runtime:
        undisturbed = streams(runtime, sampling)
        for stream in undisturbed.values():
            await stream.read()
    return undisturbed


async def in_a_crowd(sampling):
    """Three slots: two jobs give way, one stream is paused, one waits. Then the engine is killed."""
    async with Runtime(str(MODEL), slots=3, ctx_size=2048, threads=1, repeatable="on") as runtime:
        crowd = streams(runtime, sampling)
        async with asyncio.TaskGroup() as group:

            def begin(*names):
                for name in names:
                    group.create_task(crowd[name].read())

            begin("first job", "second job")
            for name in ("first job", "second job"):
                await crowd[name].reach(4)
            begin("paused")
            await crowd["paused"].reach(4)
            await runtime.pause_request("paused")
            await crowd["paused"].hear(Paused)
            for name in ("two choices", "runs"):
                begin(name)
                await crowd[name].reach(4)
            for name in ("first job", "second job"):
                await crowd[name].hear(Parked)
            begin("waits")
            await crowd["waits"].hear(Queued)
            await assert_everybody_is_where_they_should_be(runtime)
            os.kill((await runtime.status()).pid, signal.SIGKILL)
            await crowd["two choices"].reach(NUM_TOKENS)
            assert len(crowd["paused"].tokens[0]) < NUM_TOKENS
            await runtime.resume_request("paused")
        assert (await runtime.status()).restarts == 1
        assert runtime.stats()["num_live_requests"] == 0
    return crowd


async def assert_everybody_is_where_they_should_be(runtime):
    """As the engine sees it, before it is killed."""
    engine = (await runtime.status()).engine
    running = sorted(slot.request_id for slot in engine.slots if slot.request_id)
    assert running == ["runs", "two choices", "two choices"]
    assert [waiting.request_id for waiting in engine.queue] == ["waits"]
    assert {waiting.request_id for waiting in engine.parked} == {"first job", "second job"}
    assert [waiting.request_id for waiting in engine.paused] == ["paused"]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [n if n == "greedy" else pytest.param(n, marks=pytest.mark.slow) for n in SAMPLINGS]
)
async def test_streams_of_every_kind_survive_the_engines_death_token_by_token(name):
    """L3, Q4, Q16, Q17: token-identical to each alone, with quantised weights on a CPU."""
    undisturbed = await one_by_one(SAMPLINGS[name])
    crowd = await in_a_crowd(SAMPLINGS[name])
    for key, stream in crowd.items():
        assert (stream.tokens, stream.text) == (undisturbed[key].tokens, undisturbed[key].text), key
        assert stream.num_ends == 1
