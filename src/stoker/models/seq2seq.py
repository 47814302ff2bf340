"""The limits of an encoder-decoder, by its header (SPEC K3): one slot, a context of one source or answer.

Shared by whoever estimates, describes or loads one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.errors import UnsupportedError
from stoker.ipc.model import ModelClass

if TYPE_CHECKING:
    from stoker.ipc.model import ModelSpec
    from stoker.models.gguf.header import GgufHeader

STEP_TOKENS = 8
"""Tokens a step carries: only an answer that is computed again has more than one."""


def num_cells(header: GgufHeader, spec: ModelSpec) -> int:
    """Tokens that a source may have, and as many an answer: what was asked for, within its training."""
    return min(spec.most_tokens or header.n_ctx_train, header.n_ctx_train)


def slots_of(model_class: ModelClass | None, num_slots: int) -> int:
    """What a model of that class gets of the slots that models are to have."""
    return 1 if model_class is ModelClass.ENCODER_DECODER else num_slots


def check_one_slot(model: str, num_slots: int) -> None:
    """Raises UnsupportedError where an encoder-decoder is to have more than one slot."""
    if num_slots > 1:
        raise UnsupportedError(
            f"{model} is an encoder-decoder: it takes 1 slot, not {num_slots},"
            " because its context holds what the encoder made of one source at a time",
            param="slots",
        )
