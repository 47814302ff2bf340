"""A household's conversations: more than slots, so that each finds its slot taken when it goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from bench.client import Completion, Stream
from bench.prompts import random_prompt, random_words
from bench.stages import hit_rate, stage_of
from bench.workloads.workload import Better, Judged, Metric, Outcome, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.client import Client
    from bench.peers import Shape
    from bench.target import Target

NUM_SLOTS = 4
CTX_SIZE = 16384
TIGHT_CELLS = 1024
"""Two whole conversations of about 450 tokens; not three."""
NUM_CONVERSATIONS = 12
NUM_TURNS = 3
PROMPT_WORDS = 290
USER_WORDS = 30
ANSWER_TOKENS = 32
TURN_LIMIT_S = 120.0


def _metrics(slower: float) -> tuple[Metric, ...]:
    """The metrics, where later turns may take `slower` times as long as the peer's to their first token."""
    num_all = NUM_CONVERSATIONS * NUM_TURNS
    return (
        Metric("ttft_later_ms", "first token of later turns", "ms", Better.LOWER, bar=1 / slower),
        Metric("ttft_first_ms", "first token of first turns", "ms", Better.LOWER),
        Metric("ttft_turn_2_ms", "first token, turn 2", "ms", Better.LOWER, in_picture=False),
        Metric("ttft_turn_3_ms", "first token, turn 3", "ms", Better.LOWER, in_picture=False),
        Metric(
            "complete",
            f"answers of {ANSWER_TOKENS} tokens",
            f"of {num_all}",
            Better.HIGHER,
            bar=num_all,
            judged=Judged.EACH,
        ),
        Metric("hit_rate", "prompt tokens cached, later turns", "of 1", Better.HIGHER, in_picture=False),
        Metric("wall_s", "until all is answered", "s", Better.LOWER),
    )


class Turns(Workload):
    """Twelve conversations of three turns, `num_at_once` at a time, on four slots.

    A turn that fails or is cut short ends its conversation; it and those that would have followed are not
    among `complete`. First tokens are of whole answers. Where there are none, the limit stands for them.
    """

    name = "turns"
    title = f"{NUM_CONVERSATIONS} conversations of {NUM_TURNS} turns"
    metrics = _metrics(0.9)
    num_at_once: ClassVar[int] = 4

    def shape(self, default: Shape) -> Shape:
        """A third as many slots as conversations."""
        return replace(default, num_slots=NUM_SLOTS, ctx_size=CTX_SIZE)

    async def run(self, target: Target, seed: int) -> Outcome:
        """Each conversation goes on when all others had a turn."""
        conversations = [
            _Conversation(target.client, f"{self.name} {seed} {i}") for i in range(NUM_CONVERSATIONS)
        ]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await _converse(conversations, self.num_at_once)
        took_s = loop.time() - began_s
        turns = [
            [c.streams[turn] for c in conversations if len(c.streams) > turn] for turn in range(NUM_TURNS)
        ]
        first, *later = turns
        values = {
            "ttft_first_ms": _ttft_ms(first),
            "ttft_later_ms": _ttft_ms([stream for streams in later for stream in streams]),
            "ttft_turn_2_ms": _ttft_ms(turns[1]),
            "ttft_turn_3_ms": _ttft_ms(turns[2]),
            "complete": sum(map(len, turns)),
            "hit_rate": hit_rate([stream for streams in later for stream in streams]),
            "wall_s": took_s,
        }
        stages = (stage_of(f"turn {i}", streams) for i, streams in enumerate(turns, start=1) if streams)
        return Outcome(values, stages=tuple(stages))


class TurnsAlone(Turns):
    """The same, one turn at a time: nobody else is read or written for meanwhile."""

    name = "turns_alone"
    title = f"{NUM_CONVERSATIONS} conversations, one at a time"
    num_at_once = 1


class TightTurns(Turns):
    """The same with cells for two conversations, and two at a time: llama-server ends all that do not fit.

    Whoever is not in a turn has to give up its cells, whatever slots there are.
    """

    name = "turns_tight"
    title = f"{NUM_CONVERSATIONS} conversations, cells for two"
    metrics = _metrics(1.1)
    num_at_once = 2

    def shape(self, default: Shape) -> Shape:
        """As many slots, few cells."""
        return replace(default, num_slots=NUM_SLOTS, ctx_size=TIGHT_CELLS)


@dataclass(slots=True)
class _Conversation:
    """What was said so far. `streams` are the whole answers."""

    client: Client
    seed: str
    streams: list[Stream] = field(default_factory=list)
    has_failed: bool = False
    _text: str = ""

    @property
    def is_over(self) -> bool:
        return self.has_failed or len(self.streams) == NUM_TURNS

    async def take_turn(self) -> None:
        """Say something and hear the answer; both are part of the next prompt."""
        if self.streams:
            said = random_words(USER_WORDS, f"{self.seed} turn {len(self.streams)}")
            self._text += f"{self.streams[-1].text}\n{said}"
        else:
            self._text = random_prompt(PROMPT_WORDS, self.seed)
        request = Completion(prompt=self._text, max_tokens=ANSWER_TOKENS)
        outcome = await self.client.attempt(request, timeout_s=TURN_LIMIT_S)
        if isinstance(outcome, Stream) and outcome.completion_tokens == ANSWER_TOKENS:
            self.streams.append(outcome)
        else:
            self.has_failed = True


async def _converse(conversations: Sequence[_Conversation], num_at_once: int) -> None:
    """A few turns at a time; whoever had one goes to the end of the line."""
    line = deque(conversations)

    async def listen() -> None:
        while line:
            conversation = line.popleft()
            await conversation.take_turn()
            if not conversation.is_over:
                line.append(conversation)

    await asyncio.gather(*(listen() for _ in range(num_at_once)))


def _ttft_ms(streams: Sequence[Stream]) -> float:
    return (median(stream.ttft_s for stream in streams) if streams else TURN_LIMIT_S) * 1e3
