"""The DRY penalty: a token that would prolong a repetition costs more the longer the repetition is (SPEC D1).

Semantics of llama.cpp's sampler: a token that followed an earlier copy of the last L tokens loses
multiplier * base ** (L - allowed_length), for the longest such L >= allowed_length; repetitions do not reach
across a sequence breaker, and a token that is a breaker by itself is never penalised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stoker.backends.protocol.backend import Rows
from stoker.ipc.request import Sampling
from stoker.sampling.breakers import Tails

_LOG_FLOAT_MAX = 88.7228391  # ln of the largest float32
_FLAT_BASE = 1.000001  # up to here the penalty does not grow with the length
# Finite, so that a penalised token is still the choice when all others are forbidden.
_MAX_PENALTY = 3e38

TokenIds = npt.NDArray[np.int32]


class DryPenalty:
    """DRY over the last `dry_penalty_last_n` tokens of prompt and generation.

    Args:
        sampling: the settings; `can_act` tells whether they do anything.
        prompt: token ids before the first draw.
        tails: the sequence breakers, from `BreakerTable`.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], tails: Tails) -> None:
        self._multiplier = sampling.dry_multiplier
        self._base = sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        self._num_last = None if sampling.dry_penalty_last_n < 0 else sampling.dry_penalty_last_n
        self._max_exponent = (
            math.floor(_LOG_FLOAT_MAX / math.log(self._base)) if self._base > _FLAT_BASE else 0
        )
        self._tails = tails
        self._tokens = np.array(prompt, np.int32)
        self._num_tokens = len(prompt)

    @staticmethod
    def can_act(sampling: Sampling) -> bool:
        """Whether the settings change any logit."""
        return (
            sampling.dry_multiplier != 0.0 and sampling.dry_base >= 1.0 and sampling.dry_penalty_last_n != 0
        )

    def accept(self, token: int) -> None:
        """Add a token to the history."""
        if self._num_tokens == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty(max(64, self._num_tokens), np.int32)))
        self._tokens[self._num_tokens] = token
        self._num_tokens += 1

    def apply(self, row: Rows) -> None:
        """Penalise what would prolong a repetition."""
        start = 0 if self._num_last is None else max(0, self._num_tokens - self._num_last)
        window = self._tokens[start : self._num_tokens]
        limit = self._reach(window)
        if limit < self._allowed:
            return
        for token, length in self._repeats(window, limit).items():
            if () not in self._tails.get(token, ()):
                penalty = self._multiplier * self._base ** (length - self._allowed)
                row[token] -= np.float32(min(penalty, _MAX_PENALTY))

    def _reach(self, window: TokenIds) -> int:
        """Tokens since the last breaker: a repetition cannot be longer."""
        if not self._tails:
            return len(window)
        for back, token in enumerate(window[::-1].data):
            tails = self._tails.get(token)
            if tails is None:
                continue
            after = window[len(window) - back :]
            lengths = [len(tail) for tail in tails if tuple(after[: len(tail)].tolist()) == tail]
            if lengths:
                return back - max(lengths)
        return len(window)

    def _repeats(self, window: TokenIds, limit: int) -> dict[int, int]:
        """For each token that followed a copy of the window's end: the length of the longest such copy."""
        last = len(window) - 1
        cap = min(limit, self._allowed + self._max_exponent)
        longest: dict[int, int] = {}
        ends = np.arange(last)  # where a copy may end
        length = 0
        while len(ends):
            if length >= self._allowed:
                longest.update(dict.fromkeys(window[ends + 1].tolist(), length))
            if length == cap:
                break
            ends = ends[ends >= length]
            ends = ends[window[ends - length] == window[last - length]]
            length += 1
        return longest
