"""The bytes that the tokens of a folder's tokenizer stand for, by how its decoder spells them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

_BLANK = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[int, int]:
    """Characters that stand for bytes in byte-level vocabularies, by code, and the bytes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {256 + index: byte for index, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


class Spelling(Enum):
    """How a vocabulary writes bytes.

    LETTERS: each byte as a letter of its own. BLANKS: blanks as U+2581, and what has no token by bytes in
    angles. WORDS: parts of words after a prefix, words without one. PLAIN: as they are.
    """

    LETTERS = "letters"
    BLANKS = "blanks"
    WORDS = "words"
    PLAIN = "plain"


class Pieces:
    """Spelled tokens to bytes.

    Args:
        decoder: as tokenizer.json has it; None: it has none.
    """

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        parts = list(parts_of(decoder))
        kinds = {part.get("type") for part in parts}
        self._prefix = self._suffix = ""
        replaced = [part for part in parts if part.get("type") == "Replace"]
        if "ByteLevel" in kinds:
            self.spelling = Spelling.LETTERS
        elif "WordPiece" in kinds:
            self.spelling = Spelling.WORDS
            self._prefix = str(
                next(part for part in parts if part.get("type") == "WordPiece").get("prefix", "")
            )
        elif "Metaspace" in kinds or "ByteFallback" in kinds or any(map(_gives_blanks, replaced)):
            self.spelling = Spelling.BLANKS
        else:
            self.spelling = Spelling.PLAIN
            self._suffix = next((str(part["suffix"]) for part in parts if "suffix" in part), "")

    def __repr__(self) -> str:
        return f"<Pieces in {self.spelling.value}>"

    def bytes_of(self, text: str) -> bytes:
        """The bytes that a token adds to a text, of one that is spelled `text` and was not added."""
        match self.spelling:
            case Spelling.LETTERS:
                try:
                    return text.translate(BYTE_LETTERS).encode("latin-1")
                except UnicodeError:  # no spelling of bytes
                    return text.encode()
            case Spelling.BLANKS:
                byte = _BYTE.fullmatch(text)
                return bytes.fromhex(byte[1]) if byte else text.replace(_BLANK, " ").encode()
            case Spelling.WORDS:
                is_part = bool(self._prefix) and text.startswith(self._prefix)
                return (text.removeprefix(self._prefix) if is_part else f" {text}").encode()
        if self._suffix and text.endswith(self._suffix):
            text = text.removesuffix(self._suffix) + " "
        return text.encode()


def parts_of(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A step of a tokenizer's pipeline, or those that it is a sequence of."""
    if step is None:
        return
    for name in ("decoders", "normalizers", "pretokenizers", "processors"):
        if isinstance(inner := step.get(name), list):
            for each in inner:
                yield from parts_of(each)
            return
    yield step


def _gives_blanks(replace: Mapping[str, Any]) -> bool:
    return replace.get("pattern") == {"String": _BLANK} and replace.get("content") == " "
