"""How the fake backend predicts texts after a prompt: a history of its own, a slice a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.backends.fake.history import FakeHistory
from stoker.backends.protocol.scoring import ScoredTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.backends.protocol.backend import Rows


class FakeScoring:
    """See `Scoring`; the prompt counts as computed once, with the first text.

    Args:
        prompt: token ids.
        texts: the candidates' tokens.
        logits: rows that follow hashes of histories.
        on_call: told the tokens of each call; raises what is ordered of it.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
        logits: Callable[[list[int]], Rows],
        on_call: Callable[[list[int]], None],
    ) -> None:
        self._prompt = list(prompt)
        self._texts = [tuple(text) for text in texts]
        self._logits = logits
        self._on_call = on_call
        self._num_read = 0  # tokens of the prompt
        self._num_found = 0  # tokens of the text
        self._next = 0
        self._skip_empty()

    def __repr__(self) -> str:
        return (
            f"<FakeScoring {self._next} of {len(self._texts)}, {self._num_read} of {len(self._prompt)} read>"
        )

    @property
    def is_done(self) -> bool:
        """Whether every token of every text was predicted."""
        return self._next == len(self._texts)

    def num_next(self, max_tokens: int) -> int:
        """Tokens that `advance` would compute."""
        if self.is_done:
            return 0
        unread = len(self._prompt) - self._num_read
        return min(max_tokens, unread or len(self._texts[self._next]) - self._num_found)

    def advance(self, max_tokens: int) -> list[ScoredTokens]:
        """A slice of the prompt, then one of a text."""
        if self._num_read < len(self._prompt):
            until = self._num_read + max_tokens
            self._on_call(self._prompt[self._num_read : until])
            self._num_read = min(until, len(self._prompt))
            return []
        text, begin = self._texts[self._next], self._num_found
        told = text[begin : begin + max_tokens]
        self._on_call(list(told))
        history = FakeHistory()
        history.append([*self._prompt, *text])
        at = len(self._prompt) - 1 + begin
        found = ScoredTokens(self._next, told, self._logits(history.hashes[at : at + len(told)]))
        self._num_found += len(told)
        if self._num_found == len(text):
            self._next, self._num_found = self._next + 1, 0
            self._skip_empty()
        return [found]

    def _skip_empty(self) -> None:
        while not self.is_done and not self._texts[self._next]:
            self._next += 1
