"""What a model of MNN's takes in memory, by the sizes of its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.backends.mnn.folder import UNKNOWN_CONTEXT
from stoker.models.memory_estimate.fit import Estimate

if TYPE_CHECKING:
    from stoker.backends.mnn.folder import MnnFolder
    from stoker.ipc.model import ModelSpec

_FLOAT_BYTES = 4
_ROW_COPIES = 8
"""Rows of the width that a layer has at a time, beside keys and values: inputs, gates, outputs."""
_WORK_BYTES = 32 << 20
"""What MNN takes for itself beside the model."""


def estimate(folder: MnnFolder, spec: ModelSpec) -> Estimate:
    """What it takes, loaded as `spec` says. Keys and values count as if its cells were all filled."""
    cells = num_cells(folder, spec)
    rows = spec.call_tokens * folder.width * _ROW_COPIES + folder.head.n_vocab * 2
    return Estimate(
        lines={
            "weights": folder.weight_bytes,
            "kv": cells * cell_bytes(folder),
            "compute": rows * _FLOAT_BYTES,
            "other": _WORK_BYTES,
        },
        n_ctx=cells,
    )


def cell_bytes(folder: MnnFolder) -> int:
    """Keys and values of one token in all layers."""
    return 2 * folder.num_layers * folder.kv_width * _FLOAT_BYTES


def num_cells(folder: MnnFolder, spec: ModelSpec) -> int:
    """Tokens that its sequence may hold: what was asked for, within its training where that is told."""
    asked = spec.most_tokens or folder.context_length or UNKNOWN_CONTEXT
    return min(asked, folder.context_length or asked)
