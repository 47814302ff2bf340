"""A crowd for the soak: random requests, what they get when alone, and how each is treated on its way."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from stoker import FinishReason, GenerateRequest, Runtime, Sampling
from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import RequestNotFoundError, RequestTimeoutError
from stoker.ipc.events import Delta, Failed, Finished, Parked
from stoker.ipc.request import Preempt, Priority
from stoker.ipc.usage import Usage
from stoker.sampling.generation import Generation
from stoker.sampling.truncation import Workspace

MOST_TOKENS = 120
NUM_SHAPES = 60
PRINTABLE = range(32, 127)


class Fate(StrEnum):
    """What is done to a request besides letting it run."""

    NOTHING = "nothing"
    CANCEL = "cancel"
    DISCONNECT = "disconnect"
    PAUSE = "pause"
    TIMEOUT = "timeout"
    PREEMPT_CANCEL = "preempt-cancel"


WEIGHTS = {
    Fate.NOTHING: 8,
    Fate.CANCEL: 2,
    Fate.DISCONNECT: 2,
    Fate.PAUSE: 3,
    Fate.TIMEOUT: 1,
    Fate.PREEMPT_CANCEL: 2,
}
MAY_END = {
    Fate.CANCEL: {FinishReason.LENGTH, FinishReason.CANCELLED},
    Fate.DISCONNECT: {FinishReason.LENGTH, FinishReason.CANCELLED},
    Fate.PREEMPT_CANCEL: {FinishReason.LENGTH, FinishReason.PREEMPTED},
}
"""Every other one ends for its length."""


@dataclass(frozen=True)
class Shape:
    """A prompt and how it is continued, and the tokens of its two choices when nothing else runs."""

    prompt: tuple[int, ...]
    sampling: Sampling
    alone: tuple[list[int], list[int]]


def shape(random: Random, stem: tuple[int, ...]) -> Shape:
    """A prompt of 1 to 200 tokens, half of them with a common beginning; greedy, seeded or mirostat."""
    prompt = (stem if random.random() < 0.5 else ()) + tuple(random.choices(PRINTABLE, k=200))
    prompt = prompt[: random.randint(1, 200)]
    sampling = random.choice(
        [
            Sampling(temperature=0.0),
            Sampling(temperature=1.2, seed=random.randrange(2**32), repeat_penalty=1.2),
            Sampling(temperature=1.0, seed=random.randrange(2**32), mirostat=2),
        ]
    )
    return Shape(prompt, sampling, (alone(prompt, sampling, 0), alone(prompt, sampling, 1)))


def alone(prompt: tuple[int, ...], sampling: Sampling, index: int) -> list[int]:
    """What a choice draws from the model, token by token, without an engine."""
    backend = FakeBackend(faults=FakeFaults(eog_period=0))
    request = GenerateRequest(prompt=prompt, sampling=sampling)
    workspace = Workspace(backend.capabilities.n_vocab)
    generation = Generation(request, ("r", index), backend.vocabulary, list(prompt), workspace)
    row, tokens = backend.launch(_plan(prompt, 0)).rows()[-1], []
    while len(tokens) < MOST_TOKENS:
        tokens += generation.advance(row).token_ids
        row = backend.launch(_plan(tokens[-1:], len(prompt) + len(tokens) - 1)).rows()[-1]
    return tokens


def _plan(tokens: list[int] | tuple[int, ...], start: int) -> BatchPlan:
    return BatchPlan((PlanItem(0, start, tokens, 1),))


@dataclass
class Client:
    """One request, what is done to it and what it got.

    Its fate meets it once it has `acts_at` tokens, or when it is parked if `acts_when_parked`.
    """

    request_id: str
    request: GenerateRequest
    shape: Shape
    fate: Fate
    acts_at: int
    acts_when_parked: bool
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    usage: Usage | None = None
    has_timed_out: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens got so far, over all choices."""
        return sum(map(len, self.tokens.values()))

    def check(self) -> None:
        """Assert that it got what it would have got alone, or the beginning of that if it was cut."""
        for index in range(self.request.n):
            got, reason = self.tokens.get(index, []), self.reasons.get(index)
            wanted = self.shape.alone[index][: self.request.max_tokens]
            assert got == wanted[: len(got)], f"{self.request_id}[{index}] differs"
            if reason is FinishReason.LENGTH:
                assert got == wanted, f"{self.request_id}[{index}] has {len(got)} of {len(wanted)}"
            elif reason is None:
                assert self.has_timed_out or self.fate is Fate.DISCONNECT, f"{self.request_id} has no end"
            else:
                assert reason in MAY_END.get(self.fate, set()), f"{self.request_id} ended with {reason}"
        assert self.has_timed_out <= (self.fate is Fate.TIMEOUT), f"{self.request_id} timed out"
        if set(self.reasons.values()) == {FinishReason.LENGTH} and self.usage is not None:
            assert self.usage.prompt_tokens == len(self.shape.prompt)
            assert self.usage.completion_tokens == self.num_tokens


def clients(random: Random, count: int) -> list[Client]:
    """So many requests of 60 shapes, with their fates."""
    stem = tuple(random.choices(PRINTABLE, k=100))
    shapes = [shape(random, stem) for _ in range(NUM_SHAPES)]
    return [client(random, f"r{at}", random.choice(shapes)) for at in range(count)]


def client(random: Random, request_id: str, shape: Shape) -> Client:
    """A request of that shape, of a random class, length and fate."""
    fate = random.choices(list(WEIGHTS), WEIGHTS.values())[0]
    is_background = fate is Fate.PREEMPT_CANCEL or random.random() < 0.5
    max_tokens = random.randint(1, MOST_TOKENS)
    request = GenerateRequest(
        prompt=shape.prompt,
        max_tokens=max_tokens,
        sampling=shape.sampling,
        n=random.choice([1, 1, 1, 2]),
        priority=Priority.BACKGROUND if is_background else Priority.INTERACTIVE,
        preempt=Preempt.CANCEL if fate is Fate.PREEMPT_CANCEL else Preempt.PARK,
        timeout_s=random.uniform(0.02, 1.0) if fate is Fate.TIMEOUT else None,
    )
    acts_at = random.randint(0, max_tokens)
    return Client(request_id, request, shape, fate, acts_at, acts_when_parked=random.random() < 0.5)


class Crowd:
    """Runs clients against a runtime, so many at a time, and counts what the engine's host says of each.

    Attributes:
        ends: terminal events of each request, as the host delivered them.
        forms: how parked requests were kept, as their clients were told.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._host = runtime._client.supervisor
        self._submit, self._host.submit = self._host.submit, self._tapped
        self._moved = asyncio.Condition()
        self._news = asyncio.Event()
        self._num_open = 0
        self._num_resting = 0
        self._num_done = 0
        self.ends: Counter[str] = Counter()
        self.forms: Counter[str] = Counter()
        self.stray_events: list[str] = []

    def _tapped(self, record) -> None:
        """What `EngineSupervisor.submit` does, with an ear beside the request's sinks."""
        request_id = record.request_id

        def heard(event) -> None:
            if self.ends[request_id]:
                self.stray_events.append(f"{request_id}: {event}")
            if isinstance(event, Finished | Failed):
                self.ends[request_id] += 1
                self._news.set()

        record.sinks.insert(0, heard)
        self._submit(record)

    async def run(self, clients: list[Client], num_at_once: int, kill_at: list[int], kill) -> None:
        """All of them; `kill` is called when so many have ended as `kill_at` says."""
        waiting = iter(clients)
        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(self._worker(waiting))
            for number in kill_at:
                await self._until(lambda number=number: self._num_done >= number)
                await kill()
        while len(self.ends) < len(clients):
            self._news.clear()
            await self._news.wait()

    async def _worker(self, waiting) -> None:
        for client in waiting:
            await self._moves(num_open=1)
            try:
                await self._treat(client)
            finally:
                await self._moves(num_open=-1, num_done=1)

    async def _treat(self, client: Client) -> None:
        """Read one stream to its end, or to where its fate meets it."""
        has_acted = False
        async with aclosing(self._runtime.stream(client.request, client.request_id)) as events:
            try:
                async for event in events:
                    self._note(client, event)
                    is_time = client.num_tokens >= client.acts_at
                    if not has_acted and (is_time or (client.acts_when_parked and isinstance(event, Parked))):
                        has_acted = True
                        if client.fate is Fate.DISCONNECT:
                            return
                        await self._act(client)
            except RequestTimeoutError:
                client.has_timed_out = True

    def _note(self, client: Client, event) -> None:
        match event:
            case Delta():
                client.tokens.setdefault(event.index, []).extend(event.token_ids)
                if event.finish_reason is not None:
                    assert event.index not in client.reasons, (
                        f"{client.request_id}[{event.index}] ended twice"
                    )
                    client.reasons[event.index] = event.finish_reason
            case Finished():
                client.usage = event.usage
            case Parked():
                self.forms[event.form] += 1

    async def _act(self, client: Client) -> None:
        try:
            if client.fate is Fate.CANCEL:
                await self._runtime.cancel(client.request_id)
            elif client.fate is Fate.PAUSE:
                await self._runtime.pause_request(client.request_id)
                await self._rest()
                await self._runtime.resume_request(client.request_id)
        except RequestNotFoundError:  # its last token is on the way
            pass

    async def _rest(self) -> None:
        """Until ten more have ended, or all who are left rest too."""
        until = self._num_done + 10
        await self._moves(num_resting=1)
        await self._until(lambda: self._num_done >= until or self._num_resting >= self._num_open)
        await self._moves(num_resting=-1)

    async def _moves(self, *, num_open: int = 0, num_resting: int = 0, num_done: int = 0) -> None:
        async with self._moved:
            self._num_open += num_open
            self._num_resting += num_resting
            self._num_done += num_done
            self._moved.notify_all()

    async def _until(self, holds) -> None:
        async with self._moved:
            await self._moved.wait_for(holds)
