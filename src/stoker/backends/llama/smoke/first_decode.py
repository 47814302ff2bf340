"""The first decode of a model: whether what computes gives numbers, and its kernels warm (SPEC R9).

A child process does it before a CPU's first model of a kind (`trial`). On an accelerator the engine does it
by itself (docs/adr/0025): a second process would hold the weights twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import InsufficientMemoryError, StepMemoryError, StokerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.protocol.backend import Backend, Rows

BATCH_TOKENS = 32


def first_tokens(n_vocab: int, num_batch: int = BATCH_TOKENS) -> list[int]:
    """What is decoded: a batch and one token after it."""
    return [index % n_vocab for index in range(num_batch + 1)]


def nonsense_in(step: Callable[[BatchPlan], Rows], n_vocab: int, num_batch: int = BATCH_TOKENS) -> str:
    """What is wrong with the logits of a batch and of the token after it; empty if nothing is.

    Args:
        step: computes a plan on the empty sequence 0.
        n_vocab: tokens there are.
        num_batch: of the batch.
    """
    tokens = first_tokens(n_vocab, num_batch)
    for start, part in ((0, tokens[:-1]), (num_batch, tokens[-1:])):
        rows = step(BatchPlan((PlanItem(0, start, part, 1),)))
        if not bool(np.isfinite(rows).all()):
            return f"logits that are not finite after {len(part)} tokens"
    return ""


def first_decode(backend: Backend) -> str:
    """What is wrong with a loaded model's first logits; empty if nothing is. It holds nothing afterwards.

    Raises:
        InsufficientMemoryError: its device has too little memory to compute.
    """
    found = backend.capabilities
    num_batch = min(BATCH_TOKENS, found.n_batch, found.n_ctx - 1)
    try:
        return nonsense_in(lambda plan: backend.launch(plan).rows(), found.n_vocab, num_batch)
    except InsufficientMemoryError:
        raise
    except StepMemoryError as error:
        raise InsufficientMemoryError(error.message, device=_first_device(backend)) from None
    except StokerError as error:
        return error.message
    finally:
        backend.drop(0)


def _first_device(backend: Backend) -> str:
    devices = backend.extensions.devices
    return next(iter(devices.memory_by_device()), "") if devices else ""
