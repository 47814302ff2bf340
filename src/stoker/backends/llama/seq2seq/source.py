"""The encoder of an encoder-decoder: what it made of the source that its decoder reads (SPEC K3).

A native context keeps what its encoder made of one source at a time; whose turn it is, is the backend's
business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.backends.llama.batch import TokenBatch
from stoker.backends.llama.binding import llama
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.llama.context import LlamaContext

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
