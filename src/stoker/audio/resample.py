"""Another number of samples a second: a windowed sinc, computed block by block.

A sample of the result is the sum of the given ones around its time, weighted by a sinc that lets pass what
both rates can hold, under a Hann window (Smith, Digital Audio Resampling, ccrma.stanford.edu/~jos/resample).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

_ZEROS = 24  # of the sinc on each side
_ROLL_OFF = 0.945  # of the lower rate's half; what lies between is damped
_AT_ONCE = 2**14  # samples of the result, to bound what is gathered for them


def resampled(blocks: Iterable[Samples], from_hz: int, to_hz: int) -> Iterator[Samples]:
    """The same sound at another rate.

    Args:
        blocks: mono samples, float32 (n,).
        from_hz: samples a second of them.
        to_hz: samples a second of the result, which has as many as the duration holds, rounded up.

    Returns:
        Blocks of mono samples, float32 (n,).
    """
    if from_hz == to_hz:
        yield from blocks
        return
    common = math.gcd(from_hz, to_hz)
    up, down = to_hz // common, from_hz // common
    weights = _weights(up, down)
    reach = weights.shape[1] // 2
    held = np.zeros(reach - 1, np.float32)  # silence before the first one
    first, made, num_given = 1 - reach, 0, 0  # time of held[0]; samples made; samples given
    for block in (*blocks, None):
        more = np.zeros(reach, np.float32) if block is None else block
        num_given += 0 if block is None else len(block)
        held = np.concatenate([held, more])
        last = first + len(held) - 1 - reach  # the latest time that has all its neighbours
        end = -(-num_given * up // down) if block is None else max(made, last * up // down)
        for start in range(made, end, _AT_ONCE):
            yield _at(
                np.arange(start, min(start + _AT_ONCE, end), dtype=np.int64), held, first, weights, down
            )
        made = max(made, end)
        kept = max(0, made * down // up - reach + 1 - first)
        held, first = held[kept:], first + kept


def _at(numbers: npt.NDArray[np.int64], held: Samples, first: int, weights: Samples, down: int) -> Samples:
    """Samples of the result by their numbers."""
    up, width = weights.shape
    times, phases = np.divmod(numbers * down, up)
    windows = np.lib.stride_tricks.sliding_window_view(held, width)
    found: Samples = np.einsum("ij,ij->i", windows[times - first - width // 2 + 1], weights[phases])
    return found


def _weights(up: int, down: int) -> Samples:
    """What each neighbour counts, float32 (phases, 2 * reach): the phase is the time after a given sample."""
    cutoff = min(1.0, up / down) * _ROLL_OFF
    reach = math.ceil(_ZEROS / cutoff)
    distances = np.arange(1 - reach, reach + 1) - np.arange(up)[:, np.newaxis] / up
    window = np.cos(np.pi / 2 * np.clip(distances / reach, -1, 1)) ** 2
    weights = cutoff * np.sinc(cutoff * distances) * window
    scaled: Samples = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return scaled
