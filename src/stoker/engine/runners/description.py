"""What a loaded model is, for those who ask (SPEC K7), and what its scheduler may do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.ipc.model import ModelClass, ModelInfo
from stoker.kv.limits import SchedulerLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.encoding import Encoder
    from stoker.ipc.model import ModelSpec

PROMPT_ROWS_BYTES = 128 * 2**20
"""What the logits of one prompt slice may take, when prompt logprobs are asked."""


def model_info(
    spec: ModelSpec, backend: Backend | Encoder, num_slots: int, degraded: Sequence[str]
) -> ModelInfo:
    """What was loaded and the limits that resulted."""
    limits, vocabulary, threads = backend.capabilities, backend.vocabulary, backend.extensions.threads
    return ModelInfo(
        id=spec.id,
        path=spec.path,
        label=limits.label,
        model_class=limits.model_class,
        architecture=limits.architecture,
        description=limits.description,
        num_params=limits.num_params,
        size_bytes=limits.size_bytes,
        n_vocab=limits.n_vocab,
        n_ctx=limits.n_ctx,
        n_ctx_train=limits.n_ctx_train,
        n_batch=limits.n_batch,
        num_slots=num_slots,
        num_threads=threads.num_threads if threads else 0,
        kv_type=limits.kv_type,
        flash_attention=limits.flash_attention,
        memory_bytes=backend.memory(),
        chat_template=vocabulary.chat_template,
        bos_text=vocabulary.bos_text,
        eos_text=vocabulary.eos_text,
        can_trim=limits.can_trim,
        can_fork=limits.can_fork,
        has_vision=limits.has_vision,
        pairing=limits.pairing,
        degraded=list(degraded),
        adapters=spec.adapters,
    )


def scheduler_limits(spec: ModelSpec, backend: Backend) -> SchedulerLimits:
    """What the loaded model and the settings allow its scheduler."""
    limits, kv_bytes = backend.capabilities, backend.memory().get("kv", 0)
    is_recurrent = limits.model_class is ModelClass.RECURRENT
    return SchedulerLimits(
        num_slots=min(spec.num_slots, limits.num_sequences),
        num_sequences=limits.num_sequences,
        num_cells=limits.num_cells,
        n_batch=limits.n_batch,
        max_queue=spec.max_queue,
        max_prompt_rows=max(1, PROMPT_ROWS_BYTES // (4 * limits.n_vocab)),
        can_trim=limits.can_trim,
        can_fork=limits.can_fork,
        cell_bytes=0 if is_recurrent else kv_bytes // limits.num_cells,
        state_bytes=kv_bytes // limits.num_sequences if is_recurrent else 0,
        park_bytes=spec.park_bytes,
        policy=spec.policy,
        target_step_s=spec.target_step_ms / 1000,
        background_patience_s=spec.background_patience_s,
        cache_mode=spec.cache_mode,
        model=limits.fingerprint,
        source=spec.path,
    )
