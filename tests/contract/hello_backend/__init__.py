"""The smallest backend: it answers "hello". One folder, and one line in `stoker.backends.registry`.

It has the core protocol and no extension. Its rows follow from all tokens of their sequence, so that it
passes the generation part of the contract (docs/backends.md).
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from stoker.backends.device import CPU, Device
from stoker.backends.fake.vocabulary import EOS, N_VOCAB, FakeVocabulary
from stoker.backends.protocol.backend import BatchPlan, Capabilities, Computed, Lengths
from stoker.backends.protocol.extensions import NO_EXTENSIONS
from stoker.errors import PoolFullError, StepFailedError
from stoker.ipc.model import ModelClass
from stoker.models.memory_estimate.fit import Estimate
from stoker.models.reader import ModelDescription

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Rows
    from stoker.ipc.model import ModelSpec
    from stoker.models.memory_estimate.fit import Estimator
    from stoker.models.reader import LoadContext

ANSWER = b"hello"
NUM_CELLS = 512


class HelloBackend:
    """A cell is a number that is its own; sequences that share a token hold the same number."""

    def __init__(self, num_sequences: int = 12, n_batch: int = 128, num_cells: int = NUM_CELLS) -> None:
        self.capabilities = Capabilities(
            model_class=ModelClass.DECODER,
            architecture="hello",
            description="says hello",
            label="hello · CPU",
            n_vocab=N_VOCAB,
            n_ctx=num_cells,
            n_ctx_train=num_cells,
            num_cells=num_cells,
            n_batch=n_batch,
            num_sequences=num_sequences,
            num_params=0,
            size_bytes=0,
            kv_type="none",
            flash_attention="off",
            can_trim=True,
            can_fork=True,
        )
        self.vocabulary = FakeVocabulary()
        self.extensions = NO_EXTENSIONS
        self._lengths = Lengths(num_sequences, N_VOCAB, n_batch)
        self._sequences: list[list[tuple[int, int]]] = [[] for _ in range(num_sequences)]  # token, cell
        self._new_cells = count()

    def launch(self, plan: BatchPlan) -> Computed:
        """Computes here; a device would return what waits for it."""
        self._lengths.check(plan)
        if any(min(item.tokens) < 0 for item in plan.items):
            raise StepFailedError("it takes no images")
        num_used = len({cell for sequence in self._sequences for _, cell in sequence})
        if num_used + plan.num_tokens > self.capabilities.num_cells:
            raise PoolFullError(f"{num_used} cells are used", num_tokens=plan.num_tokens)
        rows = []
        for item in plan.items:
            sequence = self._sequences[item.seq]
            sequence += [(token, next(self._new_cells)) for token in item.tokens]
            tokens = [token for token, _ in sequence]
            rows += [_row(tokens[: len(tokens) - back]) for back in reversed(range(item.num_logits))]
        self._lengths.advance(plan)
        return Computed(np.array(rows, np.float32).reshape(-1, N_VOCAB))

    def fork(self, src: int, dst: int, length: int) -> None:
        """The same cells."""
        self._sequences[dst] = self._sequences[src][:length]
        self._lengths[dst] = length

    def trim(self, seq: int, length: int) -> None:
        """Keep the first ones."""
        del self._sequences[seq][length:]
        self._lengths[seq] = length

    def drop(self, seq: int) -> None:
        """Keep nothing."""
        self.trim(seq, 0)

    def length(self, seq: int) -> int:
        """Tokens held."""
        return self._lengths[seq]

    def memory(self) -> dict[str, int]:
        """Next to nothing."""
        return {"weights": 0, "kv": 8 * self.capabilities.num_cells, "compute": 0}

    def close(self) -> None:
        """Nothing to free."""


def _row(tokens: list[int]) -> Rows:
    """The next letter after what was said of "hello", and noise that follows from every token."""
    said = bytes(token for token in tokens[-len(ANSWER) :] if token < 256)
    num_said = next(n for n in range(len(ANSWER), -1, -1) if said.endswith(ANSWER[:n]))
    row = np.random.default_rng(crc32(str(tokens).encode())).random(N_VOCAB, np.float32)
    row[ANSWER[num_said] if num_said < len(ANSWER) else EOS] += 10.0
    return row


class HelloReader:
    """The model "hello:"."""

    fingerprint = ""

    def describe(self) -> ModelDescription:
        """A decoder with a chat template."""
        template = FakeVocabulary().chat_template
        return ModelDescription(
            model_class=ModelClass.DECODER,
            architecture="hello",
            n_ctx_train=NUM_CELLS,
            id="hello",
            n_vocab=N_VOCAB,
            chat_template=template,
        )

    def estimator(self) -> Estimator:
        """Eight bytes a cell."""
        return lambda spec: Estimate(lines={"kv": 8 * (spec.pool_cells or NUM_CELLS)}, n_ctx=NUM_CELLS)

    def devices(self) -> tuple[Device, ...]:
        """No accelerator, which would be leased."""
        return (CPU,)

    def devices_for(self, spec: ModelSpec) -> tuple[Device, ...]:
        """The same."""
        return self.devices()

    def load(self, spec: ModelSpec, context: LoadContext) -> HelloBackend:
        """At once."""
        context.on_progress(1.0)
        return HelloBackend(2 * spec.num_slots + 8, spec.call_tokens, spec.pool_cells or NUM_CELLS)

    def try_out(self, context: LoadContext) -> None:
        """It has no native code."""


def open_model(path: str) -> HelloReader:
    """The only model there is, whatever follows "hello:"."""
    return HelloReader()
