"""Log-probabilities of tokens under the raw logits, before bias, penalties and temperature (SPEC D5, D6)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stoker.backends.protocol.backend import Rows, Vocabulary
from stoker.ipc.usage import TokenLogprob
from stoker.sampling.truncation import largest


def log_normalizer(row: Rows) -> float:
    """ln(sum(exp(row))) of float32 (n_vocab,), accumulated in float64."""
    peak = float(row.max())
    weights = row - np.float32(peak)
    np.exp(weights, out=weights)
    return peak + math.log(float(weights.sum(dtype=np.float64)))


def token_logprob(row: Rows, token_id: int, num_top: int, vocabulary: Vocabulary) -> TokenLogprob:
    """The natural-log probability of `token_id` and of the `num_top` likeliest tokens.

    Args:
        row: raw logits, float32 (n_vocab,), finite at the largest.
        token_id: the token that was drawn or given.
        num_top: alternatives to list, best first, ties by lower id.
        vocabulary: spells the tokens; control tokens are spelled out, so that they can be told apart.
    """
    normalizer = log_normalizer(row)
    top = [
        (int(token), vocabulary.special_piece(int(token)), float(row[token]) - normalizer)
        for token in largest(row, num_top)
    ]
    logprob = float(row[token_id]) - normalizer
    return TokenLogprob(token_id, vocabulary.special_piece(token_id), logprob, top)


def negative_log_likelihood(rows: Rows, tokens: Sequence[int]) -> float:
    """The sum of -ln p(token) over tokens, p being the softmax of the row that predicts it.

    Args:
        rows: raw logits, float32 (len(tokens), n_vocab), finite at the largest of each.
        tokens: what each row predicts.
    """
    pairs = zip(rows, tokens, strict=True)
    return math.fsum(log_normalizer(row) - float(row[token]) for row, token in pairs)


class Likelihoods:
    """Mean negative log-likelihoods of several texts, in nats (SPEC D5), summed up as rows come in."""

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
