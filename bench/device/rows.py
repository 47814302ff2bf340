"""What is asked of a server on an accelerator: the rows of the table, each with the numbers that it gives.

A row is run against one server that is alone on the card. The same round has the same prompts for every
server, and no two rounds or rows share one, so that none is in a cache.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import psutil

from bench.client import Client, Completion
from bench.crowd_client import open_stream, read_crowd
from bench.errors import BenchError
from bench.prompts import random_prompt
from bench.status import engine_pid
from bench.workloads.priority import BACKGROUND_CLASS
from bench.workloads.workload import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.crowd_client import Answer, CrowdStream

SAMPLED = (("temperature", 0.8), ("top_k", 40), ("top_p", 0.95), ("min_p", 0.05))
"""What llama-server samples with where a request does not say."""
PROMPT_WORDS = 64
"""As many as llama-batched-bench reads before it writes (`limits`); one word is about one token."""
NUM_LONG_PROMPTS = 8
NUM_BACKGROUND = 8
NUM_INTERACTIVE = 12
FEW_TOKENS = 8
LONG_TIMES = 3
"""Of a long crowd the prompts come one after the other, and two models get twice the requests: their streams
write for so much longer, so that it is writing that is measured."""
ENDLESS_TOKENS = 4000
"""Of a stream that is ended from here."""
GOING_EVENTS = 32
"""A stream of so many is under way."""
CRASH_LIMIT_S = 60.0
LEAST_WINDOW_S = 0.05
LOOK_EVERY_S = 0.01
ON_ITS_WAY_S = 0.2


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked for.

    Attributes:
        rows: numbers of streams at once.
        num_tokens: that each writes.
        long_words: of a prompt that makes a long context.
        prompt_words: of one of the long prompts that come at once.
    """

    rows: tuple[int, ...]
    num_tokens: int
    long_words: int
    prompt_words: int


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready, and the round that it is in.

    Attributes:
        url: of the server.
        models: ids of the models that it serves.
        pid: of its first process.
        seed: of the prompts.
    """

    url: str
    models: tuple[str, ...]
    pid: int
    seed: str


class Row(Protocol):
    """One row."""

    @property
    def name(self) -> str:
        """As it stands in the table; what is before the dash is what `--only` takes."""
        ...

    async def run(self, served: Served) -> Mapping[str, float]:
        """Its numbers, by name.

        Raises:
            BenchError: the server refused or broke off.
            OSError: it does not answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Crowd:
    """Streams of short prompts at once, on one model or spread over several.

    Attributes:
        num_words: of each prompt.
    """

    name: str
    num_streams: int
    num_tokens: int
    is_sampled: bool = False
    num_words: int = PROMPT_WORDS

    async def run(self, served: Served) -> dict[str, float]:
        """Tokens a second in all and while every stream writes, and how soon the first tokens come."""
        answers = await asyncio.gather(
            *(read_crowd(served.url, self._asked(served, model), model) for model in served.models)
        )
        everyone = [answer for of_model in answers for answer in of_model]
        for answer in everyone:
            if answer.num_tokens != self.num_tokens:
                raise BenchError(f"{self.num_tokens} tokens were asked for, {answer.num_tokens} came")
        wall_s = max(a.last_s for a in everyone) - min(a.sent_s for a in everyone)
        return {
            "tokens_per_s": sum(a.num_tokens for a in everyone) / wall_s,
            **steady(everyone),
            "first_p50_s": percentile([a.ttft_s for a in everyone], 50),
            "first_p95_s": percentile([a.ttft_s for a in everyone], 95),
        }

    def _asked(self, served: Served, model: str) -> list[Completion]:
        how = (*SAMPLED, ("seed", 1)) if self.is_sampled else ()
        return [
            Completion(
                prompt=random_prompt(self.num_words, f"{served.seed} {self.name} {model} {index}"),
                max_tokens=self.num_tokens,
                extra=how,
            )
            for index in range(self.num_streams)
        ]


def steady(answers: Sequence[Answer]) -> dict[str, float]:
    """`steady_tokens_per_s`: the speed while every stream writes; nothing where they hardly overlap."""
    began_s, ended_s = max(a.first_s for a in answers), min(a.last_s for a in answers)
    if ended_s - began_s < LEAST_WINDOW_S:
        return {}
    num_tokens = 0.0
    for answer in answers:
        per_event = answer.num_tokens / sum(count for _, count in answer.arrivals)
        num_tokens += per_event * sum(count for at, count in answer.arrivals if began_s < at <= ended_s)
    return {"steady_tokens_per_s": num_tokens / (ended_s - began_s)}


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Long prompts that come at once.

    Attributes:
        num_words: of each.
    """

    name: str
    num_words: int

    async def run(self, served: Served) -> dict[str, float]:
        """First token, p50 and p95, and prompt tokens a second until the last of them."""
        asked = [
            Completion(
                prompt=random_prompt(self.num_words, f"{served.seed} {self.name} {index}"), max_tokens=4
            )
            for index in range(NUM_LONG_PROMPTS)
        ]
        answers = await read_crowd(served.url, asked, served.models[0])
        wall_s = max(a.first_s for a in answers) - min(a.sent_s for a in answers)
        return {
            "first_p50_s": percentile([a.ttft_s for a in answers], 50),
            "first_p95_s": percentile([a.ttft_s for a in answers], 95),
            "prompt_tokens_per_s": sum(a.num_prompt_tokens for a in answers) / wall_s,
        }


@dataclass(frozen=True, slots=True)
class Interactive:
    """Interactive requests, one after the other, while background streams hold every slot.

    Attributes:
        num_background: streams that write meanwhile.
    """

    name: str
    num_background: int

    async def run(self, served: Served) -> dict[str, float]:
        """First token, p50 and p95."""
        model, firsts_s = served.models[0], []
        async with AsyncExitStack() as stack:
            streams = []
            for index in range(self.num_background):
                prompt = self._prompt(served, f"background {index}")
                asked = Completion(prompt=prompt, max_tokens=ENDLESS_TOKENS, extra=BACKGROUND_CLASS)
                streams.append(await stack.enter_async_context(open_stream(served.url, asked, model)))
            await asyncio.gather(*(stream.first for stream in streams))
            for index in range(NUM_INTERACTIVE):
                asked = Completion(prompt=self._prompt(served, f"person {index}"), max_tokens=FEW_TOKENS)
                (answer,) = await read_crowd(served.url, [asked], model)
                firsts_s.append(answer.ttft_s)
        return {"first_p50_s": percentile(firsts_s, 50), "first_p95_s": percentile(firsts_s, 95)}

    def _prompt(self, served: Served, who: str) -> str:
        return random_prompt(PROMPT_WORDS, f"{served.seed} {self.name} {who}")


@dataclass(frozen=True, slots=True)
class Crash:
    """The engine is killed while a stream writes, and the stream goes on."""

    name: str = "crash"

    async def run(self, served: Served) -> dict[str, float]:
        """Seconds from the kill to the next token.

        Raises:
            BenchError: the server tells of no engine of its own, or the stream does not go on.
        """
        prompt = random_prompt(PROMPT_WORDS, f"{served.seed} {self.name}")
        asked = Completion(prompt=prompt, max_tokens=ENDLESS_TOKENS)
        async with open_stream(served.url, asked, served.models[0]) as stream:
            await _until(lambda: len(stream.arrivals) >= GOING_EVENTS, stream)
            pid = await engine_pid(Client(served.url))
            if pid is None or pid not in {
                child.pid for child in psutil.Process(served.pid).children(recursive=True)
            }:
                raise BenchError("the server tells of no engine that is a process of its own")
            killed_s = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            # what was on its way when the engine died still comes
            await _until(lambda: stream.arrivals[-1][0] > killed_s + ON_ITS_WAY_S, stream)
            resumed_s = next(at for at, _ in stream.arrivals if at > killed_s + ON_ITS_WAY_S)
        return {"gap_s": resumed_s - killed_s}


async def _until(is_so: Callable[[], bool], stream: CrowdStream) -> None:
    deadline_s = time.perf_counter() + CRASH_LIMIT_S
    while not is_so():
        if stream.done.done():
            raise BenchError("the stream ended before its time") from stream.done.exception()
        if time.perf_counter() > deadline_s:
            raise BenchError(f"the stream did not go on within {CRASH_LIMIT_S:g} s")
        await asyncio.sleep(LOOK_EVERY_S)


def crowd_name(num_streams: int) -> str:
    """`single`, `fan8`, ..."""
    return "single" if num_streams == 1 else f"fan{num_streams}"


def rows_of_crowd(sizes: Sizes) -> list[Row]:
    """Those of a server whose slots are for a crowd, the cheapest first."""
    rows: list[Row] = []
    for num_streams in sizes.rows:
        for way in ("greedy", "sampled"):
            name, is_sampled = f"{crowd_name(num_streams)}-{way}", way == "sampled"
            rows.append(Crowd(name, num_streams, sizes.num_tokens, is_sampled))
    return [*rows, LongPrompts("prefill", sizes.prompt_words)]


def long_crowd(sizes: Sizes) -> Crowd:
    """As many streams as there are at most, with long contexts; long enough for all to write at once."""
    return Crowd("long-greedy", max(sizes.rows), sizes.num_tokens * LONG_TIMES, num_words=sizes.long_words)


def rows_of_few() -> list[Row]:
    """Those of a server whose slots are all taken."""
    return [Interactive("interactive", NUM_BACKGROUND), Crash()]
