"""The lower bound of tokens for a folder's tokenizer: which bytes of a text are sure to be in a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoker.backends.mlx.text.pieces import BYTE_LETTERS, Spelling, parts_of
from stoker.backends.token_floor import Keeps, TokenFloor

if TYPE_CHECKING:
    from tokenizers import AddedToken

_CUTS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts"})
_FOLDS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "Precompiled", "BertNormalizer"})
_BLANK = "▁"


def floor_of(
    model: Any,
    steps: Sequence[Mapping[str, Any] | None],
    spellings: Sequence[bytes],
    added: Sequence[AddedToken],
    spelling: Spelling,
) -> TokenFloor:
    """The bound for a tokenizer.

    Args:
        model: the library's.
        steps: its normalizer and its pre-tokenizer.
        spellings: the bytes of all tokens, control tokens spelled out.
        added: tokens that are found before anything else.
        spelling: how the others write bytes.
    """
    normalizers, cuts = ([dict(part) for part in parts_of(step)] for step in steps)
    if any(part.get("behavior") == "Removed" for part in cuts) or not all(map(_is_known, normalizers)):
        return TokenFloor([], Keeps.NOTHING)
    name = type(model).__name__
    if name == "WordPiece":
        has_blanks = any(b" " in text.strip() for text in spellings)
        return TokenFloor([], Keeps.NOTHING if has_blanks else Keeps.WORDS)
    is_exact = all(map(_escapes, normalizers)) and all(part.get("type") in _CUTS for part in cuts)
    is_exact &= not any(token.lstrip or token.rstrip for token in added)
    if name == "BPE" and is_exact and spelling is Spelling.LETTERS and not normalizers:
        missing = [byte for letter, byte in BYTE_LETTERS.items() if model.token_to_id(chr(letter)) is None]
        return TokenFloor(spellings, Keeps.ALL, dropped=missing)
    is_exact &= name == "BPE" and spelling is Spelling.BLANKS and _spells_all_bytes(model)
    keeps = Keeps.ALL if is_exact else Keeps.KNOWN if name in {"BPE", "Unigram"} else Keeps.NOTHING
    return TokenFloor(spellings, keeps, escapes_blanks=spelling is Spelling.BLANKS)


def _spells_all_bytes(model: Any) -> bool:
    """Whether no character is without tokens."""
    return bool(model.byte_fallback) and all(
        model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
    )


def _escapes(part: Mapping[str, Any]) -> bool:
    """Whether a normalizer only writes blanks in another way, or adds to the text."""
    if part.get("type") == "Replace":
        return part.get("pattern") == {"String": " "} and part.get("content") == _BLANK
    return part.get("type") == "Prepend"


def _is_known(part: Mapping[str, Any]) -> bool:
    """Whether a normalizer takes no letters away that stand between others."""
    return part.get("type") in _FOLDS or _escapes(part)
