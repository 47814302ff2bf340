"""What changes logits before truncation: bias and bans here, penalties in `penalties` and `dry`.

An edit owns what it must remember of the tokens; the order in which edits run is the sampler's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from stoker.backends.protocol.backend import Rows
from stoker.errors import InvalidRequestError

# The native samplers sort by buckets that an int must hold, so "always" is a large number, not infinity.
_MAX_BIAS = 1e6
_FEW = 8  # biases up to which single stores are quicker than a gather and a scatter


class LogitEdit(Protocol):
    """Changes a row of logits in place; -inf forbids a token."""

    def apply(self, row: Rows) -> None:
        """Edit float32 (n_vocab,) for the next token."""
        ...

    def accept(self, token: int) -> None:
        """Note the token that was drawn."""
        ...


class LogitBias:
    """Adds a constant to the logits of some tokens.

    Args:
        biases: bias by token id; +-inf forces and forbids.
        num_vocab: ids lie below it.

    Raises:
        InvalidRequestError: an id outside the vocabulary.
    """

    def __init__(self, biases: Mapping[int, float], num_vocab: int) -> None:
        for token in biases:
            if not 0 <= token < num_vocab:
                raise InvalidRequestError(
                    f"logit_bias names token {token}, the vocabulary has tokens 0 to {num_vocab - 1}",
                    param="logit_bias",
                    token=token,
                    num_vocab=num_vocab,
                )
        values = [min(bias, _MAX_BIAS) if bias > -_MAX_BIAS else -math.inf for bias in biases.values()]
        self._few = tuple(zip(biases, values, strict=True)) if len(biases) <= _FEW else ()
        self._ids = np.fromiter(biases.keys(), np.int64, len(biases))
        self._values = np.array(values, np.float32)

    def apply(self, row: Rows) -> None:
        """Add the biases."""
        if self._few:
            for token, bias in self._few:
                row[token] += bias
        else:
            row[self._ids] += self._values

    def accept(self, token: int) -> None:
        """A bias does not depend on the tokens."""


class EarlyEndBan:
    """Forbids the tokens that end a generation until `min_tokens` were drawn."""

    def __init__(self, eog_tokens: Sequence[int], min_tokens: int) -> None:
        self._ids = np.array(eog_tokens, np.int64)
        self._num_left = min_tokens

    def apply(self, row: Rows) -> None:
        """Forbid them while tokens are missing."""
        if self._num_left > 0:
            row[self._ids] = -np.inf

    def accept(self, token: int) -> None:
        """One fewer is missing."""
        del token
        self._num_left -= 1
