"""Where a sequence of a model that cannot go back leaves its state behind (SPEC C8).

Such a model (recurrent, hybrid, sliding window) goes on only from a state of exactly the tokens wanted, so
its state is stored on the way: at intervals that double as the sequence grows, so that they stay few and
spread; one token before the prompt's end, for the same prompt again; and where another sequence waits.
"""

from __future__ import annotations

INTERVAL = 128
"""Tokens between checkpoints at first."""
MAX_SPREAD = 16
"""Checkpoints at intervals that a sequence leaves; twice the interval from there on."""


class Checkpoints:
    """The places of one sequence; at first none."""

    def __init__(self) -> None:
        self._interval: int | None = None
        self._spread: list[int] = []
        self._marks: set[int] = set()

    @classmethod
    def spread(cls, num_prompt: int) -> Checkpoints:
        """At intervals, and one token before the end of a prompt of `num_prompt`."""
        places = cls()
        places._interval = INTERVAL
        if num_prompt > 1:
            places.mark(num_prompt - 1)
        return places

    def __repr__(self) -> str:
        return f"<Checkpoints every {self._interval}, at {self._spread} and {sorted(self._marks)}>"

    def mark(self, num_tokens: int) -> None:
        """Leave one there too: another sequence waits for it."""
        self._marks.add(num_tokens)

    def is_marked(self, num_tokens: int) -> bool:
        """Whether it is wanted exactly there, not just somewhere about."""
        return num_tokens in self._marks

    def is_at(self, num_tokens: int) -> bool:
        """Whether one belongs there."""
        is_regular = self._interval is not None and num_tokens % self._interval == 0
        return num_tokens > 0 and (is_regular or num_tokens in self._marks)

    def next_after(self, num_tokens: int) -> int | None:
        """The next place after so many tokens; None: there is none."""
        places = [mark for mark in self._marks if mark > num_tokens]
        if self._interval is not None:
            places.append((num_tokens // self._interval + 1) * self._interval)
        return min(places, default=None)

    def left(self, num_tokens: int) -> list[int]:
        """Note one that was left; returns those that are superfluous now."""
        if num_tokens in self._marks or self._interval is None:
            return []
        self._spread.append(num_tokens)
        if len(self._spread) <= MAX_SPREAD:
            return []
        self._interval *= 2
        dropped = [at for at in self._spread if at % self._interval]
        self._spread = [at for at in self._spread if at % self._interval == 0]
        return dropped
