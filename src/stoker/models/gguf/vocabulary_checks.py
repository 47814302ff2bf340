"""Whether the vocabulary of a GGUF header is one the native tokenizer takes without an abort (SPEC R1)."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from stoker.models.gguf.bounded_file import GgufArray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker.models.gguf.bounded_file import BoundedFile, Scalar
    from stoker.models.gguf.header import TensorInfo

_PREFIX = "tokenizer.ggml."
_NO_VOCABULARY = frozenset({"no_vocab", "none"})
# Ids a tokenizer uses when the file names none (llama-vocab.cpp): beginning, end, separator.
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2},
    "bert": {"bos": 101, "seperator": 102},
    "gpt2": {"bos": 11, "eos": 11},
    "t5": {"eos": 1},
    "plamo2": {"bos": 1, "eos": 2},
    "rwkv": {},
    "gemma4": {},
    "hybriddna": {"bos": 11, "eos": 11},
    "whitespace": {"bos": 11, "eos": 11},
}
_ADDED_BY_DEFAULT = {"llama": ("bos",), "bert": ("bos", "seperator"), "t5": ("eos",)}
_BYTE_FALLBACK = frozenset({"llama", "plamo2"})
_USED_IDS = ("bos", "eos", "eot", "unknown")
_NONE_ID = 2**32 - 1  # some converters write -1 for a token that is not there


def check(
    file: BoundedFile, metadata: Mapping[str, Scalar | GgufArray], tensors: Sequence[TensorInfo]
) -> None:
    """Check the tokenizer's keys and that the embedding has a row for each token.

    Raises:
        ModelFileError: names the key and both numbers.
    """
    model = metadata.get(_PREFIX + "model")
    if not isinstance(model, str):
        raise file.broken(f"the required key {_PREFIX}model is missing")
    if model in _NO_VOCABULARY:
        raise file.broken("it carries no vocabulary")
    if model not in _DEFAULT_IDS:
        raise file.broken(f"{_PREFIX}model is {model[:64]!r}, a tokenizer this build does not know")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise file.broken("tokenizer.chat_template is not a string")
    tokens = _array(file, metadata, "tokens", ("string",))
    if tokens is None or tokens.length == 0:
        raise file.broken(f"{_PREFIX}tokens is missing or empty")
    words = _read_words(file, tokens)
    if model in _BYTE_FALLBACK:
        _check_bytes(file, words)
    _check_columns(file, metadata, tokens.length)
    _check_ids(file, model, metadata, tokens.length)
    for tensor in tensors:
        if tensor.name == "token_embd.weight" and tensor.shape[1:] != (tokens.length,):
            raise file.broken(
                f"token_embd.weight has the shape {tensor.shape}, the vocabulary {tokens.length} tokens"
            )


def _array(
    file: BoundedFile, metadata: Mapping[str, Scalar | GgufArray], name: str, types: tuple[str, ...]
) -> GgufArray | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if not isinstance(value, GgufArray) or value.element_type not in types:
        raise file.broken(f"{_PREFIX}{name} is not an array of {' or '.join(types)}")
    return value


def _read_words(file: BoundedFile, tokens: GgufArray) -> set[bytes]:
    # The native library keys tokens by their C strings and asserts that all differ; empty ones get a name.
    file.seek(tokens.offset)
    words = file.strings(tokens.length, _PREFIX + "tokens")
    if 0 in b"".join(words) or not all(words):
        words = [
            raw if raw and 0 not in raw else raw.split(b"\0", 1)[0] or f"[EMPTY_{index}]".encode()
            for index, raw in enumerate(words)
        ]
    distinct = set(words)
    if len(distinct) != len(words):
        word, count = Counter(words).most_common(1)[0]
        raise file.broken(f"the token {word[:64].decode(errors='replace')!r} occurs {count} times")
    return distinct


def _check_bytes(file: BoundedFile, words: set[bytes]) -> None:
    # The native tokenizer ends the process on a character it has neither a token nor byte tokens for.
    # A vocabulary without any byte token is taken (small ones are made so), one with a hole is damaged.
    missing = [byte for byte in range(256) if b"<0x%02X>" % byte not in words and bytes((byte,)) not in words]
    if missing and any(b"<0x%02X>" % byte in words for byte in range(256)):
        raise file.broken(f"{len(missing)} of 256 byte tokens are missing, the first is <0x{missing[0]:02X}>")


def _check_columns(file: BoundedFile, metadata: Mapping[str, Scalar | GgufArray], num_tokens: int) -> None:
    for name, types in (("scores", ("float32", "int32")), ("token_type", ("int32",))):
        column = _array(file, metadata, name, types)
        if column is not None and column.length != num_tokens:
            raise file.broken(f"{_PREFIX}{name} has {column.length} values for {num_tokens} tokens")
        if column is not None and not all(
            math.isfinite(value) for value in column.values or () if isinstance(value, float)
        ):
            raise file.broken(f"{_PREFIX}{name} holds a value that is no finite number")
    _array(file, metadata, "merges", ("string",))


def _check_ids(
    file: BoundedFile, model: str, metadata: Mapping[str, Scalar | GgufArray], num_tokens: int
) -> None:
    known = {name: token for name, token in _DEFAULT_IDS[model].items() if token < num_tokens}
    for name in (*_USED_IDS, "seperator"):
        key = f"{_PREFIX}{name}_token_id"
        token = metadata.get(key)
        if token is None or token == _NONE_ID:
            continue
        if isinstance(token, bool) or not isinstance(token, int):
            raise file.broken(f"{key} is not an integer")
        if 0 <= token < num_tokens:
            known[name] = token
        elif name in _USED_IDS:
            raise file.broken(f"{key} is {token}, the vocabulary has {num_tokens} tokens")
    default = _ADDED_BY_DEFAULT.get(model, ())
    for name, key in (("bos", "add_bos_token"), ("eos", "add_eos_token"), ("seperator", "add_sep_token")):
        is_added = metadata.get(_PREFIX + key, name in default)
        if not isinstance(is_added, bool):
            raise file.broken(f"{_PREFIX}{key} is not a bool")
        if is_added and name not in known:
            raise file.broken(f"{_PREFIX}{key} asks for a token that the vocabulary does not name")
