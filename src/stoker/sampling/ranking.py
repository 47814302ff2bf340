"""The largest values of a row, best first; what they mean is the callers' business."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest of `values`, best first, ties by lower index.

    A selection and a sort of the few that are left: the row itself is never sorted.

    Args:
        values: floats (n,), without NaN.
        count: 0 or more; more than n means all.
    """
    if count <= 0:
        return np.empty(0, np.intp)
    cut = len(values) - count
    bound = np.partition(values, cut)[cut] if cut > 0 else -np.inf
    reached = np.flatnonzero(values >= bound)
    return reached[np.argsort(-values[reached], kind="stable")[:count]]
