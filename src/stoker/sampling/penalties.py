"""Repeat, presence and frequency penalties over the last tokens of prompt and generation (SPEC D1).

Arithmetic as in llama.cpp's penalties sampler: a positive logit is divided by the repeat penalty, another
multiplied by it; then count * frequency + presence is taken off.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from stoker.backends.protocol.backend import Rows
from stoker.ipc.request import Sampling


class RepeatPenalty:
    """Makes tokens less likely that occurred among the last `repeat_last_n`.

    Args:
        sampling: the penalties; `can_act` tells whether they do anything.
        prompt: token ids before the first draw.
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
