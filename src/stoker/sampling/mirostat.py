"""Mirostat v1 and v2: truncation that steers the surprise of the text towards a target (SPEC D1).

Baktash et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", with the
constants of llama.cpp. It replaces truncation and works on logits already divided by the temperature.
Ours, because llama.cpp's draws from a generator of its own.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from stoker.backends.protocol.backend import Rows
from stoker.ipc.request import Sampling
from stoker.sampling.logprobs import largest
from stoker.sampling.rng import Probabilities, pick, probabilities

_NUM_FITTED = 100  # most likely tokens that v1 fits the Zipf exponent to
_MIN_EPSILON = 1e-9
_MAX_LOG2 = 1000.0  # 2 ** -mu stays a float


class Mirostat:
    """State of one choice.

    Args:
        sampling: version (1 or 2), target `tau` in bits, learning rate `eta`, temperature above 0.

    Attributes:
        mu: the bound of surprise in bits; all there is to save and restore.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._version = sampling.mirostat
        self._tau = sampling.mirostat_tau
        self._eta = sampling.mirostat_eta
        self._temperature = sampling.temperature
        self.mu = 2.0 * sampling.mirostat_tau

    @staticmethod
    def can_act(sampling: Sampling) -> bool:
        """Whether the settings ask for it; a greedy draw has no surprise to steer."""
        return sampling.mirostat != 0 and sampling.temperature > 0.0

    def draw(self, row: Rows, u: float) -> int:
        """Draw a token from `row`, float32 (n_vocab,), by `u` in [0, 1), and learn from its surprise."""
        chances = probabilities(row, self._temperature)
        kept = self._surprise_kept(chances) if self._version > 1 else self._zipf_kept(chances)
        weights = chances[kept]
        weights /= weights.sum()
        choice = pick(weights, u)
        surprise = -math.log2(weights[choice])
        self.mu -= self._eta * (surprise - self._tau)
        return int(kept[choice])

    def _surprise_kept(self, chances: Probabilities) -> npt.NDArray[np.intp]:
        bound = 2.0 ** -min(max(self.mu, -_MAX_LOG2), _MAX_LOG2)
        kept = np.flatnonzero(chances >= bound)
        return kept if len(kept) else largest(chances, 1)

    def _zipf_kept(self, chances: Probabilities) -> npt.NDArray[np.intp]:
        best = chances[largest(chances, _NUM_FITTED)]
        count = zipf_count(best[best > 0.0], self.mu, len(chances))
        return np.sort(largest(chances, count))


def zipf_count(best: Probabilities, mu: float, num_vocab: int) -> int:
    """How many tokens to keep so that the expected surprise is `mu` bits, by a fitted Zipf law.

    k = (eps * 2**mu / (1 - N**-eps)) ** (1 / s) with eps = s - 1 (equation 30 of the paper), in logarithms.

    Args:
        best: the largest probabilities, descending, all above 0.
        mu: bound of surprise in bits.
        num_vocab: N.
    """
    if len(best) < 2:  # noqa: PLR2004 - a slope needs two points
        return 1
    ranks = np.arange(1, len(best) + 1)
    steps = np.diff(np.log(ranks))
    exponent = float(steps @ -np.diff(np.log(best)) / (steps @ steps))
    epsilon = exponent - 1.0
    if abs(epsilon) < _MIN_EPSILON:
        ratio = 1.0 / math.log(num_vocab)  # the limit of eps / (1 - N**-eps)
    else:
        ratio = epsilon / (1.0 - num_vocab**-epsilon)
    log_base = math.log(ratio) + mu * math.log(2.0)
    most = math.log(num_vocab)
    if log_base >= exponent * most:
        return num_vocab
    return max(1, int(math.exp(log_base / exponent))) if exponent > 0.0 else 1
