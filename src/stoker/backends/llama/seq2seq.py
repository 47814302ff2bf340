"""An encoder-decoder of llama.cpp behind the backend protocol (SPEC K3).

Its prompt is a source, which the encoder reads; its one sequence is the answer, from the decoder's start
token on. A token is computed in a native call of its own, also where a whole answer is computed again: so it
comes out the same to the bit, whatever interrupted it. A native context keeps what its encoder made of one
source at a time.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.llama.backend import LlamaBackend
from stoker.backends.llama.batch import TokenBatch
from stoker.backends.llama.binding import llama
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.model import LlamaModel
from stoker.backends.llama.smoke.smoke import tried_options
from stoker.backends.protocol.backend import BatchPlan, Computed, Conditioning, PlanItem
from stoker.backends.protocol.extensions import Extensions
from stoker.backends.threads import num_physical_cores
from stoker.errors import ModelLoadError, StepFailedError, StokerError, UnsupportedError
from stoker.ipc.model import FlashAttention, ModelClass
from stoker.models.gguf.header import read_header
from stoker.models.seq2seq import STEP_TOKENS, check_one_slot, num_cells

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.backends.protocol.backend import InFlight
    from stoker.ipc.model import ModelSpec
    from stoker.models.gguf.header import GgufHeader

_FLOAT_BYTES = 4


class SourceReader:
    """Has the encoder of `context` read sources of up to `context.n_batch` tokens."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._batch = TokenBatch(context.n_batch)
        self._source: tuple[int, ...] = ()
        self._namespace = b""
        self._most_tokens = 0

    def __repr__(self) -> str:
        return f"<SourceReader of {len(self._source)} tokens>"

    def read(self, source: Sequence[int], namespace: bytes = b"") -> None:
        """Have `source` be what the decoder's next steps read; computes nothing if it is already.

        What was read for another namespace is read again.

        Raises:
            StepFailedError: the native encode failed, or there is nothing to read.
        """
        source = tuple(source)
        if source and (source, namespace) == (self._source, self._namespace):
            return
        if not 0 < len(source) <= self._context.n_batch:  # llama.cpp would abort the process
            raise StepFailedError(f"a source has 1 to {self._context.n_batch} tokens, not {len(source)}")
        self._source = ()
        self._most_tokens = max(self._most_tokens, len(source))
        # Distances are all that an encoder sees of places, and llama.cpp takes them for the answer's next.
        place = self._context.lengths[0]
        self._batch.fill(BatchPlan((PlanItem(0, place, source, len(source)),)))
        code = llama.llama_encode(self._context.handle, self._batch.native)
        if code != 0:
            text = f"llama_encode returned {code} for a source of {len(source)} tokens"
            raise StepFailedError(text, native_code=code)
        self._source, self._namespace = source, namespace

    def memory(self) -> int:
        """Bytes of the rows that the library keeps of the longest source so far, logits among them."""
        context = self._context
        return self._most_tokens * context.row_width * _FLOAT_BYTES


_NO_TOKEN = -1


class Seq2SeqBackend(LlamaBackend):
    """One loaded encoder-decoder with its one context and its one sequence; made by `load`.

    Raises:
        ModelFileError: the file is gone.
        ModelLoadError: it does not say which token its decoder begins with.
    """

    def __init__(self, model: LlamaModel, context: LlamaContext, header: GgufHeader) -> None:
        super().__init__(model, context, header)
        self._reader = SourceReader(context)
        self._source: tuple[int, ...] = ()
        self._namespace = b""
        self._scale = _logit_scale(header)
        self._capabilities = dataclasses.replace(
            self._capabilities,
            is_async=False,
            n_batch=min(STEP_TOKENS, context.n_batch),
            can_fork=False,
            decoder_start=_decoder_start(model),
        )

    def __repr__(self) -> str:
        return f"<Seq2SeqBackend {self._context!r} {self._reader!r}>"

    def condition(self, seq: int, conditioning: Conditioning) -> None:
        """Have the decoder read this source from the next step on; UnsupportedError for anything else."""
        assert seq == 0, f"sequence {seq} of one"
        if conditioning.adapters or conditioning.pictures or conditioning.asked:
            raise UnsupportedError(f"{self._capabilities.description} takes a source and nothing beside it")
        self._source, self._namespace = conditioning.source, conditioning.namespace

    def launch(self, plan: BatchPlan) -> InFlight:
        """One forward pass, a token at a time, waited for; one that raises changed nothing.

        The encoder reads the sequence's source first, if it has read another since.
        """
        self._context.lengths.check(plan)
        (item,) = plan.items
        self._reader.read(self._source, self._namespace)
        rows = np.empty((item.num_logits, self._capabilities.n_vocab), np.float32)
        first_row = len(item.tokens) - item.num_logits
        try:
            for at, token in enumerate(item.tokens):
                wants = int(at >= first_row)
                found = self._context.step(BatchPlan((PlanItem(item.seq, item.start + at, (token,), wants),)))
                if wants:
                    np.multiply(found[0], self._scale, out=rows[at - first_row])
        except StokerError:
            self._context.trim(item.seq, item.start)
            raise
        return Computed(rows)

    @property
    def extensions(self) -> Extensions:
        """As any model's; what it makes of a text is for its decoder to read, so there is no hidden state."""
        return dataclasses.replace(super().extensions, hidden=None)

    def memory(self) -> dict[str, int]:
        """Bytes by line: weights, kv, compute."""
        lines = super().memory()
        lines["compute"] += self._reader.memory()
        return lines


def load(
    spec: ModelSpec,
    on_progress: Callable[[float], None] | None = None,
    cache_dir: Path | None = None,
    header: GgufHeader | None = None,
) -> Seq2SeqBackend:
    """Load an encoder-decoder, after a smoke decode in a child process where none is remembered.

    Args and errors are those of `backend.load`; UnsupportedError where the file is of another class, or more
    than one slot, other cells or adapters are asked for.
    """
    header = header or read_header(spec.path)
    if header.model_class is not ModelClass.ENCODER_DECODER:
        raise UnsupportedError(
            f"{header.path.name} is a {header.model_class} ({header.architecture}), no encoder-decoder",
            model_class=str(header.model_class),
        )
    check_one_slot(header.path.name, spec.num_slots)
    options = _context_options(spec, header)
    with ExitStack() as made:
        model = LlamaModel(tried_options(spec, header, on_progress, cache_dir))
        made.callback(model.close)
        context = LlamaContext(model, options)
        made.callback(context.close)
        backend = Seq2SeqBackend(model, context, header)
        made.pop_all()
    return backend


def _context_options(spec: ModelSpec, header: GgufHeader) -> ContextOptions:
    """One sequence, and batches that hold a whole source: an encoder sees it at once."""
    if spec.kv_type not in {"", "f16"}:
        raise UnsupportedError(
            f"{header.path.name} is an encoder-decoder:"
            f" its attention cannot read cells of type {spec.kv_type!r}"
        )
    if spec.adapters:
        raise UnsupportedError(
            f"{header.path.name} is an encoder-decoder: it takes no adapters", param="lora"
        )
    cells = num_cells(header, spec)
    return ContextOptions(
        num_cells=cells,
        n_batch=cells,
        num_sequences=1,
        num_threads=spec.num_threads or num_physical_cores(),
        # Only the reading of the source could be one operation: it would be several times less exact.
        flash_attention=FlashAttention.OFF,
    )


def _decoder_start(model: LlamaModel) -> int:
    """The token that an answer begins with: what the file says, else its BOS token."""
    start: int = llama.llama_model_decoder_start_token(model.handle)
    if start == _NO_TOKEN:
        start = llama.llama_vocab_bos(llama.llama_model_get_vocab(model.handle))
    if not 0 <= start < model.vocabulary.n_vocab:
        raise ModelLoadError(
            f"{model.path.name} names no token that its decoder begins with", path=str(model.path)
        )
    return start


def _logit_scale(header: GgufHeader) -> float:
    """T5's own models have no output matrix but their embeddings, and take the logits times width ** -0.5.

    llama.cpp leaves that out: its likeliest token is the same, its probabilities are not.
    """
    has_output = any(tensor.name == "output.weight" for tensor in header.tensors)
    return 1.0 if has_output else 1 / math.sqrt(header.embedding_length)
