"""Requests of the shape of public traces: conversations and jobs, as long and as bursty as published ones.

What comes from where:

- Lengths of prompts and answers, and how bursty arrivals are: 100 requests in a row of the conversation trace
  of Azure's LLM inference traces 2023, those of 18:47:11 to 18:47:23 (CC-BY; Patel et al., "Splitwise", ISCA
  2024; https://github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_conv.csv). Their deciles are
  below. The gaps between them have a coefficient of variation of 1.17, which is that of a Gamma process of
  shape 0.73; BurstGPT models arrivals by Gamma processes too (https://arxiv.org/html/2401.17644v3). Lengths
  of prompts lie close above a few values (181, 373, 1,010, 4,070): what is common counts as system prompt.
- Times between turns: Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025, on two traces of a provider:
  80 % of what is used again is so within 10 minutes where people ask, within 10 seconds where programs do
  (https://chatpaper.com/paper/145442), by exponential distributions (https://arxiv.org/abs/2506.02634). With
  exponential gaps that is a mean of 373 s and of 6.2 s.
- How much begins alike: the same paper found 54 % and 62 % of the blocks in a cache
  (https://api.emergentmind.com/papers/2506.02634). `private` is set so that one cache with room for all has
  a little more.
- Turns: an agents' trace of 1,214 requests in 274 sessions, 4.4 each
  (https://gitea.gahow.org/gahow/agentic-kvc/raw/branch/main/traces/README.md).

Ours are: three turns of people, the number of system prompts and their popularity (Zipf, exponent 1), and one
job to four requests of people.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROMPT_TOKENS = (31, 373, 384, 397, 401, 426, 934, 1218, 2440, 4079, 4320)
ANSWER_TOKENS = (12, 45, 63, 72, 83, 90, 96, 105, 134, 199, 452)
"""Deciles, least and most of that sample."""
ARRIVAL_SHAPE = 0.73
OWN_SHARE = 0.1
"""Of a first prompt, what its writer has added to what is common, on average."""
MIN_OWN_TOKENS = 16
VIRAL_TOKENS = 2000
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a trace is like.

    Attributes:
        gap_s: mean time from an answer to the next turn.
        mean_turns: of a conversation of people.
        job_share: of all requests, those that are background; each stands alone.
        num_systems: system prompts there are.
        private: share of conversations that have a beginning of their own.
        viral: share of new conversations that all begin alike, in the middle third of the trace.
        max_context: tokens after which a conversation ends.
        scale: by which all lengths are multiplied.
        min_system: tokens of a system prompt at the least.
    """

    gap_s: float = 373.0
    mean_turns: float = 3.0
    job_share: float = 0.2
    num_systems: int = 300
    private: float = 0.65
    viral: float = 0.0
    max_context: int = 8192
    scale: float = 1.0
    min_system: int = 0


PEOPLE = Shape()
AGENTS = Shape(gap_s=6.2, mean_turns=4.4)
SHAPES = {"people": PEOPLE, "agents": AGENTS}


def mixed(key: int, number: int) -> int:
    """A 64-bit hash of both (splitmix64), as a chain's next from the one before."""
    key = (key ^ (number * _GOLDEN)) & _MASK
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
    return key ^ (key >> 31)


def part_key(number: int, chain: Sequence[int]) -> int:
    """The hash of the part that a conversation has after these."""
    return mixed(chain[-1] if chain else 0, (number << 20) + len(chain) + 1)


class Next(NamedTuple):
    """A turn that will come: seconds after the answer before, its own tokens, those of its answer."""

    gap_s: float
    own: int
    answer: int


@dataclass(slots=True)
class Conversation:
    """Turns that begin alike.

    Attributes:
        number: of its own.
        coming: turns that it will still have; own tokens of the first are parts already.
        is_viral: it begins with what everybody begins with at that time.
        chain, tokens: hashes of its parts so far, and how many tokens each part has.
        home: where its last turn was computed; empty: nowhere yet.
    """

    number: int
    priority: Priority
    coming: deque[Next] = field(default_factory=deque)
    is_viral: bool = False
    chain: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    home: str = ""

    @property
    def turns_left(self) -> int:
        """That it will still have."""
        return len(self.coming)

    def add(self, num_tokens: int) -> None:
        """One more part."""
        self.chain.append(part_key(self.number, self.chain))
        self.tokens.append(num_tokens)

    def ask(self, now: float) -> Turn:
        """Its next turn."""
        answer = self.coming.popleft().answer
        return Turn(self, tuple(self.chain), tuple(self.tokens), answer, now)

    def answered(self, turn: Turn) -> float | None:
        """Seconds until the next turn, whose parts are there then; None: that was the last."""
        if not self.coming:
            return None
        self.add(turn.answer)
        self.add(self.coming[0].own)
        return self.coming[0].gap_s


class Arrival(NamedTuple):
    """A conversation, and when its first turn is asked."""

    at_s: float
    conversation: Conversation


@dataclass(slots=True)
class Turn:
    """One request: a conversation as it was when it was asked.

    Attributes:
        chain, tokens: hashes and lengths of its parts.
        answer: tokens that it will have.
        asked_s: when.
    """

    conversation: Conversation
    chain: tuple[int, ...]
    tokens: tuple[int, ...]
    answer: int
    asked_s: float

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return sum(self.tokens)

    @property
    def answer_key(self) -> int:
        """The hash of its answer, as the chain of the next turn has it."""
        return part_key(self.conversation.number, self.chain)


class Trace:
    """Draws conversations, their turns, and the times between them.

    A conversation is drawn whole when it begins: whoever plays it, and however long its answers take.

    Args:
        shape: what it is like.
        rate: requests a second of the whole fleet.
        seed: the same gives the same trace.
        viral_s: from when to when conversations may begin as `Shape.viral` says.
    """

    def __init__(
        self, shape: Shape, rate: float, seed: int, viral_s: tuple[float, float] = (0.0, math.inf)
    ) -> None:
        self._viral_s = viral_s
        self._shape = shape
        self._random = Random(seed)
        self._num = 0
        weights = list(accumulate(1 / rank for rank in range(1, shape.num_systems + 1)))
        self._popularity = [weight / weights[-1] for weight in weights]
        drawn = [self._quantile(PROMPT_TOKENS) for _ in range(shape.num_systems)]
        self._systems = [max(shape.min_system, num_tokens) for num_tokens in drawn]
        talks = (1 - shape.job_share) / shape.mean_turns
        self._job_odds = shape.job_share / (shape.job_share + talks)
        self._gap_s = 1 / (rate * (shape.job_share + talks))

    def __iter__(self) -> Iterator[Arrival]:
        """Conversations as they begin, without end."""
        now = 0.0
        while True:
            now += self._random.gammavariate(ARRIVAL_SHAPE, self._gap_s / ARRIVAL_SHAPE)
            yield Arrival(now, self._conversation(now))

    def _conversation(self, now: float) -> Conversation:
        random, shape = self._random, self._shape
        self._num += 1
        is_job = random.random() < self._job_odds
        is_viral_time = self._viral_s[0] <= now < self._viral_s[1]
        talk = Conversation(
            self._num,
            Priority.BACKGROUND if is_job else Priority.INTERACTIVE,
            is_viral=is_viral_time and not is_job and random.random() < shape.viral,
        )
        if talk.is_viral:
            self._begin(talk, 0, max(shape.min_system, int(shape.scale * VIRAL_TOKENS)))
        elif random.random() < shape.private:
            talk.add(self._quantile(PROMPT_TOKENS))
        else:
            system = bisect_left(self._popularity, random.random())
            self._begin(talk, system + 1, self._systems[system])
        self._draw_turns(talk, 1 if is_job else self._geometric(shape.mean_turns))
        return talk

    def _draw_turns(self, talk: Conversation, most: int) -> None:
        """As many as its context has room for, one at the least."""
        num_tokens, gap_s, own = sum(talk.tokens), 0.0, 0
        for _ in range(most):
            num_tokens += own
            answer = self._quantile(ANSWER_TOKENS)
            talk.coming.append(Next(gap_s, own, answer))
            if num_tokens > self._shape.max_context:
                return
            num_tokens += answer
            gap_s = self._random.expovariate(1 / self._shape.gap_s)
            own = self._own_tokens(self._shape.scale * PROMPT_TOKENS[6])

    def _own_tokens(self, num_tokens: float) -> int:
        return MIN_OWN_TOKENS + int(self._random.expovariate(1 / (OWN_SHARE * num_tokens + 1)))

    def _begin(self, talk: Conversation, system: int, num_tokens: int) -> None:
        talk.chain.append(mixed(system, 1))
        talk.tokens.append(num_tokens)
        talk.add(self._own_tokens(num_tokens))

    def _quantile(self, deciles: tuple[int, ...]) -> int:
        at = self._random.random() * (len(deciles) - 1)
        low = int(at)
        drawn = deciles[low] + (at - low) * (deciles[low + 1] - deciles[low])
        return max(1, int(self._shape.scale * drawn))

    def _geometric(self, mean: float) -> int:
        if mean <= 1:
            return 1
        return 1 + int(math.log(1 - self._random.random()) / math.log(1 - 1 / mean))
