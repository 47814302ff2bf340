"""What a model made of a prompt's last token: its hidden state before the output matrix (SPEC D8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.backends.llama.context import ContextOptions, LlamaContext
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import ModelLoadError, StepFailedError, UnsupportedError
from stoker.ipc.usage import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.llama.model import LlamaModel


class HiddenStates:
    """Hidden states of the sequences of `context`."""

    def __init__(self, model: LlamaModel, context: LlamaContext) -> None:
        self._model = model
        self._context = context

    def __repr__(self) -> str:
        return f"<HiddenStates of {self._context!r}>"

    def last(self, seq: int, tokens: Sequence[int]) -> Tensor:
        """See `LastHidden`."""
        held = self._context.lengths[seq]
        assert held in {len(tokens), len(tokens) - 1}, f"sequence {seq} holds {held} of {len(tokens)} tokens"
        if held == len(tokens):
            if held > 1 and not self._model.keeps_every_cell:
                if seq in self._context.with_initial_state:
                    raise UnsupportedError("a sequence that began from a state cannot be computed once more")
                return self._alone(tokens)
            self._context.trim(seq, held - 1)
        return self._stepped(self._context, seq, tokens[-1])

    def _alone(self, tokens: Sequence[int]) -> Tensor:
        """Computed once more from the first token, in a context made for it."""
        options = ContextOptions(
            num_cells=len(tokens),
            n_batch=self._context.n_batch,
            num_sequences=1,
            num_threads=self._context.num_threads,
            key_type=self._context.key_type,
        )
        try:
            context = LlamaContext(self._model, options)
        except ModelLoadError as error:
            raise StepFailedError(f"a hidden state needs a context of its own: {error}") from error
        try:
            for begin in range(0, len(tokens) - 1, context.n_batch):
                part = tokens[begin : min(begin + context.n_batch, len(tokens) - 1)]
                context.step(BatchPlan((PlanItem(0, begin, part, 0),)))
            return self._stepped(context, 0, tokens[-1])
        finally:
            context.close()

    @staticmethod
    def _stepped(context: LlamaContext, seq: int, token: int) -> Tensor:
        found = context.step_hidden(seq, token)
        return Tensor("hidden", found.shape, found.astype("<f4").tobytes())
