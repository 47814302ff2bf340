"""Log-probabilities of tokens under the raw logits (SPEC D6): before bias, penalties and temperature."""

from __future__ import annotations

import math

import numpy as np

from stoker.backends.protocol.backend import Rows, Vocabulary
from stoker.ipc.usage import TokenLogprob
from stoker.sampling.ranking import largest


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
