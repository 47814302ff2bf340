"""How likely texts are after a prompt, computed a native call at a time (SPEC D5).

A backend gives the rows of logits that predict each token; what a score is made of them is decode's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Rows

LEAST_SLICE = 64
"""Tokens below which no backend cuts a call."""


class ScoringLane(IntEnum):
    """Texts that are scored in slices, in turns.

    A backend holds the beginning of one text for each lane, so that a slice of one lane does not discard what
    was computed in another. In one lane a text is begun when the one before it is done.
    """

    CHOICES = 0
    BACKGROUND_CHOICES = 1
    PROMPTS = 2
    BACKGROUND_PROMPTS = 3


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """Tokens of one text that a call has reached.

    Attributes:
        text: index of the text.
        tokens: of the text, in order; each of them comes once in a scoring.
        rows: the logits that predict them, float32 (len(tokens), n_vocab), valid until the next call.
    """

    text: int
    tokens: tuple[int, ...]
    rows: Rows


class Scoring(Protocol):
    """Texts on their way to be scored after one prompt; driven by the thread that drives the backend."""

    @property
    def is_done(self) -> bool:
        """Whether every token of every text was predicted."""
        ...

    def num_next(self, max_tokens: int) -> int:
        """Tokens that `advance` would compute."""
        ...

    def advance(self, max_tokens: int) -> list[ScoredTokens]:
        """Compute about `max_tokens` more tokens at most, `LEAST_SLICE` or more.

        Raises:
            StepFailedError: the native decode failed, or there is no memory for it.
        """
        ...
