"""A smaller model that guesses what a larger one will say (SPEC D9).

Owns its weights and one sequence, which follows whatever text it is asked about. The engine weighs a
guess, and makes a token only of what the larger model draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stoker.backends.llama.binding import sum_by_device
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import StokerError, UnsupportedError
from stoker.models.memory_estimate.placing import draft_placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.llama.text.vocabulary import LlamaVocabulary
    from stoker.backends.protocol.backend import Rows

SLICE_TOKENS = 64
"""Tokens of a text that it reads at a time, which bounds how long a request waits for it."""


class DraftModel:
    """A model file, loaded to guess for another. One thread drives it.

    Args:
        model: its weights, its own from here on.
        num_cells: tokens of the longest text it follows.
        num_threads: CPU threads of a step.

    Raises:
        ModelLoadError: llama.cpp could not make a context.
    """

    def __init__(self, model: LlamaModel, num_cells: int, num_threads: int) -> None:
        self._model = model
        options = ContextOptions(
            num_cells=num_cells, n_batch=SLICE_TOKENS, num_sequences=1, num_threads=num_threads
        )
        self._context = LlamaContext(model, options)
        self._held: list[int] = []
        self._namespace = b""  # of what is held

    def __repr__(self) -> str:
        return f"<DraftModel {self._model!r}, {len(self._held)} tokens read>"

    def guess(self, tokens: Sequence[int], count: int, namespace: bytes = b"") -> list[int]:
        """The likeliest `count` tokens after a text; none while it still reads it, a slice a call.

        A text that is too long for it, or a step that fails, gives fewer. A text of another namespace than
        the last one's is read from its beginning.
        """
        count = min(count, self._context.num_cells - len(tokens))
        if count <= 0:
            return []
        if namespace != self._namespace:
            self._forget(0)
            self._namespace = namespace
        try:
            return self._guess(list(tokens), count)
        except StokerError:
            self._forget(0)
            return []

    def _guess(self, tokens: list[int], count: int) -> list[int]:
        self._forget(_num_common(self._held, tokens[:-1]))
        pending = tokens[len(self._held) :]
        if len(pending) > SLICE_TOKENS:
            self._step(pending[:SLICE_TOKENS], 0)
            return []
        guesses: list[int] = []
        while len(guesses) < count:
            pending = [int(self._step(pending, 1)[0].argmax())]
            guesses += pending
        return guesses

    def _step(self, tokens: list[int], num_logits: int) -> Rows:
        rows = self._context.step(BatchPlan((PlanItem(0, len(self._held), tokens, num_logits),)))
        self._held += tokens
        return rows

    def _forget(self, length: int) -> None:
        self._context.trim(0, length)
        del self._held[length:]

    def set_threads(self, num_threads: int) -> None:
        """Use that many CPU threads from the next guess on."""
        self._context.set_threads(num_threads)

    def memory(self) -> int:
        """Bytes it takes."""
        return self._model.size_bytes + sum(self._context.memory().values())

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """What of that lies on accelerators, by id; see `OnDevices`."""
        held = sum_by_device(self._model.memory_by_device(), self._context.memory_by_device())
        return {owner: {"draft": sum(lines.values())} for owner, lines in held.items()}

    def close(self) -> None:
        """Free cells, then weights; idempotent."""
        self._context.close()
        self._model.close()


def open_draft(path: str, target: LlamaModel, num_cells: int, num_threads: int) -> DraftModel:
    """Load the model that guesses for `target`.

    Raises:
        ModelFileError: there is no such file.
        ModelLoadError: llama.cpp refused it.
        UnsupportedError: its vocabulary is another one, or it cannot go back.
    """
    options = ModelOptions(
        path=Path(path),
        use_extra_bufts=target.uses_extra_bufts,
        offloads=bool(target.devices),
        placement=draft_placement(target.placement),
    )
    model = LlamaModel(options)
    try:
        _check(model, target)
        return DraftModel(model, num_cells, num_threads)
    except BaseException:
        model.close()
        raise


def _check(model: LlamaModel, target: LlamaModel) -> None:
    names = f"{model.path.name} cannot guess for {target.path.name}"
    if not model.keeps_every_cell or model.has_encoder:
        raise UnsupportedError(f"{names}: it cannot take back what it read", param="draft_model")
    own, other = model.vocabulary, target.vocabulary
    if own.n_vocab != other.n_vocab:
        raise UnsupportedError(
            f"{names}: it has {own.n_vocab} tokens, the other {other.n_vocab}", param="draft_model"
        )
    token = _first_difference(own, other)
    if token is not None:
        pieces = f"{own.special_piece(token)!r} and {other.special_piece(token)!r}"
        raise UnsupportedError(
            f"{names}: their vocabularies differ, token {token} is {pieces}", param="draft_model"
        )


def _first_difference(own: LlamaVocabulary, other: LlamaVocabulary) -> int | None:
    tokens = range(own.n_vocab)
    return next((token for token in tokens if own.special_piece(token) != other.special_piece(token)), None)


def _num_common(left: list[int], right: list[int]) -> int:
    """Leading tokens that are the same: almost always all of one of them, but for some guesses at the end."""
    most = min(len(left), len(right))
    sure = max(0, most - SLICE_TOKENS)
    if left[:sure] != right[:sure]:
        sure = 0
    return next((at for at in range(sure, most) if left[at] != right[at]), most)
