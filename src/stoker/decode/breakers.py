"""Sequence breakers of the DRY penalty as token sequences.

A breaker is text; in tokens it is a head (a token that holds the breaker, or ends with its beginning) and
a tail (the tokens of the rest). Finding the heads reads the whole vocabulary, so results are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from stoker.backends.protocol import Vocabulary
from stoker.errors import InvalidRequestError

# llama.cpp's bounds: they keep the search for a breaker linear in the context.
_MAX_BREAKER_BYTES = 40
_MAX_TAIL_TOKENS = 20
_MAX_BREAKERS = 64
_MAX_KEPT = 256

Tail = tuple[int, ...]
Tails = dict[int, list[Tail]]
"""Head token to the tails that complete a breaker; an empty tail means that the head is one alone."""


class BreakerTable:
    """Breakers of one vocabulary, found once; safe to use from worker threads.

    Args:
        num_vocab: tokens in the vocabulary.
    """

    def __init__(self, num_vocab: int) -> None:
        self._num_vocab = num_vocab
        self._lock = Lock()
        self._pieces: list[bytes] = []
        self._kept: OrderedDict[str, Tails] = OrderedDict()

    def __repr__(self) -> str:
        return f"BreakerTable(num_vocab={self._num_vocab}, kept={len(self._kept)})"

    def tails(self, vocabulary: Vocabulary, breakers: Sequence[str]) -> Tails:
        """Heads and tails of all `breakers`; empty strings are skipped.

        Raises:
            InvalidRequestError: more breakers than are taken.
        """
        if len(breakers) > _MAX_BREAKERS:
            raise InvalidRequestError(
                f"dry_sequence_breakers has {len(breakers)} strings, at most {_MAX_BREAKERS} are taken",
                param="dry_sequence_breakers",
            )
        merged: Tails = {}
        with self._lock:
            for breaker in filter(None, breakers):
                for head, tails in self._find(vocabulary, breaker).items():
                    known = merged.setdefault(head, [])
                    known.extend(tail for tail in tails if tail not in known)
        return merged

    def _find(self, vocabulary: Vocabulary, breaker: str) -> Tails:
        if breaker in self._kept:
            self._kept.move_to_end(breaker)
            return self._kept[breaker]
        if not self._pieces:
            self._pieces = [vocabulary.special_piece(token) for token in range(self._num_vocab)]
        tails = self._scan(vocabulary, _clip(breaker))
        self._kept[breaker] = tails
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return tails

    def _scan(self, vocabulary: Vocabulary, breaker: str) -> Tails:
        whole = breaker.encode()
        tails: Tails = {head: [()] for head, piece in enumerate(self._pieces) if whole in piece}
        for cut in range(1, len(breaker)):
            begin = breaker[:cut].encode()
            heads = [
                head
                for head, piece in enumerate(self._pieces)
                if piece.endswith(begin) and whole not in piece
            ]
            if heads:
                _add(tails, heads, vocabulary.tokenize(breaker[cut:], add_special=False, parse_special=False))
        # A character whose bytes lie in several tokens has no head above: its own tokens are the breaker.
        tokens = vocabulary.tokenize(breaker, add_special=False, parse_special=False)
        if not breaker.isascii() and tokens:
            _add(tails, tokens[:1], tokens[1:])
        return tails


def _clip(breaker: str) -> str:
    return breaker.encode()[:_MAX_BREAKER_BYTES].decode(errors="ignore")


def _add(tails: Tails, heads: Sequence[int], rest: Sequence[int]) -> None:
    tail = tuple(rest[:_MAX_TAIL_TOKENS])
    for head in heads:
        known = tails.setdefault(head, [])
        if tail not in known:
            known.append(tail)
