"""How many tokens a text has at the least, counted from its bytes alone.

Owns the bound and why it holds for each type of vocabulary; the caller refuses texts that cannot fit.

A token of several bytes that covers a byte covers one of its neighbours too. So the longest token that holds
the byte together with a neighbour is at least as long as whichever token covers it in the end: the inverse of
that length is the byte's share, and the shares of the bytes of one token add up to one at the most.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np
import numpy.typing as npt

_BLOCK_CHARS = 2**16
_BLANKS = b" \t\n\v\f\r"  # what isspace() knows: stripped beside tokens that ask for it
_ESCAPED_BLANK = "▁"
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_ALPHANUMERIC = b"0123456789" + _LETTERS + _LETTERS.upper()
_BYTE_ORDER_MARK = "\ufeff".encode()
_EXACT = np.float32(1 - 1e-6)  # rounding never lifts a sum over the number that it bounds
_FOLDED = np.frombuffer(bytes(range(256)).lower(), np.uint8)

Bytes = npt.NDArray[np.uint8]


class Keeps(Enum):
    """Which bytes of a text are sure to be part of a token.

    ALL: every byte. PRINTED: every byte but blanks, which some tokens swallow. MARKED: every byte but those
    of byte order marks. WORDS: of word pieces, where a word is one unknown token however long it is, the
    first byte of each ASCII word. KNOWN: of a unigram vocabulary, which folds characters and takes unknown
    ones together, ASCII letters and digits that have tokens of their own and stand between such. NOTHING: no
    byte, since characters without a token are dropped.
    """

    ALL = "all"
    PRINTED = "printed"
    MARKED = "marked"
    WORDS = "words"
    KNOWN = "known"
    NOTHING = "nothing"


class TokenFloor:
    """A lower bound of the number of tokens of texts. Immutable; safe to use from several threads.

    Args:
        spellings: the bytes that each token stands for.
        keeps: which bytes count.
        dropped: bytes that do not count beside: they can be lost.
        escapes_blanks: the vocabulary reads a blank as U+2581, in three bytes.
    """

    def __init__(
        self,
        spellings: Iterable[bytes],
        keeps: Keeps,
        *,
        dropped: Iterable[int] = (),
        escapes_blanks: bool = False,
    ) -> None:
        self._keeps = keeps
        self._escapes_blanks = escapes_blanks
        self._counts = np.ones(256, np.float32)
        if keeps in {Keeps.NOTHING, Keeps.WORDS}:
            return  # no pair is looked up
        texts = [self._escaped(text) for text in spellings]
        self._shares = _EXACT / _longest_by_pair(texts, folds=keeps is Keeps.KNOWN)
        if keeps is Keeps.PRINTED:
            self._counts[list(_BLANKS)] = 0
        elif keeps is Keeps.MARKED:
            self._counts[list(_BYTE_ORDER_MARK)] = 0
        elif keeps is Keeps.KNOWN:
            single = {text[0] for text in texts if len(text) == 1}
            self._counts[:] = 0
            self._counts[[byte for byte in _ALPHANUMERIC if {byte, int(_FOLDED[byte])} <= single]] = 1
        self._counts[list(dropped)] = 0

    def __repr__(self) -> str:
        return f"<TokenFloor of {self._keeps.value}>"

    def least(self, text: str, enough: int) -> int:
        """Tokens that `text` has at the least; counting ends where there are more than `enough`.

        The text is looked at block by block and never copied as a whole.
        """
        if self._keeps is Keeps.NOTHING:
            return 0
        found = 0.0
        for begin in range(0, len(text), _BLOCK_CHARS):
            block = text[begin : begin + _BLOCK_CHARS].encode(errors="replace")
            found += self._in_block(np.frombuffer(self._escaped(block), np.uint8))
            if found > enough + 1:
                break
        return int(found)

    def _escaped(self, text: bytes) -> bytes:
        return text.replace(b" ", _ESCAPED_BLANK.encode()) if self._escapes_blanks else text

    def _in_block(self, data: Bytes) -> float:
        """What a block counts, without its first and last byte: their neighbours are in other blocks."""
        if self._keeps is Keeps.WORDS:
            return float(np.count_nonzero(_IS_BLANK[data[:-1]] & _IS_ALPHANUMERIC[data[1:]]))
        folded = _FOLDED[data] if self._keeps is Keeps.KNOWN else data
        shares = self._shares[_pairs(folded)]
        counts = self._counts[data]
        inner = np.minimum(shares[:-1], shares[1:]) * counts[1:-1]
        if self._keeps is Keeps.KNOWN:
            inner *= counts[:-2] * counts[2:]
        return float(inner.sum(dtype=np.float64))


def _among(some: bytes) -> npt.NDArray[np.bool_]:
    found = np.zeros(256, bool)
    found[list(some)] = True
    return found


_IS_BLANK, _IS_ALPHANUMERIC = _among(_BLANKS), _among(_ALPHANUMERIC)


def _pairs(data: Bytes) -> npt.NDArray[np.uint16]:
    return data[:-1].astype(np.uint16) << np.uint16(8) | data[1:]


def _longest_by_pair(texts: Iterable[bytes], *, folds: bool) -> npt.NDArray[np.float32]:
    """Bytes of the longest text that holds two bytes side by side, by the pair; 1: none does."""
    longest = np.ones(2**16, np.float32)
    by_length: dict[int, list[bytes]] = {}
    for text in texts:
        by_length.setdefault(len(text), []).append(text)
    for length in sorted(length for length in by_length if length > 1):
        data = np.frombuffer(b"".join(by_length[length]), np.uint8).reshape(-1, length)
        data = _FOLDED[data] if folds else data
        longest[data[:, :-1].astype(np.uint16) << np.uint16(8) | data[:, 1:]] = length
    return longest
