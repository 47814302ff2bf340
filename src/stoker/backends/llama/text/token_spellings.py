"""What native vocabularies make of texts, by their type: which bytes a token stands for, what is one word.

Read from llama.cpp's llama-vocab.cpp. Of a type that is not known here nothing is sure.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum

from stoker.backends.llama.binding import llama
from stoker.backends.llama.text.cuts import BLANK_RUNS, Runs, Special, runs_of
from stoker.backends.llama.text.token_floor import Keeps, TokenFloor


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


def specials_of(handle: int, n_vocab: int) -> list[Special]:
    """The tokens that are looked up in a text as they are spelled."""
    found = []
    for token in range(n_vocab):
        attributes = llama.llama_vocab_get_attr(handle, token)
        if attributes & (_UNKNOWN | _USER_DEFINED | _CONTROL):
            text = _text(handle, token).decode(errors="replace")
            if text:
                is_control = bool(attributes & (_UNKNOWN | _CONTROL))
                found.append(Special(text, is_control, bool(attributes & _STRIPS_LEFT)))
    return found


def runs_in(model: int, handle: int) -> Runs:
    """What is to be cut where it is long; nothing where cutting would change more than the run."""
    if llama.llama_vocab_type(handle) != _Type.BPE:
        return ()
    runs = runs_of(_metadata(model, "tokenizer.ggml.pre") or "default")
    is_stateful = _metadata(model, "tokenizer.ggml.model") == "hybriddna"  # within a tag letters mean others
    return () if is_stateful and runs == BLANK_RUNS else runs


def floor_of(model: int, handle: int, piece_of: Callable[[int], bytes]) -> TokenFloor:
    """The lower bound for its texts.

    Args:
        model: native handle.
        handle: of the vocabulary.
        piece_of: the bytes of a token, control tokens spelled out.
    """
    tokens = range(llama.llama_vocab_n_tokens(handle))
    attributes = [llama.llama_vocab_get_attr(handle, token) for token in tokens]
    keeps = Keeps.ALL
    if any(each & (_STRIPS_LEFT | _STRIPS_RIGHT) for each in attributes):
        keeps = Keeps.PRINTED
    texts = [_text(handle, token) for token in tokens]
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


def _floor_of_pairs(model: int, texts: list[bytes], attributes: list[int], keeps: Keeps) -> TokenFloor:
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


def _text(handle: int, token: int) -> bytes:
    return bytes(llama.llama_vocab_get_text(handle, token) or b"")


def _metadata(model: int, key: str) -> str:
    """A text of the file's header; empty where it has none."""
    buffer = ctypes.create_string_buffer(_META_BYTES)
    size = llama.llama_model_meta_val_str(model, key.encode(), buffer, _META_BYTES)
    return "" if size < 0 else buffer.value.decode(errors="replace")
