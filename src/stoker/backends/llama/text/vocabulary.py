"""The tokenizer of a loaded model. It only reads native data, so worker threads may call it.

Every text goes to the native code through `tokenize`, in pieces that it can read without overrunning its
stack; `least_tokens` says beforehand what cannot be few tokens.
"""

from __future__ import annotations

import ctypes
from functools import cached_property

import numpy as np

from stoker.backends.llama.binding import llama
from stoker.backends.llama.text.cuts import TextCuts
from stoker.backends.llama.text.token_floor import TokenFloor
from stoker.backends.llama.text.token_spellings import floor_of, runs_in, specials_of
from stoker.errors import InvalidRequestError, ModelLoadError

_NO_VOCABULARY = 0  # enum llama_vocab_type: LLAMA_VOCAB_TYPE_NONE
_NO_TOKEN = -1
_PIECE_BYTES = 256
_MAX_TEXT_BYTES = 2**31 - 1


class LlamaVocabulary:
    """Tokens of the model behind `model_handle`, valid as long as that is.

    Pieces are fetched once each and remembered: a race of two threads fetches the same bytes twice, no more.
    """

    def __init__(self, model_handle: int) -> None:
        self._model = model_handle
        self._handle = llama.llama_model_get_vocab(model_handle)
        if llama.llama_vocab_type(self._handle) == _NO_VOCABULARY:
            raise ModelLoadError("the model has no vocabulary, no text can be made of its tokens")
        self.n_vocab: int = llama.llama_vocab_n_tokens(self._handle)
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._special_pieces: list[bytes | None] = [None] * self.n_vocab
        self._eog_tokens = tuple(
            token for token in range(self.n_vocab) if llama.llama_vocab_is_eog(self._handle, token)
        )
        self._eog_set = frozenset(self._eog_tokens)

    def __repr__(self) -> str:
        return f"<LlamaVocabulary of {self.n_vocab} tokens>"

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. Raises InvalidRequestError where it is no valid Unicode."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error}", param="prompt") from error
        if len(data) > _MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"the text has {len(data)} bytes, at most {_MAX_TEXT_BYTES} fit", param="prompt"
            )
        pieces = self._cuts.pieces(text, parse_special=parse_special)
        if len(pieces) == 1:
            return self._native_tokens(data, add_special=add_special, parse_special=parse_special)
        before, after = self._surrounding if add_special else ([], [])
        tokens = list(before)
        known: dict[str, list[int]] = {}  # a long run of one character is many equal pieces
        for piece in pieces:
            if piece not in known:
                known[piece] = self._native_tokens(
                    piece.encode(), add_special=False, parse_special=parse_special
                )
            tokens += known[piece]
        return tokens + after

    def least_tokens(self, text: str, enough: int) -> int:
        """Tokens that `text` has at the least, without tokenising it; exact no further than `enough`."""
        return self._floor.least(text, enough)

    def _native_tokens(self, data: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        capacity = len(data) + 8  # a token is at least a byte; BOS and EOS come on top
        while True:
            buffer = np.empty(capacity, np.int32)
            count = llama.llama_tokenize(
                self._handle,
                data,
                len(data),
                buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
                capacity,
                add_special,
                parse_special,
            )
            if count >= 0:
                tokens: list[int] = buffer[:count].tolist()
                return tokens
            assert -count > capacity, f"the tokenizer asks for {-count} tokens of {capacity} that it has"
            capacity = -count  # an unusual vocabulary: what is needed

    @cached_property
    def _cuts(self) -> TextCuts:
        return TextCuts(specials_of(self._handle, self.n_vocab), runs_in(self._model, self._handle))

    @cached_property
    def _floor(self) -> TokenFloor:
        return floor_of(self._model, self._handle, self.special_piece)

    @cached_property
    def _surrounding(self) -> tuple[list[int], list[int]]:
        """What `add_special` puts before a text, and what after it."""
        added = self._native_tokens(b"", add_special=True, parse_special=False)
        num_before = len(added) - 1 if len(added) != 1 else int(llama.llama_vocab_get_add_bos(self._handle))
        return added[: max(0, num_before)], added[max(0, num_before) :]

    def pair(self, query: str, document: str) -> list[int]:
        """[BOS] query [EOS] [SEP] document [EOS], of these what the vocabulary says it adds.

        That is how llama.cpp's server writes a pair, so that scores are the same; SEP stands for an EOS that
        is wanted and missing. Raises InvalidRequestError where a text is no valid Unicode.
        """
        first, second = (
            self.tokenize(text, add_special=False, parse_special=False) for text in (query, document)
        )
        bos, eos, sep = (
            ask(self._handle) for ask in (llama.llama_vocab_bos, llama.llama_vocab_eos, llama.llama_vocab_sep)
        )
        begin = [bos] if llama.llama_vocab_get_add_bos(self._handle) else []
        end = [sep if eos == _NO_TOKEN else eos] if llama.llama_vocab_get_add_eos(self._handle) else []
        between = [sep] if llama.llama_vocab_get_add_sep(self._handle) else []
        tokens = [*begin, *first, *end, *between, *second, *end]
        return [token for token in tokens if token != _NO_TOKEN]

    def piece(self, token: int) -> bytes:
        """The bytes a generated token adds to the text; empty for control tokens."""
        self._check(token)
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._fetch(token, special=False)
        return piece

    def special_piece(self, token: int) -> bytes:
        """Like `piece`, with control tokens spelled out."""
        self._check(token)
        piece = self._special_pieces[token]
        if piece is None:
            piece = self._special_pieces[token] = self._fetch(token, special=True)
        return piece

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self._eog_set

    @property
    def eog_tokens(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        return self._eog_tokens

    @property
    def added_bos(self) -> int | None:
        """The token that `add_special` puts before every text; None: it puts none there."""
        token: int = llama.llama_vocab_bos(self._handle)
        adds = llama.llama_vocab_get_add_bos(self._handle) and token != _NO_TOKEN
        return token if adds else None

    @property
    def bos_text(self) -> str:
        """The beginning-of-sequence token as text, empty if there is none."""
        return self._spelling(llama.llama_vocab_bos(self._handle))

    @property
    def eos_text(self) -> str:
        """The end-of-sequence token as text, empty if there is none."""
        return self._spelling(llama.llama_vocab_eos(self._handle))

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""
        template = llama.llama_model_chat_template(self._model, None)
        return None if template is None else str(template, "utf-8", "replace")

    def _check(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise InvalidRequestError(f"token {token} is not in 0 .. {self.n_vocab - 1}", param="tokens")

    def _spelling(self, token: int) -> str:
        return "" if token == _NO_TOKEN else self.special_piece(token).decode(errors="replace")

    def _fetch(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        size = llama.llama_token_to_piece(self._handle, token, buffer, _PIECE_BYTES, 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = llama.llama_token_to_piece(self._handle, token, buffer, -size, 0, special)
        return buffer.raw[:size]
