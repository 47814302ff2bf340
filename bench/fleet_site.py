"""A site of real servers and a gate on this machine, and clients that play a trace against them.

Owns the processes, what the machines say of their requests, the texts that conversations are made of and the
clients. What is played is `bench/fleet_trace.py`'s, what is made of it `bench/fleet_real.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import msgspec

from bench.errors import BenchError
from bench.fleet_costs import Steps
from bench.gate import command
from bench.prompts import random_words
from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from bench.fleet_trace import Arrival, Conversation

TIMEOUT_S = 600.0
HEARD_S = 10.0
SAMPLE_WORDS = 200
BACKGROUND_WORDS, BACKGROUND_TOKENS = 60, 100


@dataclass(frozen=True, slots=True)
class Site:
    """Addresses of machines and of the gate before them."""

    machines: tuple[str, ...]
    gate: str


@contextlib.contextmanager
def site(folder: Path, num_machines: int, *settings: str) -> Iterator[Site]:
    """That many servers with these settings, each with a cache of its own under `folder`, and a gate."""
    with contextlib.ExitStack() as stack:
        machines = [
            stack.enter_context(command("serve", *settings, "--cache-dir", str(folder / f"cache{number}")))
            for number in range(num_machines)
        ]
        peers = [part for url in machines for part in ("--peer", url)]
        yield Site(tuple(machines), stack.enter_context(command("gate", *peers)))


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it.

    Attributes:
        talk: number of its conversation.
        turn: of the conversation, from 0.
        answer_id: by which the machine knows it.
        first_s: until its first token.
    """

    talk: int
    turn: int
    answer_id: str
    is_persons: bool
    num_prompt: int
    num_cached: int
    first_s: float


class Frame(msgspec.Struct, frozen=True):
    """Tokens that the template adds: once a prompt, and for each message."""

    once: int
    each: int

    def around(self, arrival: Arrival) -> Arrival:
        """A conversation with them."""
        talk, each = arrival.conversation, self.each
        talk.tokens = [num + each for num in talk.tokens]
        talk.tokens[0] += self.once
        for at, turn in enumerate(talk.coming):
            talk.coming[at] = turn._replace(own=turn.own + 2 * each)
        return arrival


class Words:
    """Texts of about so many tokens: common words in the order of a seed.

    Args:
        tokens_per_word: of the model's vocabulary.
        salt: another one gives other texts.
    """

    def __init__(self, tokens_per_word: float, salt: str = "") -> None:
        self._tokens_per_word = tokens_per_word
        self._salt = salt

    def __repr__(self) -> str:
        return f"<Words of {self._tokens_per_word:.2f} tokens>"

    def text(self, num_tokens: int, key: int) -> str:
        """The same for the same key."""
        return random_words(max(1, round(num_tokens / self._tokens_per_word)), f"{self._salt} {key}")

    def salted(self, salt: str) -> Words:
        """Other texts of the same model."""
        return Words(self._tokens_per_word, salt)


async def words_of(http: httpx.AsyncClient, url: str) -> Words:
    """Texts for the model of a server."""
    text = random_words(SAMPLE_WORDS, "sample")
    answer = (await http.post(f"{url}/tokenize", json={"content": text})).raise_for_status()
    return Words(len(answer.json()["tokens"]) / SAMPLE_WORDS)


async def frame_of(http: httpx.AsyncClient, url: str) -> Frame:
    """What the template of a server's model adds."""
    word = await http.post(f"{url}/tokenize", json={"content": "time"})
    num_word = len(word.json()["tokens"])
    nums = []
    for num_more in (0, 2):
        messages = [*_messages(None, "time"), _message("assistant", "time"), _message("user", "time")]
        body = {"messages": messages[: 2 + num_more], "max_tokens": 1, "cache": False}
        answer = (await http.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()
        nums.append(answer.json()["usage"]["prompt_tokens"])
    each = (nums[1] - nums[0]) // 2 - num_word
    return Frame(nums[0] - each - num_word, each)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _messages(system: str | None, first: str) -> list[dict[str, str]]:
    """A conversation's beginning; without a system prompt it has a short one, as templates add their own."""
    return [_message("system", system or "."), _message("user", first)]


class Players:
    """Clients that play conversations against servers.

    Args:
        http: that they use.
        words: what they say.
        url_of: whom a conversation asks.
    """

    def __init__(self, http: httpx.AsyncClient, words: Words, url_of: Callable[[Conversation], str]) -> None:
        self._http = http
        self._words = words
        self._url_of = url_of
        self._answered: list[Answered] = []

    def __repr__(self) -> str:
        return f"<Players {len(self._answered)} answered>"

    async def play(self, arrivals: Iterable[Arrival]) -> list[Answered]:
        """All conversations at their times, to their ends."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.monotonic()))
                group.create_task(self._talk(arrival.conversation))
        return self._answered

    async def _talk(self, talk: Conversation) -> None:
        texts = [self._words.text(num, key) for num, key in zip(talk.tokens, talk.chain, strict=True)]
        messages = _messages(texts[0] if len(texts) > 1 else None, texts[-1])
        num_turns = 0
        while True:
            turn = talk.ask(0.0)
            text, answered = await self._ask(talk, messages, turn.answer, num_turns)
            self._answered.append(answered)
            gap_s = talk.answered(turn)
            if gap_s is None:
                return
            await asyncio.sleep(gap_s)
            own = self._words.text(talk.tokens[-1], talk.chain[-1])
            messages += [_message("assistant", text), _message("user", own)]
            num_turns += 1

    async def _ask(
        self, talk: Conversation, messages: list[dict[str, str]], num_tokens: int, num_turns: int
    ) -> tuple[str, Answered]:
        body = {
            "messages": messages,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "priority": str(talk.priority),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, first_s, answer_id = "", 0.0, ""
        usage: dict[str, Any] = {}
        began_s = time.perf_counter()
        async for chunk in chunks(self._http, f"{self._url_of(talk)}/v1/chat/completions", body):
            answer_id, usage = chunk["id"], chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                if not first_s and (text or choice["finish_reason"]):
                    first_s = time.perf_counter() - began_s
        return text, Answered(
            talk=talk.number,
            turn=num_turns,
            answer_id=answer_id,
            is_persons=talk.priority is not Priority.BACKGROUND,
            num_prompt=usage["prompt_tokens"],
            num_cached=usage["prompt_tokens_details"]["cached_tokens"],
            first_s=first_s,
        )


async def chunks(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream.

    Raises:
        BenchError: it failed.
    """
    async with http.stream("POST", url, json=body) as answer:
        if answer.is_error:
            raise BenchError(f"{url} answered {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise BenchError(f"a stream of {url} failed: {chunk['error']}")
                yield chunk


class Homes:
    """What machines say while requests are there: which of them answered each, and what steps took.

    Args:
        http: to listen with.
        machines: their addresses.

    Attributes:
        steps: of all machines, as they told them.
    """

    def __init__(self, http: httpx.AsyncClient, machines: Sequence[str]) -> None:
        self.steps: list[Steps] = []
        self._http = http
        self._machines = machines
        self._home: dict[str, str] = {}
        self._news = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_open = 0

    def __repr__(self) -> str:
        return f"<Homes of {len(self._home)} requests>"

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._listen(url)) for url in self._machines]
        async with asyncio.timeout(HEARD_S), self._news:
            await self._news.wait_for(lambda: self._num_open == len(self._machines))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def of(self, answers: Iterable[Answered]) -> dict[str, str]:
        """The machine of each of these requests, by its id; waits until all have told."""
        wanted = {one.answer_id for one in answers}
        async with asyncio.timeout(HEARD_S), self._news:
            await self._news.wait_for(lambda: wanted <= self._home.keys())
        return {one: self._home[one] for one in wanted}

    async def _listen(self, url: str) -> None:
        async with self._http.stream("GET", f"{url}/v1/runtime/events", timeout=None) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                async with self._news:
                    self._num_open += event["event"] == "snapshot"
                    if event["event"] == "steps":
                        num = event["num_steps"]
                        num_tokens = event["prompt_tokens"] + event["rows"] * num
                        self.steps.append(Steps(num, num * event["step_ms"] / 1000, num_tokens))
                    if event["event"] == "request" and event["what"] == "finished":
                        self._home[event["request_id"].partition(".hop")[0]] = url
                    self._news.notify_all()


@contextlib.asynccontextmanager
async def background(
    http: httpx.AsyncClient, machines: Iterable[str], num_each: int, words: Words
) -> AsyncIterator[None]:
    """Each of these machines has so many jobs all the time."""

    async def work(url: str, number: int) -> None:
        for turn in range(10**6):
            body = {
                "prompt": words.text(BACKGROUND_WORDS, hash((url, number, turn))),
                "max_tokens": BACKGROUND_TOKENS,
                "ignore_eos": True,
                "priority": "background",
            }
            (await http.post(f"{url}/v1/completions", json=body)).raise_for_status()

    tasks = [asyncio.create_task(work(url, number)) for url in machines for number in range(num_each)]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # what it failed with
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
