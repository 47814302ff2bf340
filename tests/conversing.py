"""Conversations for the prefix cache: what they ask, what they get without it, whether they get it with it.

A conversation is made while its answers are computed with nothing kept. So it is known beforehand what a
cached run is asked, and one answer that differs does not change the questions after it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from random import Random

from stoker import GenerateRequest, Runtime, Sampling
from stoker.cache.entry import MIN_TOKENS
from stoker.errors import RequestNotFoundError
from stoker.ipc.events import Delta, Finished
from stoker.ipc.usage import CacheSource, Usage
from stoker.kv.slots import FEW_TOKENS

EQUAL_WITHIN = 0.05
"""SPEC E1: a first difference is allowed where the reference's two best logits are this near."""
_ids = count()


class Step(StrEnum):
    """What a caller does next."""

    GO_ON = "go on"
    REGENERATE = "regenerate"
    EDIT = "edit"


@dataclass(frozen=True)
class Manner:
    """How conversations are led; lengths are in tokens.

    Attributes:
        words: token ids that prompts are made of.
        longest: tokens a prompt may reach; a conversation that comes near it ends.
        stem: length of the beginning that half of the conversations share.
        num_steps: requests of a conversation at most.
        asked: what a caller says at a time, from and to.
        answered: what an answer has, from and to.
        is_seeded: some answers are drawn with a seed rather than greedily.
    """

    words: tuple[int, ...]
    longest: int = 400
    stem: int = 70
    num_steps: int = 6
    asked: tuple[int, int] = (8, 70)
    answered: tuple[int, int] = (1, 40)
    is_seeded: bool = False


@dataclass
class Ask:
    """One request of a conversation, what the reference answers, and what it got.

    Attributes:
        cut: the caller leaves after so many tokens; None: never.
        is_cancel: it leaves by `cancel`, not by closing the stream.
        gaps: at each token of `expected` the distance between the reference's two best logits.
        sure: the logprob that the reference gives each token of `expected`.
        logprobs: the same of `tokens`.
    """

    request: GenerateRequest
    cut: int | None
    is_cancel: bool
    expected: list[int]
    gaps: list[float]
    sure: list[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    usage: Usage | None = None

    def judge(self) -> str:
        """Same or near; raises AssertionError if what it got is neither."""
        for at, (mine, theirs) in enumerate(zip(self.expected, self.tokens, strict=False)):
            if mine != theirs:
                told = f"token {at} is {theirs} instead of {mine}, logits {self.gaps[at]:.3f} apart"
                assert self.gaps[at] <= EQUAL_WITHIN, (
                    f"{told}; {self.usage}, {len(self.request.prompt)} asked"
                )
                return "near"
        if self.cut is None:
            assert len(self.tokens) == len(self.expected), (
                f"{len(self.tokens)} of {len(self.expected)} tokens"
            )
        return "same"

    @property
    def drift(self) -> float:
        """How far a logprob is from the reference's at most, as long as the tokens are the same."""
        most = 0.0
        told = zip(self.expected, self.tokens, self.sure, self.logprobs, strict=False)
        for mine, theirs, sure, logprob in told:
            if mine != theirs:
                break
            most = max(most, abs(sure - logprob))
        return most

    def check_usage(self, num_computed: int = 1) -> None:
        """What it is told of the cache can be (SPEC C2, C5, C13).

        `num_computed` of its prompt's tokens are computed at least: the last one, where it began once.
        """
        usage = self.usage
        if usage is None:
            return
        assert usage.prompt_tokens == len(self.request.prompt)
        most = usage.prompt_tokens - num_computed
        is_in_cells = usage.cache_source in {CacheSource.LIVE, CacheSource.SHARED}
        least = FEW_TOKENS if is_in_cells else MIN_TOKENS
        assert usage.cached_tokens == 0 or least <= usage.cached_tokens <= most, usage
        assert (usage.cache_source is None) == (usage.cached_tokens == 0), usage


Conversation = list[Ask]


async def talk(plain: Runtime, random: Random, manner: Manner, stem: tuple[int, ...]) -> Conversation:
    """A conversation led with a runtime that keeps nothing."""
    history = list(stem) if random.random() < 0.5 else []
    asks: Conversation = []
    for _ in range(random.randint(2, manner.num_steps)):
        step = random.choices(list(Step), [5, 2, 2])[0]
        if not asks or step is Step.GO_ON:
            history += random.choices(manner.words, k=random.randint(*manner.asked))
        elif step is Step.REGENERATE:
            history = list(asks[-1].request.prompt)
        else:
            at = random.randrange(len(history))
            history = history[:at] + random.choices(manner.words, k=random.randint(*manner.asked))
        if len(history) > manner.longest:
            break
        ask = await _asked(plain, random, manner, tuple(history))
        asks.append(ask)
        history += ask.expected[: ask.cut]
    return asks


async def _asked(plain: Runtime, random: Random, manner: Manner, prompt: tuple[int, ...]) -> Ask:
    num_tokens = random.randint(*manner.answered)
    sampling = Sampling(temperature=0.0)
    if manner.is_seeded and random.random() < 0.5:
        sampling = Sampling(temperature=1.0, seed=random.randrange(2**32), repeat_penalty=1.1)
    request = GenerateRequest(
        prompt=prompt, max_tokens=num_tokens, sampling=sampling, ignore_eos=True, logprobs=2
    )
    expected, gaps, sure = [], [], []
    async with aclosing(plain.stream(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                expected += event.token_ids
                for told in event.logprobs or ():
                    gaps.append(told.top[0][2] - told.top[1][2])
                    sure.append(told.logprob)
    assert len(expected) == len(gaps) == num_tokens
    is_cut = random.random() < 0.2
    cut = random.randint(1, num_tokens) if is_cut else None
    return Ask(request, cut, random.random() < 0.5, expected, gaps, sure)


async def conversations(model: str, seed: int, number: int, manner: Manner, **settings) -> list[Conversation]:
    """So many, led with a runtime of its own that keeps nothing."""
    random = Random(seed)
    stem = tuple(random.choices(manner.words, k=manner.stem))
    seeds = [random.randrange(2**32) for _ in range(number)]
    async with Runtime(model, cache_mode="off", **settings) as plain:
        free = asyncio.Semaphore(4)

        async def one(seed: int) -> Conversation:
            async with free:
                return await talk(plain, Random(seed), manner, stem)

        return list(await asyncio.gather(*map(one, seeds)))


async def ask(served: Runtime, question: Ask) -> None:
    """Ask it once; the caller leaves where `cut` says."""
    question.tokens, question.logprobs, question.usage = [], [], None
    request_id = f"ask-{next(_ids)}"
    async with aclosing(served.stream(question.request, request_id)) as events:
        async for event in events:
            if isinstance(event, Delta):
                question.tokens += event.token_ids
                question.logprobs += [told.logprob for told in event.logprobs or ()]
                if question.cut is not None and len(question.tokens) >= question.cut:
                    if not question.is_cancel:
                        return
                    with suppress(RequestNotFoundError):  # its last token is on the way
                        await served.cancel(request_id)
            elif isinstance(event, Finished):
                question.usage = event.usage


async def replay(
    served: Runtime, crowd: list[Conversation], num_at_once: int, num_computed: int = 1
) -> Counter[str]:
    """All conversations, so many at once, each in its order; returns how the answers were, and from where.

    `num_computed` is as in `Ask.check_usage`: 0 where the engine is killed meanwhile: a request that begins
    again may find its prompt with the beginning of its answer.
    """
    waiting, told = iter(crowd), Counter()

    async def worker() -> None:
        for asks in waiting:
            for question in asks:
                await ask(served, question)
                told[question.judge()] += 1
                question.check_usage(num_computed)
                if question.usage is not None:
                    told[f"from {question.usage.cache_source or 'nowhere'}"] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(num_at_once):
            group.create_task(worker())
    return told
