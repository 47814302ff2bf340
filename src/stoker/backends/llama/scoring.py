"""Logits of whole prompts, the way llama.cpp's own defaults compute them (SPEC D6).

Prompt logprobs are compared between programs, to a thousandth. The serving context adds attention up in a
way of its own (docs/adr/0006), whose logits differ by more; so a prompt whose every logit is asked is also
computed here, alone, in one call over a context with default types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.backends.llama.context import ContextOptions, KeyType, LlamaContext
from stoker.backends.protocol import BatchPlan, PlanItem
from stoker.errors import ModelLoadError, StepFailedError

if TYPE_CHECKING:
    from stoker.backends.llama.model import LlamaModel
    from stoker.backends.protocol import Rows


class Scorer:
    """A context of `n_batch` cells, made when the first prompt is scored. Close it before the model."""

    def __init__(self, model: LlamaModel, n_batch: int) -> None:
        self._model = model
        self._n_batch = n_batch
        self._context: LlamaContext | None = None

    def __repr__(self) -> str:
        return f"<Scorer of prompts up to {self._n_batch} tokens, {self._context!r}>"

    def can_score(self, item: PlanItem) -> bool:
        """Whether this is a prompt, or the first slice of a long one, of which every row is asked."""
        return item.start == 0 and 1 < item.num_logits == len(item.tokens) <= self._n_batch

    def score(self, item: PlanItem, num_threads: int) -> Rows:
        """The rows of a prompt, float32 (num_tokens, n_vocab), valid until the next call.

        Raises:
            StepFailedError: the native decode failed, or there is no memory for the context.
        """
        if self._context is None:
            try:
                self._context = LlamaContext(self._model, self._options(num_threads))
            except ModelLoadError as error:
                raise StepFailedError(f"prompt logprobs need a context of their own: {error}") from error
        self._context.set_threads(num_threads)
        self._context.drop(0)
        return self._context.step(BatchPlan((PlanItem(0, 0, item.tokens, item.num_logits),)))

    def memory(self) -> int:
        """Bytes it takes."""
        return sum(self._context.memory().values()) if self._context else 0

    def close(self) -> None:
        """Free the context; idempotent."""
        if self._context is not None:
            self._context.close()
            self._context = None

    def _options(self, num_threads: int) -> ContextOptions:
        return ContextOptions(
            num_cells=self._n_batch,
            n_batch=self._n_batch,
            num_sequences=1,
            num_threads=num_threads,
            key_type=KeyType.F16,
        )
