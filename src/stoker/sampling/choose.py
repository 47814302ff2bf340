"""What rows of logits say of the texts they predict: mean negative log-likelihood in nats (SPEC D5).

Pure arithmetic; which rows there are is a backend's, what is done with scores the front's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stoker.sampling.logprobs import log_normalizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.protocol.backend import Rows


def negative_log_likelihood(rows: Rows, tokens: Sequence[int]) -> float:
    """The sum of -ln p(token) over tokens, p being the softmax of the row that predicts it.

    Args:
        rows: raw logits, float32 (len(tokens), n_vocab), finite at the largest of each.
        tokens: what each row predicts.
    """
    pairs = zip(rows, tokens, strict=True)
    return math.fsum(log_normalizer(row) - float(row[token]) for row, token in pairs)


class Likelihoods:
    """Sums over the tokens of each text, as they come in."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._sums = [0.0] * len(self._lengths)
        self._counts = [0] * len(self._lengths)

    def __repr__(self) -> str:
        return f"<Likelihoods of {sum(self._counts)} of {sum(self._lengths)} tokens>"

    def add(self, text: int, rows: Rows, tokens: Sequence[int]) -> None:
        """Tokens of a text and the rows that predict them."""
        self._sums[text] += negative_log_likelihood(rows, tokens)
        self._counts[text] += len(tokens)

    def means(self) -> list[float]:
        """Nats a token of each text; +inf for one without tokens."""
        assert list(self._lengths) == self._counts, f"{self!r} are not complete"
        return [
            total / length if length else math.inf
            for total, length in zip(self._sums, self._lengths, strict=True)
        ]
