"""What changes logits before truncation (SPEC D1): bias, bans, penalties; `dry` is apart.

An edit owns what it must remember of the tokens; the sampler runs them in order.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from stoker.backends.protocol.backend import Rows
from stoker.errors import InvalidRequestError
from stoker.ipc.request import Sampling

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


class RepeatPenalty:
    """Repeat, presence and frequency penalties over the last `repeat_last_n` tokens, `prompt` included.

    Arithmetic as in llama.cpp's penalties sampler: a positive logit is divided by the repeat penalty, another
    multiplied by it; then count * frequency + presence is taken off.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._repeat = np.float32(sampling.repeat_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._num_last = None if sampling.repeat_last_n < 0 else sampling.repeat_last_n
        start = 0 if self._num_last is None else max(0, len(prompt) - self._num_last)
        self._window = deque(prompt[start:])
        self._counts = Counter(self._window)

    @staticmethod
    def can_act(sampling: Sampling) -> bool:
        """Whether the settings change any logit."""
        has_effect = (
            sampling.repeat_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        return has_effect and sampling.repeat_last_n != 0

    def apply(self, row: Rows) -> None:
        """Penalise the tokens in the window."""
        num_ids = len(self._counts)
        ids = np.fromiter(self._counts.keys(), np.int64, num_ids)
        counts = np.fromiter(self._counts.values(), np.float32, num_ids)
        logits = row[ids]
        logits = np.where(logits <= 0, logits * self._repeat, logits / self._repeat)
        row[ids] = logits - (counts * self._frequency + self._presence)

    def accept(self, token: int) -> None:
        """Move the window by one token."""
        self._window.append(token)
        self._counts[token] += 1
        if self._num_last is not None and len(self._window) > self._num_last:
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
