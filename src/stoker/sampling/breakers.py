"""Sequence breakers of the DRY penalty as token sequences.

A breaker is text; in tokens it is a head (a token that holds the breaker, or ends with its beginning) and
a tail (the tokens of the rest). Heads are looked up in an index of the vocabulary: to read all of it for each
part of each breaker took half a minute for one request. Results are kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from threading import Lock

from stoker.backends.protocol.backend import Vocabulary
from stoker.errors import InvalidRequestError

# llama.cpp's bounds: they keep the search for a breaker linear in the context.
_MAX_BREAKER_BYTES = 40
_MAX_TAIL_TOKENS = 20
_MAX_BREAKERS = 64
_MAX_KEPT = 256

Tail = tuple[int, ...]
Tails = dict[int, list[Tail]]
"""Head token to the tails that complete a breaker; an empty tail means that the head is one alone."""


class _Pieces:
    """The bytes of all tokens, to be searched for what they hold and what they end with.

    Args:
        pieces: by token.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._longest = max(map(len, pieces), default=0)
        self._backwards = sorted((piece[::-1], token) for token, piece in enumerate(pieces))
        self._joined = b"".join(pieces)
        self._ends = list(accumulate(map(len, pieces)))

    def holding(self, part: bytes) -> set[int]:
        """Tokens with `part` in them."""
        found, at = set(), self._joined.find(part)
        while at >= 0:
            token = bisect_right(self._ends, at)
            if at + len(part) <= self._ends[token]:
                found.add(token)
                at = self._ends[token] - 1  # once a token is enough
            at = self._joined.find(part, at + 1)
        return found

    def ending_with(self, part: bytes) -> list[int]:
        """Tokens with `part` at their end, ascending."""
        low = bisect_left(self._backwards, (part[::-1], 0))
        high = bisect_right(self._backwards, (part[::-1] + b"\xff" * self._longest, len(self._ends)))
        return sorted(token for _, token in self._backwards[low:high])


class BreakerTable:
    """Breakers of one vocabulary, found once; safe to use from worker threads.

    Args:
        num_vocab: tokens in the vocabulary.
    """

    def __init__(self, num_vocab: int) -> None:
        self._num_vocab = num_vocab
        self._lock = Lock()
        self._pieces: _Pieces | None = None
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
        merged: dict[int, dict[Tail, None]] = {}
        with self._lock:
            for breaker in dict.fromkeys(map(_clip, filter(None, breakers))):
                for head, tails in self._find(vocabulary, breaker).items():
                    merged.setdefault(head, {}).update(dict.fromkeys(tails))
        return {head: list(tails) for head, tails in merged.items()}

    def _find(self, vocabulary: Vocabulary, breaker: str) -> Tails:
        if breaker in self._kept:
            self._kept.move_to_end(breaker)
            return self._kept[breaker]
        if self._pieces is None:
            self._pieces = _Pieces([vocabulary.special_piece(token) for token in range(self._num_vocab)])
        tails = _scan(vocabulary, breaker, self._pieces)
        self._kept[breaker] = tails
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return tails


def _scan(vocabulary: Vocabulary, breaker: str, pieces: _Pieces) -> Tails:
    holding = pieces.holding(breaker.encode())
    tails: Tails = {head: [()] for head in sorted(holding)}
    for cut in range(1, len(breaker)):
        heads = [head for head in pieces.ending_with(breaker[:cut].encode()) if head not in holding]
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
