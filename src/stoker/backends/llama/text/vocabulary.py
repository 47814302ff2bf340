"""The tokenizer of a loaded model. It only reads native data, so worker threads may call it.

Every text goes to the native code through `tokenize`, in pieces that it can read without overrunning its
stack; `least_tokens` says beforehand what cannot be few tokens.

What native vocabularies make of texts, by their type (which bytes a token stands for, what is one word), is
read from llama.cpp's llama-vocab.cpp. Of a type that is not known here nothing is sure.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from stoker.backends.llama.binding import keeping_lock, llama
from stoker.backends.llama.text.cuts import BLANK_RUNS, Runs, Special, TextCuts, runs_of
from stoker.backends.token_floor import Keeps, TokenFloor
from stoker.errors import InvalidRequestError, ModelLoadError


class _Type(IntEnum):
    """enum llama_vocab_type."""

    SPM = 1
    BPE = 2
    WPM = 3
    UGM = 4
    RWKV = 5
    PLAMO2 = 6


# enum llama_token_attr
_UNKNOWN, _CONTROL, _USER_DEFINED, _STRIPS_LEFT, _STRIPS_RIGHT = 1 << 0, 1 << 3, 1 << 4, 1 << 7, 1 << 8
_NAMED_ENDS = (
    *(llama.llama_vocab_eos, llama.llama_vocab_eot),
    *(llama.llama_vocab_fim_pad, llama.llama_vocab_fim_rep, llama.llama_vocab_fim_sep),
)
_META_BYTES = 256
_RAW_BPE = frozenset(
    {"gemma4", "granite-embed-multi-311m", "sarvam-moe"}
)  # spells blanks and bytes as SPM does
_LOSSY = frozenset({"hybriddna", "whitespace"})  # models of tokenizers that drop or rewrite characters


def _byte_letters() -> dict[int, int]:
    """Characters that stand for bytes in byte-pair vocabularies, by code, and the bytes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {256 + index: byte for index, byte in enumerate(others)}


_BYTE_LETTERS = _byte_letters()


def attributes_of(handle: int) -> list[int]:
    """The flags of every token."""
    of = keeping_lock(llama.llama_vocab_get_attr)
    return [of(handle, token) for token in range(llama.llama_vocab_n_tokens(handle))]


def ends_of(model: int, attributes: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end a generation.

    The library takes for such what is spelled like one, which makes it a control token, and what the file
    names. To ask it of each of all tokens takes as long as to read their flags.
    """
    handle = llama.llama_model_get_vocab(model)
    found = {token for token, flags in enumerate(attributes) if flags & (_CONTROL | _USER_DEFINED | _UNKNOWN)}
    found |= {ask(handle) for ask in _NAMED_ENDS}
    end_of_message = _metadata(model, "tokenizer.ggml.eom_token_id")
    if end_of_message.isdigit():
        found.add(int(end_of_message))
    is_token = range(len(attributes)).__contains__
    return tuple(
        token for token in sorted(filter(is_token, found)) if llama.llama_vocab_is_eog(handle, token)
    )


def specials_of(handle: int, attributes: Sequence[int]) -> list[Special]:
    """The tokens that are looked up in a text as they are spelled; `attributes` are those of all tokens."""
    found = []
    for token, flags in enumerate(attributes):
        if flags & (_UNKNOWN | _USER_DEFINED | _CONTROL):
            text = llama.llama_vocab_get_text(handle, token).decode(errors="replace")
            if text:
                is_control = bool(flags & (_UNKNOWN | _CONTROL))
                found.append(Special(text, is_control, bool(flags & _STRIPS_LEFT)))
    return found


def runs_in(model: int, handle: int) -> Runs:
    """What is to be cut where it is long; nothing where cutting would change more than the run."""
    if llama.llama_vocab_type(handle) != _Type.BPE:
        return ()
    runs = runs_of(_metadata(model, "tokenizer.ggml.pre") or "default")
    is_stateful = _metadata(model, "tokenizer.ggml.model") == "hybriddna"  # within a tag letters mean others
    return () if is_stateful and runs == BLANK_RUNS else runs


def floor_of(model: int, attributes: Sequence[int], piece_of: Callable[[int], bytes]) -> TokenFloor:
    """The lower bound for its texts.

    Args:
        model: native handle.
        attributes: of all tokens.
        piece_of: the bytes of a token, control tokens spelled out.
    """
    handle, tokens = llama.llama_model_get_vocab(model), range(len(attributes))
    keeps = Keeps.ALL
    if any(each & (_STRIPS_LEFT | _STRIPS_RIGHT) for each in attributes):
        keeps = Keeps.PRINTED
    text_of = keeping_lock(llama.llama_vocab_get_text)
    texts = [text_of(handle, token) for token in tokens]
    kind, name = llama.llama_vocab_type(handle), _metadata(model, "tokenizer.ggml.model")
    found = TokenFloor([], Keeps.NOTHING)
    if kind == _Type.SPM:
        found = TokenFloor(texts, keeps, escapes_blanks=True)
    elif kind == _Type.BPE and name not in _LOSSY:
        found = _floor_of_pairs(model, texts, attributes, keeps)
    elif kind == _Type.WPM and not any(b" " in text for text in texts):
        found = TokenFloor([], Keeps.WORDS)
    elif kind == _Type.UGM:
        found = TokenFloor(texts, Keeps.KNOWN, escapes_blanks=True)
    elif kind == _Type.RWKV:
        found = TokenFloor([piece_of(token) for token in tokens], keeps)
    elif kind == _Type.PLAMO2 and keeps is Keeps.ALL:
        found = TokenFloor(texts, Keeps.MARKED)
    return found


def _floor_of_pairs(model: int, texts: list[bytes], attributes: Sequence[int], keeps: Keeps) -> TokenFloor:
    """Of a byte-pair vocabulary: a byte without a token of its own is dropped where it is in no other."""
    known = set(texts)
    if _metadata(model, "tokenizer.ggml.pre") in _RAW_BPE:
        missing = [byte for byte in range(256) if b"<0x%02X>" % byte not in known]
        return TokenFloor(texts, Keeps.NOTHING if missing else keeps, escapes_blanks=True)
    missing = [byte for letter, byte in _BYTE_LETTERS.items() if chr(letter).encode() not in known]
    is_spelled = [bool(each & (_UNKNOWN | _USER_DEFINED | _CONTROL)) for each in attributes]
    return TokenFloor(map(_decoded, texts, is_spelled), keeps, dropped=missing)


def _decoded(text: bytes, is_spelled: bool) -> bytes:  # noqa: FBT001 - a column beside the texts
    if is_spelled:
        return text
    try:
        return text.decode().translate(_BYTE_LETTERS).encode("latin-1")
    except UnicodeError:  # no spelling of bytes: it is never found in a text
        return text


def _metadata(model: int, key: str) -> str:
    """A text of the file's header; empty where it has none."""
    buffer = ctypes.create_string_buffer(_META_BYTES)
    size = llama.llama_model_meta_val_str(model, key.encode(), buffer, _META_BYTES)
    return "" if size < 0 else buffer.value.decode(errors="replace")


_NO_VOCABULARY = 0  # enum llama_vocab_type: LLAMA_VOCAB_TYPE_NONE
_NO_TOKEN = -1
_PIECE_BYTES = 256
_MAX_TEXT_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Tables:
    """What is read of every token: its flags, which ones end a generation, and where texts are cut."""

    attributes: list[int]
    eog_tokens: tuple[int, ...]
    cuts: TextCuts


def _tables_of(model: int, handle: int) -> _Tables:
    attributes = attributes_of(handle)
    cuts = TextCuts(specials_of(handle, attributes), runs_in(model, handle))
    return _Tables(attributes, ends_of(model, attributes), cuts)


class LlamaVocabulary:
    """Tokens of the model behind `model_handle`, valid as long as that is. Close it before the model.

    Its tables are read when they are first needed, or in a thread after `read_ahead`. Pieces are fetched once
    each and remembered: a race of two threads fetches the same bytes twice, no more.
    """

    def __init__(self, model_handle: int) -> None:
        self._model = model_handle
        self._handle = llama.llama_model_get_vocab(model_handle)
        if llama.llama_vocab_type(self._handle) == _NO_VOCABULARY:
            raise ModelLoadError("the model has no vocabulary, no text can be made of its tokens")
        self.n_vocab: int = llama.llama_vocab_n_tokens(self._handle)
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._special_pieces: list[bytes | None] = [None] * self.n_vocab
        self._floor: TokenFloor | None = None
        self._found: _Tables | None = None
        self._reading = threading.RLock()
        self._ahead: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<LlamaVocabulary of {self.n_vocab} tokens>"

    def close(self) -> None:
        """Wait for what still reads the model; idempotent."""
        if self._ahead is not None:
            self._ahead.join()

    def read_ahead(self) -> None:
        """Read the tables in a thread, once; whoever needs them meanwhile waits.

        For before a native call that takes long: beside Python, each native call waits for the thread's turn.
        """
        if self._ahead is None:
            self._ahead = threading.Thread(target=self._read_tables, name="stoker-vocabulary", daemon=True)
            self._ahead.start()

    def _read_tables(self) -> None:
        with suppress(Exception):  # whoever needs the tables reads them again, and is told
            _ = self._tables

    @cached_property
    def _tables(self) -> _Tables:
        with self._reading:
            if self._found is None:
                self._found = _tables_of(self._model, self._handle)
            return self._found

    @cached_property
    def _eog_set(self) -> frozenset[int]:
        return frozenset(self._tables.eog_tokens)

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
        pieces = self._tables.cuts.pieces(text, parse_special=parse_special)
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
        with self._reading:  # threads that read every token side by side keep each other from going on
            if self._floor is None:
                self._floor = floor_of(self._model, self._tables.attributes, self.special_piece)
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
        if not 0 <= token < self.n_vocab:
            raise self._unknown(token)
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._fetch(token, special=False)
        return piece

    def special_piece(self, token: int) -> bytes:
        """Like `piece`, with control tokens spelled out."""
        if not 0 <= token < self.n_vocab:
            raise self._unknown(token)
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
        return self._tables.eog_tokens

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

    def _unknown(self, token: int) -> InvalidRequestError:
        return InvalidRequestError(f"token {token} is not in 0 .. {self.n_vocab - 1}", param="tokens")

    def _spelling(self, token: int) -> str:
        return "" if token == _NO_TOKEN else self.special_piece(token).decode(errors="replace")

    def _fetch(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        size = llama.llama_token_to_piece(self._handle, token, buffer, _PIECE_BYTES, 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = llama.llama_token_to_piece(self._handle, token, buffer, -size, 0, special)
        return buffer.raw[:size]
