"""What a model takes together with a smaller one that guesses for it (SPEC R1, D9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker.models.memory_estimate.fit import Estimate

if TYPE_CHECKING:
    from stoker.ipc.model import ModelSpec
    from stoker.models.memory_estimate.fit import Estimator

DRAFT_BATCH = 64
"""Tokens that a draft model computes at a time."""


def with_draft(estimate: Estimator, draft: Estimator) -> Estimator:
    """The same model, with a draft model that reads as long a text as it does."""

    def both(spec: ModelSpec) -> Estimate:
        found = estimate(spec)
        alone = msgspec.structs.replace(spec, kv_type="", adapters=(), projector=None)
        own = draft(
            msgspec.structs.replace(alone, num_slots=1, n_batch=DRAFT_BATCH, n_ctx=found.n_ctx, num_cells=0)
        )
        lines = {**found.lines, "draft": own.total_bytes}
        return Estimate(lines=lines, n_ctx=found.n_ctx, smaller_kv_types=found.smaller_kv_types)

    return both
