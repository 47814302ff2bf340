"""An encoder of llama.cpp: whole texts in, one pooled vector or the scores of each out (SPEC K2, K4).

Its context has no cells: every call computes its texts from their first token. Weights and tokenizer are
`model`'s, the native batch is `batch`'s.

On a CPU attention adds up one way below 64 tokens and another way from there on, which in quantised weights
moves a score by 0.05 and puts near neighbours in another order. So short texts share native calls of fewer
tokens than that and a longer one has its own: each is then computed as it would be alone, to the bit. Larger
calls were no quicker there, since every text's attention passes over all tokens of its call.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from stoker.backends.llama.batch import TokenBatch
from stoker.backends.llama.binding import (
    buffer_bytes,
    capture_log,
    captures_graphs,
    label,
    llama,
    settle_graphs,
    sum_by_device,
)
from stoker.backends.llama.model import LlamaModel
from stoker.backends.llama.shortage import load_error
from stoker.backends.llama.smoke.smoke import tried_options
from stoker.backends.protocol.backend import BatchPlan, Capabilities, PlanItem
from stoker.backends.protocol.encoding import check_texts
from stoker.backends.protocol.extensions import Extensions
from stoker.backends.threads import num_physical_cores
from stoker.errors import StepFailedError, UnsupportedError
from stoker.ipc.model import ModelClass, Pooling
from stoker.models.fingerprint import fingerprint
from stoker.models.gguf.header import POOLINGS, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.backends.llama.binding import LogLine
    from stoker.backends.llama.text.vocabulary import LlamaVocabulary
    from stoker.backends.protocol.backend import Rows
    from stoker.ipc.model import ModelSpec
    from stoker.models.gguf.header import GgufHeader

log = logging.getLogger(__name__)

MAX_TEXTS = 64
"""Texts one call may carry."""
LIKE_ALONE_TOKENS = 63
"""In a native call of so many tokens, on a CPU, each text is computed as if it were alone there."""
_NATIVE_POOLING: dict[str, int] = {pooling: number for number, pooling in POOLINGS.items()}
_FLASH_ATTENTION = re.compile(r"Flash Attention (enabled|disabled|not supported)")
_FLASH_ATTENTION_AUTO = -1
_FLOAT_BYTES = 4


class LlamaEncoder:
    """One loaded encoder with its one context; `model` is its own from here on. Made by `load`.

    Raises:
        ModelLoadError: llama.cpp could not make the context, e.g. for want of memory.
    """

    def __init__(self, model: LlamaModel, header: GgufHeader, spec: ModelSpec) -> None:
        self._is_closed = True  # nothing to close until the context is there
        self._model = model
        self.pooling = header.pooling
        if header.assumes_pooling:
            log.warning("%s names no pooling: a text's vector is the mean of its tokens'", header.path.name)
        self.n_embd: int = llama.llama_model_n_embd_out(model.handle)
        is_reranker = self.pooling == Pooling.RANK
        self._width: int = llama.llama_model_n_cls_out(model.handle) if is_reranker else self.n_embd
        self.num_threads = spec.num_threads or num_physical_cores()
        n_ctx = context_length_of(header, spec)
        self._max_tokens = max(n_ctx, spec.call_tokens)
        self._num_texts = min(MAX_TEXTS, spec.call_tokens)
        self._batch = TokenBatch(self._max_tokens)
        identity = fingerprint(header.path)  # what may fail comes before the context, which would be left
        if model.devices:
            settle_graphs(model.path.name, is_marked=False)
        self._handle: int | None = None
        lines = self._open()
        self._buffers = buffer_bytes(lines, model.devices)
        self._most_outputs = 0
        self._capabilities = dataclasses.replace(
            _capabilities(header, model, spec),
            num_sequences=self._num_texts,
            flash_attention=_flash_attention(lines),
            fingerprint=identity,
        )
        self._is_closed = False

    def _open(self) -> list[LogLine]:
        """Make the native context, in place of the one that there is; what the library said."""
        self._free_context()
        with capture_log() as lines:
            self._handle = llama.llama_init_from_model(self._model.handle, self._native_params())
        if self._handle is None:
            what = f"a context of {self._max_tokens} tokens for {self._model.path.name}"
            raise load_error(what, lines, self._model.devices, n_ctx=self._max_tokens)
        return lines

    def __repr__(self) -> str:
        return f"<LlamaEncoder {self.pooling} of {self._model!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=1)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, resolved after load."""
        return self._capabilities

    @property
    def vocabulary(self) -> LlamaVocabulary:
        """Its tokenizer, valid until `close`."""
        return self._model.vocabulary

    @property
    def extensions(self) -> Extensions:
        """A number of threads; memory of accelerators where there are some."""
        return Extensions(threads=self, devices=self if self._model.devices else None)

    def encode(self, texts: Sequence[Sequence[int]]) -> Rows:
        """The vectors of whole texts, or the scores of pairs; see `Encoder.encode`.

        Raises:
            StepFailedError: the native encode failed.
        """
        check_texts(texts, self._capabilities)
        most = LIKE_ALONE_TOKENS if self._capabilities.computes_on_cpu else self._max_tokens
        found = [self._sound(texts[call]) for call in calls_of([len(text) for text in texts], most)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _sound(self, texts: Sequence[Sequence[int]]) -> Rows:
        """Once more in a context that has captured nothing, where what was captured gave no numbers."""
        vectors = self._encode(texts)
        if self._model.devices and captures_graphs() and not np.isfinite(vectors).all():
            log.warning("%r gave what is no number from a captured graph: computed once more", self)
            self._open()
            vectors = self._encode(texts)
        return vectors

    def _encode(self, texts: Sequence[Sequence[int]]) -> Rows:
        """One native call."""
        items = tuple(PlanItem(seq, 0, text, len(text)) for seq, text in enumerate(texts))
        plan = BatchPlan(items)
        self._batch.fill(plan)
        self._most_outputs = max(self._most_outputs, plan.num_tokens)
        code = llama.llama_encode(self._handle, self._batch.native)
        if code != 0:
            raise StepFailedError(
                f"llama_encode returned {code} for {plan.num_tokens} tokens of {len(texts)} texts",
                native_code=code,
            )
        vectors = np.empty((len(texts), self._width), np.float32)
        for seq in range(len(texts)):
            pointer = llama.llama_get_embeddings_seq(self._handle, seq)
            if not pointer:
                raise StepFailedError(f"llama.cpp gave no vector for text {seq} of {len(texts)}")
            vectors[seq] = np.ctypeslib.as_array(pointer, (self._width,))
        return vectors

    def memory(self) -> dict[str, int]:
        """Bytes of weights and buffers.

        The library keeps room for logits of every token of the largest call so far, though none are computed.
        """
        outputs = self._most_outputs * (self._model.vocabulary.n_vocab + self._model.n_embd) * _FLOAT_BYTES
        compute_bytes = sum(held.get("compute", 0) for held in self._buffers.values())
        return {"weights": self._model.size_bytes, "compute": compute_bytes + outputs}

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """What of that lies on accelerators, by id; see `OnDevices`."""
        held = {owner: lines for owner, lines in self._buffers.items() if owner}
        return sum_by_device(self._model.memory_by_device(), held)

    def set_threads(self, num_threads: int) -> None:
        """Use that many CPU threads from the next call on."""
        self.num_threads = num_threads
        llama.llama_set_n_threads(self._handle, num_threads, num_threads)

    def close(self) -> None:
        """Free buffers, then weights; idempotent."""
        self._is_closed = True
        self._free_context()
        self._model.close()

    def _free_context(self) -> None:
        if self._handle is not None:
            llama.llama_free(self._handle)
            self._handle = None

    def _native_params(self) -> object:
        params = llama.llama_context_default_params()
        # An encoder sees a text as a whole: llama.cpp aborts the process where it would have to be cut.
        params.n_ctx = params.n_batch = params.n_ubatch = self._max_tokens
        params.n_seq_max = self._num_texts
        params.n_threads = params.n_threads_batch = self.num_threads
        params.flash_attn_type = _FLASH_ATTENTION_AUTO
        params.kv_unified = True  # no part of the batch is set aside for a text
        params.embeddings = True
        params.pooling_type = _NATIVE_POOLING[self.pooling]
        return params


def load(
    spec: ModelSpec,
    on_progress: Callable[[float], None] | None = None,
    cache_dir: Path | None = None,
    header: GgufHeader | None = None,
) -> LlamaEncoder:
    """Load an encoder, after a smoke decode in a child process where none is remembered (SPEC R9, K1).

    Args and errors are those of `backend.load`; UnsupportedError where the file is no encoder.
    """
    header = header or read_header(spec.path)
    if header.model_class is not ModelClass.ENCODER:
        raise UnsupportedError(
            f"{header.path.name} is a {header.model_class} ({header.architecture}), no encoder",
            model_class=str(header.model_class),
        )
    model = LlamaModel(tried_options(spec, header, on_progress, cache_dir))
    try:
        return LlamaEncoder(model, header, spec)
    except BaseException:
        model.close()
        raise


def calls_of(lengths: Sequence[int], most: int) -> list[slice]:
    """Texts of those lengths as calls, in order, each of at most `most` tokens or of one longer text."""
    calls: list[slice] = []
    first = num_tokens = 0
    for at, length in enumerate(lengths):
        if at > first and num_tokens + length > most:
            calls.append(slice(first, at))
            first, num_tokens = at, 0
        num_tokens += length
    return [*calls, slice(first, len(lengths))]


def context_length_of(header: GgufHeader, spec: ModelSpec) -> int:
    """The most tokens a text may have: what was asked for, within what the model has positions for."""
    return min(spec.n_ctx or header.n_ctx_train, header.n_ctx_train)


def _capabilities(header: GgufHeader, model: LlamaModel, spec: ModelSpec) -> Capabilities:
    return Capabilities(
        model_class=header.model_class,
        architecture=header.architecture,
        description=header.summary,
        label=label(model.devices),
        n_vocab=model.vocabulary.n_vocab,
        n_ctx=context_length_of(header, spec),
        n_ctx_train=header.n_ctx_train,
        num_cells=0,
        n_batch=spec.call_tokens,
        num_sequences=1,
        num_params=model.num_params,
        size_bytes=model.size_bytes,
        kv_type="none",
        flash_attention="auto",
        can_trim=False,
        can_fork=False,
        computes_on_cpu=not model.devices,
    )


def _flash_attention(lines: list[LogLine]) -> str:
    found = [match[1] for line in lines if (match := _FLASH_ATTENTION.search(line.text))]
    return {"enabled": "on"}.get(found[0], "off") if found else "auto"
