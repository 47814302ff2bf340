"""llama.cpp called directly, one sequence at a time: the values that the engine's are compared with."""

import ctypes
from dataclasses import dataclass

import numpy as np
from llama_cpp import llama_cpp as llama

EQUAL_WITHIN = 0.05
"""Two runs are equal if they first differ where the reference's two best logits are this close (SPEC E1)."""


@dataclass(frozen=True)
class Run:
    """Greedy tokens, and at each the distance between the two best logits."""

    tokens: list[int]
    gaps: list[float]

    def assert_equal(self, tokens):
        """`tokens` equals this run as of SPEC E1."""
        for at, (mine, theirs) in enumerate(zip(self.tokens, tokens, strict=False)):
            if mine != theirs:
                gap = self.gaps[at]
                assert gap <= EQUAL_WITHIN, f"token {at}: {theirs} instead of {mine}, logits {gap:.3f} apart"
                return
        assert len(tokens) == len(self.tokens)


class Reference:
    """A model and a context of its own; AMX repacking is off, as in the engine where it has to be."""

    def __init__(self, path, n_ctx=2048):
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.n_vocab = llama.llama_vocab_n_tokens(self.vocab)
        context = llama.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_threads, context.n_threads_batch = n_ctx, n_ctx, 2, 2
        self.context = llama.llama_init_from_model(self.model, context)

    def close(self):
        """Free the context, then the model."""
        llama.llama_free(self.context)
        llama.llama_model_free(self.model)

    def tokenize(self, text):
        """Token ids, special tokens parsed, BOS as the model asks."""
        data = text.encode()
        room = (llama.llama_token * (len(data) + 8))()
        count = llama.llama_tokenize(self.vocab, data, len(data), room, len(room), True, True)
        return list(room[:count])

    def piece(self, token):
        """Bytes of a token."""
        room = ctypes.create_string_buffer(256)
        size = llama.llama_token_to_piece(self.vocab, token, room, len(room), 0, True)
        return room.raw[:size]

    def logits(self, tokens):
        """float32 (len(tokens), n_vocab): a row after each token, computed in one batch."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        return self._decode(tokens, 0, everywhere=True)

    def greedy(self, prompt, num_tokens):
        """The likeliest continuation, one token at a time; stops at an end-of-generation token."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        row = self._decode(prompt, 0, everywhere=False)[-1]
        tokens, gaps = [], []
        while len(tokens) < num_tokens:
            second, first = np.partition(row, -2)[-2:]
            tokens.append(int(row.argmax()))
            gaps.append(float(first - second))
            if llama.llama_vocab_is_eog(self.vocab, tokens[-1]):
                break
            row = self._decode(tokens[-1:], len(prompt) + len(tokens) - 1, everywhere=False)[-1]
        return Run(tokens, gaps)

    def _decode(self, tokens, start, *, everywhere):
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at] = token, start + at
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            batch.logits[at] = everywhere or at == len(tokens) - 1
        assert llama.llama_decode(self.context, batch) == 0
        num_rows = len(tokens) if everywhere else 1
        rows = np.ctypeslib.as_array(llama.llama_get_logits(self.context), (num_rows, self.n_vocab)).copy()
        llama.llama_batch_free(batch)
        return rows


def log_softmax(rows):
    """Natural-log probabilities, float64."""
    rows = rows.astype(np.float64)
    rows = rows - rows.max(axis=-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
