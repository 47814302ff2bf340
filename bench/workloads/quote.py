"""Tokens guessed ahead (docs/speculation.md): answers that quote their prompt, and such that repeat nothing.

Each is asked for twice with guesses and twice without, in turns, of one server: what counts is the quotient.
A server that knows no field `speculate` answers all alike.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from bench.client import Completion
from bench.prompts import random_words
from bench.workloads.workload import Better, Judged, Metric, Outcome, Workload, require_tokens

if TYPE_CHECKING:
    from bench.target import Target

NUM_SENTENCES = 12
SENTENCE_WORDS = 9
BEGUN_WORDS = 6
STORY_WORDS = 60
NUM_TOKENS = 128
TURNS = (True, False, False, True)
QUICKER = 1.3
HARDLY_SLOWER = 0.98


class Quote(Workload):
    """A text and its summary that quotes it word for word; and a story drawn at temperature 1."""

    name = "quote"
    title = "tokens guessed ahead"
    metrics = (
        Metric("quote_speedup", "quoting, with guesses", "times", Better.HIGHER, QUICKER, Judged.MEDIAN),
        Metric(
            "story_speedup", "inventing, with guesses", "times", Better.HIGHER, HARDLY_SLOWER, Judged.MEDIAN
        ),
        Metric("quote_tokens_per_s", "quoting, with guesses", "tok/s", Better.HIGHER),
        Metric("plain_tokens_per_s", "quoting, without", "tok/s", Better.HIGHER, in_picture=False),
    )

    async def run(self, target: Target, seed: int) -> Outcome:
        """Both kinds, each in turns."""
        guessed, plain = await _speeds(target, Completion(prompt=_quoting(seed), max_tokens=NUM_TOKENS))
        story = Completion(
            prompt="Once upon a time: " + random_words(STORY_WORDS, f"story {seed}"),
            max_tokens=NUM_TOKENS,
            extra=(("temperature", 1.0), ("seed", seed)),
        )
        story_guessed, story_plain = await _speeds(target, story)
        return Outcome(
            {
                "quote_speedup": guessed / plain,
                "story_speedup": story_guessed / story_plain,
                "quote_tokens_per_s": guessed,
                "plain_tokens_per_s": plain,
            }
        )


def _quoting(seed: int) -> str:
    sentences = [random_words(SENTENCE_WORDS, f"quote {seed} {i}") for i in range(NUM_SENTENCES)]
    text = ". ".join(sentences)
    begun = " ".join(text.split(" ")[:BEGUN_WORDS])
    return f"The report:\n{text}.\n\nIn short, the report says, word for word:\n{begun}"


async def _speeds(target: Target, asked: Completion) -> tuple[float, float]:
    """Tokens a second with guesses and without: the mean time of each, in turns that even drift out."""
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for has_guesses in TURNS:
        extra = (*asked.extra, ("speculate", has_guesses))
        request = Completion(prompt=asked.prompt, max_tokens=asked.max_tokens, extra=extra)
        stream = await target.client.complete(request)
        require_tokens([stream], asked.max_tokens)
        times_s[has_guesses].append(1.0 / stream.decode_tokens_per_s)
    return 1.0 / fmean(times_s[True]), 1.0 / fmean(times_s[False])
