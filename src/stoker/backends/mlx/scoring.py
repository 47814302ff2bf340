"""Scores of texts after a prompt, computed a pass at a time beside the sequences (SPEC D5).

Each lane keeps the prompt that it has read last, so texts after the same prompt, or one that begins with it,
cost no more than their own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from stoker.backends.mlx.caches import kinds
from stoker.backends.mlx.step import failure
from stoker.backends.protocol.scoring import ScoredTokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.mlx.caches.kinds import Cache
    from stoker.backends.mlx.step import Steps
    from stoker.backends.protocol.backend import Rows


@dataclass(slots=True)
class _Read:
    """What a lane has read of its prompt; `row` has the logits after the last token, once all are read."""

    namespace: bytes = b""
    tokens: list[int] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    row: Rows | None = None


class ScoringContext:
    """A lane's prompt.

    Args:
        steps: computes passes.
        make: caches of a sequence without tokens.
    """

    def __init__(self, steps: Steps, make: Callable[[], list[Cache]]) -> None:
        self._steps = steps
        self._make = make
        self._read = _Read()

    def __repr__(self) -> str:
        return f"<ScoringContext of {len(self._read.tokens)} tokens>"

    @property
    def size_bytes(self) -> int:
        """What it holds."""
        return kinds.size_bytes(self._read.caches)

    def num_read(self, prompt: Sequence[int], namespace: bytes) -> int:
        """Tokens of a prompt that need not be computed."""
        read = self._read
        if read.namespace != namespace or not read.caches:
            return 0
        same = next(
            (at for at, pair in enumerate(zip(read.tokens, prompt, strict=False)) if pair[0] != pair[1]),
            min(len(read.tokens), len(prompt)),
        )
        if same == len(prompt) == len(read.tokens) and read.row is not None:
            return same
        same = min(same, len(prompt) - 1)  # the row after the last token has to be computed
        return same if same == len(read.tokens) or kinds.keeps_every_token(read.caches) else 0

    def read(self, prompt: Sequence[int], until: int, namespace: bytes) -> None:
        """Compute a prompt as far as `until`. Raises StepFailedError."""
        held = self.num_read(prompt, namespace)
        read = self._read
        if held == 0:
            self._read = read = _Read(namespace, [], self._make())
        elif held < len(read.tokens):
            kinds.cut(read.caches, held)
            del read.tokens[held:]
        read.row = None
        is_whole = until == len(prompt)
        rows = self._computed(read.caches, prompt[held:until], int(is_whole))
        read.tokens = list(prompt[:until])
        read.row = rows[0] if is_whole else None

    def row(self) -> Rows:
        """The logits after the prompt."""
        assert self._read.row is not None, "a prompt that was not read"
        return self._read.row

    def branch(self) -> list[Cache]:
        """Caches of the prompt, for a text after it."""
        return kinds.shared(self._read.caches)

    def rows(self, caches: list[Cache], tokens: Sequence[int]) -> Rows:
        """The logits after each of some tokens. Raises StepFailedError."""
        return self._computed(caches, tokens, len(tokens))

    def forget(self) -> None:
        """Free what it holds."""
        self._read = _Read()

    def _computed(self, caches: list[Cache], tokens: Sequence[int], num_logits: int) -> Rows:
        try:
            logits = self._steps.forward(caches, tokens, num_logits)
            mx.eval(kinds.arrays(caches), [] if logits is None else [logits])
        except Exception as error:
            self.forget()
            raise failure(error) from error
        return np.empty((0, 0), np.float32) if logits is None else np.array(logits)


class MlxScoring:
    """See `Scoring`.

    Args:
        context: of its lane.
        prompt: token ids.
        texts: the candidates' tokens.
        namespace: as in `TextScorer`.
    """

    def __init__(
        self, context: ScoringContext, prompt: Sequence[int], texts: Sequence[Sequence[int]], namespace: bytes
    ) -> None:
        self._context = context
        self._prompt = tuple(prompt)
        self._texts = [tuple(text) for text in texts]
        self._namespace = namespace
        self._next = 0
        self._num_found = 0  # of the text under way
        self._branch: list[Cache] = []
        self._skip_empty()

    def __repr__(self) -> str:
        return f"<MlxScoring {self._next} of {len(self._texts)} texts>"

    @property
    def is_done(self) -> bool:
        """Whether every token of every text was predicted."""
        return self._next == len(self._texts)

    def num_next(self, max_tokens: int) -> int:
        """Tokens that `advance` would compute."""
        if self.is_done:
            return 0
        unread = 0 if self._num_found else len(self._prompt) - self._num_read()
        return min(max_tokens, unread or len(self._texts[self._next]) - max(1, self._num_found) or 1)

    def advance(self, max_tokens: int) -> list[ScoredTokens]:
        """A slice of the prompt, then one of a text; a token's row is found with the one before it."""
        if not self._num_found and (held := self._num_read()) < len(self._prompt):
            until = min(held + max_tokens, len(self._prompt))
            self._context.read(self._prompt, until, self._namespace)
            return []
        text, begin = self._texts[self._next], self._num_found
        if begin == 0:
            self._branch = self._context.branch()
            found = ScoredTokens(self._next, text[:1], self._context.row()[None])
        else:
            told = text[begin : begin + max_tokens]
            rows = self._context.rows(self._branch, text[begin - 1 : begin - 1 + len(told)])
            found = ScoredTokens(self._next, told, rows)
        self._num_found += len(found.tokens)
        if self._num_found == len(text):
            self._next, self._num_found, self._branch = self._next + 1, 0, []
            self._skip_empty()
        return [found]

    def _num_read(self) -> int:
        return self._context.num_read(self._prompt, self._namespace)

    def _skip_empty(self) -> None:
        while not self.is_done and not self._texts[self._next]:
            self._next += 1
