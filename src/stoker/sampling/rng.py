"""The last draw: one token from probabilities by a counter-based uniform number.

u = f(seed, token index, stream) has no state, so batch shape, preemption, crash and resume cannot change
what a request draws (SPEC D1). Which tokens may be drawn is decided before, in `sampler`.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from stoker.backends.protocol.backend import Rows

Probabilities = npt.NDArray[np.float64]

_COUNTER = struct.Struct("<QQQ")
_UINT64 = 2**64 - 1
# Below this a temperature changes nothing: float32 logits that differ at all are further apart than the
# exponent can bridge, and a smaller divisor would overflow.
_MIN_TEMPERATURE = 1e-9


class Stream(IntEnum):
    """Independent uniform numbers of one token."""

    TOKEN = 0
    XTC = 1


def uniform(seed: int, index: int, stream: Stream) -> float:
    """The uniform number in [0, 1), 53 bits, of the token `index` of the generation seeded `seed`."""
    digest = hashlib.blake2b(_COUNTER.pack(seed & _UINT64, index, stream), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def probabilities(logits: Rows, temperature: float) -> Probabilities:
    """Softmax of `logits / temperature` in float64.

    Args:
        logits: float32 (n,), n >= 1; the largest must be finite, the others may be -inf.
        temperature: above 0.
    """
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= max(temperature, _MIN_TEMPERATURE)
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum()
    return scaled


def pick(weights: Probabilities, u: float) -> int:
    """The index at which the running sum of `weights` passes `u` of their total.

    Callers pass weights in ascending token id, not by size: two nearly equal logits that swap ranks between
    batch shapes then move the boundaries by their difference only.
    """
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    index = int(cumulative.searchsorted(u * total, side="right"))
    if index == len(cumulative):  # u * total was rounded up to the total
        index = int(cumulative.searchsorted(total, side="left"))
    return index
