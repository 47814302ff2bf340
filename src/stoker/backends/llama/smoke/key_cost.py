"""What repeatable texts cost a model on this machine: bf16 keys measured beside f16 ones (docs/adr/0029).

The child process of a smoke decode measures it (`trial`), `smoke` remembers it, and where `repeatable` is
"auto" it decides. What is measured is the middle of a prompt of a thousand tokens, and an answer after it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import msgspec

from stoker.backends.llama.binding import llama
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions, KeyType
from stoker.backends.llama.row_tiles import BEHIND, HALF, TILE
from stoker.backends.llama.smoke.first_decode import first_tokens
from stoker.backends.protocol.backend import BatchPlan, PlanItem

if TYPE_CHECKING:
    from stoker.backends.llama.model import LlamaModel

MOST_COST = 0.05
"""What repeatable texts may cost where nobody asked for them, as a fraction of a step's time."""
SLICE_TOKENS = TILE
"""Of a prompt: the fewest that llama.cpp computes attention over f16 keys in tiles for."""
SEED_TOKENS = 32
NUM_SEEDS = BEHIND // SEED_TOKENS
"""These lie before the slice: half of a prompt of a thousand tokens."""
NUM_DECODED = 6
MAX_ROUNDS = 3
BUDGET_S = 1.0
"""No further round begins after it."""
NUM_SEEDS_COMPUTED = 7
"""What a round computes for both types, in times of the seed."""
MOST_S = 20.0
"""A model for which it would take longer is not measured."""


class KeyCost(msgspec.Struct, frozen=True):
    """How much longer steps take over bf16 keys than over f16 ones, as fractions; 0.15: by 15 %.

    Attributes:
        prefill: of a slice of a prompt.
        decode: of one token of an answer.
        half_tile: what half as many tokens as a slice has take over f16 keys, by what the slice takes; see
            `row_tiles`.
    """

    prefill: float
    decode: float
    half_tile: float

    @property
    def most(self) -> float:
        """Of the two the greater."""
        return max(self.prefill, self.decode)

    def __str__(self) -> str:
        return f"{self.prefill:+.0%} of a prompt's time, {self.decode:+.0%} of an answer's"


def key_cost(model: LlamaModel) -> KeyCost | None:
    """What bf16 keys cost a model that is computed on the CPU.

    None: it is so slow that measuring would take long, or keeps no cell for each token, so that its texts
    would not be repeatable either.

    The processor's time of one thread is measured, and the least counts: neither other processes nor threads
    that wait for each other are in it.

    Raises:
        StokerError: it cannot be computed, or too little memory is left.
    """
    if not model.keeps_every_cell:
        return None
    n_vocab = model.vocabulary.n_vocab
    with ExitStack() as opened:
        plain = _Timed(opened.enter_context(closing(_opened(model, KeyType.F16))), n_vocab)
        if plain.seed_s * NUM_SEEDS_COMPUTED > MOST_S:
            return None
        repeatable = _Timed(opened.enter_context(closing(_opened(model, KeyType.BF16))), n_vocab)
        begun_s = time.thread_time()
        for _ in range(MAX_ROUNDS):
            plain.measure()
            plain.measure_half()
            repeatable.measure()
            if time.thread_time() - begun_s > BUDGET_S:
                break
    return KeyCost(
        repeatable.slice_s / plain.slice_s - 1.0,
        repeatable.token_s / plain.token_s - 1.0,
        plain.half_s / plain.slice_s,
    )


def _opened(model: LlamaModel, kind: KeyType) -> LlamaContext:
    return LlamaContext(
        model,
        ContextOptions(
            num_cells=NUM_SEEDS * SEED_TOKENS + SLICE_TOKENS,
            n_batch=SLICE_TOKENS,
            num_sequences=NUM_SEEDS,
            num_threads=1,
            key_type=kind,
        ),
    )


class _Timed:
    """The least that a slice, half of it and a token took over one type of keys, with 448 tokens before them.

    Of those `SEED_TOKENS` are computed, the others are copies: attention over them costs the same.
    """

    def __init__(self, context: LlamaContext, n_vocab: int) -> None:
        self.slice_s = self.half_s = self.token_s = float("inf")
        self._context = context
        self._tokens = first_tokens(n_vocab, SLICE_TOKENS)[:-1]
        self.seed_s = self._compute(self._tokens[:SEED_TOKENS])
        state, memory = context.read_state(0), llama.llama_get_memory(context.handle)
        for seq in range(1, NUM_SEEDS):
            context.write_state(seq, state, SEED_TOKENS)
            llama.llama_memory_seq_cp(memory, seq, 0, -1, -1)

    def measure(self) -> None:
        """Compute a slice, and in its place a few tokens."""
        self.slice_s = min(self.slice_s, self._compute(self._tokens))
        self._context.trim(0, SEED_TOKENS)
        for _ in range(NUM_DECODED):
            self.token_s = min(self.token_s, self._compute(self._tokens[:1]))
        self._context.trim(0, SEED_TOKENS)

    def measure_half(self) -> None:
        """Compute half a slice there."""
        self.half_s = min(self.half_s, self._compute(self._tokens[:HALF]))
        self._context.trim(0, SEED_TOKENS)

    def _compute(self, tokens: list[int]) -> float:
        """Seconds of one step of sequence 0."""
        begun_s = time.thread_time()
        self._context.step(BatchPlan((PlanItem(0, self._context.lengths[0], tokens, 1),)))
        return time.thread_time() - begun_s
