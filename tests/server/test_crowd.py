"""Crowds over HTTP: a saturated engine, endless interactive load, people beside jobs, who waits where."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import openai
import pytest

from stoker.runtime import Runtime

COMPLETIONS = "/v1/completions"
FLEX = {"service_tier": "flex"}
START_S = 60.0
RUN_S = 60.0
SLOW_STEP_S = 0.5


@pytest.fixture
def serve(start_server):
    """Start a server over a fake model whose steps take `step_s`, with these settings of its engine."""

    def serve(step_s, **settings):
        model = f"fake:eog_period=0,step_delay_s={step_s}"
        settings = {"isolation": "thread", "drain_s": 0.0} | settings
        server = start_server(lambda: Runtime(model, **settings), keepalive_s=0.05)
        server.ready.result(START_S)
        return server

    return serve


@asynccontextmanager
async def client_of(server):
    """As many connections to it as a crowd needs."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=RUN_S, limits=limits) as client:
        yield client


def prompt_of(name, num_tokens, **fields):
    """A greedy request of so many tokens."""
    return {"prompt": name, "max_tokens": num_tokens, "temperature": 0.0} | fields


async def text_of(http, name, num_tokens):
    """What it says, undisturbed or not."""
    answer = await http.post(COMPLETIONS, json=prompt_of(name, num_tokens))
    assert answer.json()["usage"]["completion_tokens"] == num_tokens
    return answer.json()["choices"][0]["text"]


class Stream:
    """A streamed completion that reads itself; `text`, `reason` and comments so far."""

    def __init__(self, http, body):
        self._http = http
        self._body = body | {"stream": True}
        self._news = asyncio.Condition()
        self.headers = {}
        self.num_deltas = 0
        self.text = ""
        self.reason = None
        self.comments = []

    async def __aenter__(self):
        """Begin to read."""
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error):
        """Leave, whether or not it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def until(self, holds):
        """Read until something holds of it."""
        async with self._news, asyncio.timeout(RUN_S):
            await self._news.wait_for(lambda: holds(self) or self._task.done())
        assert holds(self), f"ended with {self.reason} after {self.num_deltas} deltas: {self.comments}"

    async def all(self):
        """The whole text."""
        await self.until(lambda stream: stream.reason is not None)
        return self.text

    async def _read(self):
        async with self._http.stream("POST", COMPLETIONS, json=self._body) as answer:
            async with self._news:
                self.headers = answer.headers
                self._news.notify_all()
            async for line in answer.aiter_lines():
                if line and line != "data: [DONE]":
                    await self._take(line)

    async def _take(self, line):
        async with self._news:
            if line.startswith(": "):
                self.comments.append(line.removeprefix(": "))
            else:
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                self.num_deltas += bool(choice["text"])
                self.text += choice["text"]
                self.reason = choice["finish_reason"] or self.reason
            self._news.notify_all()


def has_deltas(count):
    """Whether a stream has said that much."""
    return lambda stream: stream.num_deltas >= count


# ---------------------------------------------------------------- a line at its bound


async def refused(http, body, count):
    """The answers to `count` requests, each of them refused, and the longest of their milliseconds."""
    answers, longest_ms = [], 0.0
    for _ in range(count):
        since = time.perf_counter()
        answers.append(await http.post(COMPLETIONS, json=body))
        longest_ms = max(longest_ms, 1000 * (time.perf_counter() - since))
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
    return longest_ms


async def fill(group, http, body, count):
    """Post so many and two more; exactly those two are refused. Returns the others, still waiting."""
    posts = {group.create_task(http.post(COMPLETIONS, json=body)) for _ in range(count + 2)}
    answered = set()
    while len(answered) < 2:
        done, posts = await asyncio.wait(posts, timeout=RUN_S, return_when=asyncio.FIRST_COMPLETED)
        answered |= done
    assert {post.result().status_code for post in answered} == {429}
    assert len(posts) == count
    return posts


async def test_a_line_at_its_bound_refuses_at_once_whatever_the_engine_does(serve):
    """Q11: six may wait, at three jobs are refused; at last the engine stands still altogether."""
    server = serve(SLOW_STEP_S, slots=1, max_queue=6, isolation="process", watchdog_s=RUN_S)
    job, person = prompt_of("job", 100, **FLEX), prompt_of("person", 100)
    async with (
        client_of(server) as http,
        Stream(http, prompt_of("running", 1000)) as running,
        asyncio.TaskGroup() as group,
    ):
        await running.until(has_deltas(1))
        waiting = await fill(group, http, job, 3)
        waiting |= await fill(group, http, person, 3)
        longest_ms = [await refused(http, person, 20)]
        engine = server.call(lambda: server.runtime._client.supervisor.pid)
        os.kill(engine, signal.SIGSTOP)
        longest_ms += [await refused(http, job, 20), await refused(http, person, 20)]
        os.kill(engine, signal.SIGCONT)
        assert not any(post.done() for post in waiting)
        for post in waiting:
            post.cancel()
    print("longest refusals, ms:", *(f"{took:.1f}" for took in longest_ms))  # noqa: T201 - to look at only


# ---------------------------------------------------------------- people and jobs


@asynccontextmanager
async def endless_people(http, count):
    """So many clients who ask again whenever they were answered; yields the number of answers, in a list."""
    num_answers = [0]

    async def ask_for_ever(name):
        while True:
            await text_of(http, name, 30)
            num_answers[0] += 1

    tasks = [asyncio.create_task(ask_for_ever(f"person {at}")) for at in range(count)]
    try:
        yield num_answers
    finally:
        assert not any(task.done() for task in tasks), "a person was not answered"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stories(http, place):
    """What has happened to whom /v1/runtime shows there, one list of words each."""
    waiting = (await http.get("/v1/runtime")).json()[place]
    return [[what for _, what in one["story"]] for one in waiting]


@pytest.mark.long
async def test_a_job_starts_and_ends_under_endless_interactive_load(serve):
    """Q7: two slots, four people who always want them; the job's steps are those that it is owed."""
    server = serve(0.002, slots=2, background_patience_s=0.5)
    async with client_of(server) as http, endless_people(http, 4) as num_answers:
        expected = await text_of(http, "job", 6)
        since_s, num_before = time.perf_counter(), num_answers[0]
        async with Stream(http, prompt_of("job", 6, **FLEX)) as job:
            await job.until(has_deltas(1))
            first_s = time.perf_counter() - since_s
            while not any("its step in ten is over" in " ".join(s) for s in await stories(http, "parked")):
                assert job.reason is None
            assert await job.all() == expected
            assert job.reason == "length"
        assert num_answers[0] > num_before + 10
    print(f"first token of the job after {first_s:.3f} s")  # noqa: T201 - to look at only


async def chat(client, prompt, num_tokens, **fields):
    """The pieces of a streamed greedy answer, as they come; every token of it must have come at the end."""
    stream = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=num_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    )
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                yield choice.delta.content
    assert usage.completion_tokens == num_tokens


@asynccontextmanager
async def official_client_of(server):
    """The official client of it."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.long
async def test_a_person_is_answered_while_eight_jobs_share_four_slots(serve):
    """Q1, Q3, Q4: the answer ends before any job does, and every job says all that it says alone."""
    undisturbed, server = serve(0, slots=4), serve(0.005, slots=4)
    jobs = [f"job {at} of eight" for at in range(8)]
    num_begun = asyncio.Semaphore(0)
    ended = []

    async def run_job(client, prompt):
        pieces = []
        async for piece in chat(client, prompt, 300, service_tier="flex"):
            if not pieces:
                num_begun.release()
            pieces.append(piece)
        ended.append(prompt)
        return "".join(pieces)

    async with official_client_of(undisturbed) as client:
        expected = ["".join([piece async for piece in chat(client, prompt, 300)]) for prompt in jobs]
    async with official_client_of(server) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_job(client, prompt)) for prompt in jobs]
        for _ in range(4):
            await num_begun.acquire()
        answer = [piece async for piece in chat(client, "a person asks", 8)]
        assert answer
        assert ended == []
    assert [task.result() for task in tasks] == expected


async def test_a_job_that_would_rather_end_keeps_what_it_has_said(serve):
    """Q4: `preempt: cancel` ends it with `preempted` for the person's sake."""
    server = serve(0.005, slots=1)
    async with client_of(server) as http:
        expected = await text_of(http, "job", 300)
        async with Stream(http, prompt_of("job", 300, preempt="cancel", **FLEX)) as job:
            await job.until(has_deltas(5))
            await text_of(http, "person", 2)
            assert expected.startswith(await job.all())
            assert (job.reason, job.num_deltas >= 5) == ("preempted", True)


# ---------------------------------------------------------------- who waits where


async def test_the_status_shows_the_line_in_order_with_what_happened_to_each(serve):
    """Q2, Q14: one runs; then a person, the job that gave way, and two jobs that came before that person."""
    server = serve(0.01, slots=1)
    long = prompt_of("text", 2000)
    async with client_of(server) as http, AsyncExitStack() as stack:
        for body, is_there in (
            (long | FLEX, has_deltas(40)),
            (long | FLEX, is_queued),
            (long | FLEX, is_queued),
            (long, has_deltas(1)),
            (long, is_queued),
        ):
            await (await stack.enter_async_context(Stream(http, body))).until(is_there)
        status = (await http.get("/v1/runtime")).json()
    (running,), (parked,) = status["slots"], status["parked"]
    assert (running["class"], running["state"]) == ("interactive", "decode")
    line = sorted([*status["queue"], parked], key=lambda waiting: waiting["position"])
    assert [waiting["position"] for waiting in line] == [0, 1, 2, 3]
    assert [waiting["class"] for waiting in line] == ["interactive", *["background"] * 3]
    assert line[1] is parked
    etas_s = [waiting["eta_s"] for waiting in line]
    assert etas_s[0] >= 0
    assert etas_s == sorted(etas_s)
    assert (parked["form"], parked["num_tokens"] > 40) == ("cells", True)
    assert "gave its slot to" in parked["story"][-1][1]
    assert parked["story"][0][1].startswith("queued")
    assert status["paused"] == []


def is_queued(stream):
    """Whether it was told of its place in the line."""
    return "x-stoker-queue-position" in stream.headers
