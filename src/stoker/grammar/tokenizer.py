"""A vocabulary as the grammar engine knows it, made once a model.

Owns the native tokenizer and what is asked of all tokens at once; grammars and states are made on it.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stoker.backends.protocol.backend import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Put before a text that the vocabulary would begin with a space of its own; no text holds it.
_SENTINEL = "\x02"


class GrammarTokenizer:
    """The tokens of one model. Made on any thread and safe to use from several.

    A token without a piece is a control token: no grammar lets it through, unless it ends the generation or
    the grammar names it.

    Args:
        vocabulary: the model's tokenizer.
        num_vocab: its tokens; a row of logits is as long.

    Attributes:
        native: what the grammar engine takes.
        ends: ids of the tokens that end a generation, ascending.
        native_ends: what the grammar engine takes for them: where there are none it needs one, the last id.
    """

    def __init__(self, vocabulary: Vocabulary, num_vocab: int) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - for constraints alone

        self.num_vocab = num_vocab
        self.ends: npt.NDArray[np.int64] = np.array(sorted(vocabulary.eog_tokens), np.int64)
        self.native_ends = self.ends if len(self.ends) else np.array([num_vocab - 1], np.int64)
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._overruns: dict[tuple[bytes, int], npt.NDArray[np.int64]] = {}
        self._native: LLTokenizer | None = None
        self._native = LLTokenizer(
            TokenizerWrapper(_Wrapped(self, vocabulary, num_vocab)),
            n_vocab=num_vocab,
            eos_token=self.native_ends.tolist(),
        )

    def __repr__(self) -> str:
        return f"GrammarTokenizer(num_vocab={self.num_vocab}, ends={self.ends.tolist()})"

    @property
    def native(self) -> LLTokenizer:
        """The grammar engine's own object."""
        assert self._native is not None
        return self._native

    def spelling(self, token: int) -> bytes:
        """The bytes of a token, control tokens spelled out."""
        return self._vocabulary.special_piece(token)

    def tokens_of(self, text: str) -> list[int]:
        """Tokens that spell `text`, control tokens read as such."""
        return self._exact(self._vocabulary.tokenize(text, add_special=False, parse_special=True), text, [])

    def plain_tokens_of(self, data: bytes) -> list[int]:
        """Tokens whose pieces make up `data`, the vocabulary's own ones where it can."""
        text = data.decode(errors="replace")
        tokens = self._vocabulary.tokenize(text, add_special=False, parse_special=False)
        if self._join(tokens) == data:
            return tokens
        fallback = [] if self._native is None else self._native.greedy_tokenize(text)
        return self._exact(tokens, text, fallback)

    def overruns(self, marker: bytes, num_matched: int) -> npt.NDArray[np.int64]:
        """Tokens that end `marker`, of which `num_matched` bytes are written, and say more than blanks."""
        key = (marker, num_matched)
        with self._lock:
            if key not in self._overruns:
                self._overruns[key] = self._find_overruns(marker, num_matched)
            return self._overruns[key]

    def _find_overruns(self, marker: bytes, num_matched: int) -> npt.NDArray[np.int64]:
        rest = marker[num_matched:]
        found = []
        for token in range(self.num_vocab):
            piece = self.spelling(token)
            at = piece.find(rest) if num_matched == 0 else piece.startswith(rest) - 1
            if at >= 0 and piece[at + len(rest) :].strip():
                found.append(token)
        return np.array(found, np.int64)

    def _exact(self, tokens: list[int], text: str, fallback: list[int]) -> list[int]:
        """`tokens` where they spell `text`, else what the vocabulary makes of it after another character."""
        if b"".join(map(self.spelling, tokens)) == text.encode():
            return tokens
        head = self._vocabulary.tokenize(_SENTINEL, add_special=False, parse_special=False)
        whole = self._vocabulary.tokenize(_SENTINEL + text, add_special=False, parse_special=True)
        tail = whole[len(head) :]
        if whole[: len(head)] == head and b"".join(map(self.spelling, tail)) == text.encode():
            return tail
        return fallback or tokens

    def _join(self, tokens: list[int]) -> bytes:
        return b"".join(map(self._vocabulary.piece, tokens))


class _Wrapped:
    """The attributes that the grammar engine asks of a tokenizer."""

    def __init__(self, owner: GrammarTokenizer, vocabulary: Vocabulary, num_vocab: int) -> None:
        pieces = [vocabulary.piece(token) for token in range(num_vocab)]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        for token in self.special_token_ids:
            pieces[token] = vocabulary.special_piece(token)
        self.tokens = pieces
        self.eos_token_id = int(owner.native_ends[0])
        self.bos_token_id = None
        self._owner = weakref.ref(owner)  # a cycle through native code is never collected

    def __call__(self, data: bytes) -> list[int]:
        owner = self._owner()
        assert owner is not None, "a grammar is used after its tokenizer"
        return owner.plain_tokens_of(data)
