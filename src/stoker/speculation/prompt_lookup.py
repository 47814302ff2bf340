"""Guesses what comes next from what was there before: the continuation of the longest earlier repeat.

Owns an index over the tokens of one sequence, which stay the sequence's. `DraftLength` says whether a guess
is worth its step; a token is drawn as ever, a guess only says what is computed beside it.
"""

from __future__ import annotations

from typing import NamedTuple

GRAM = 3
"""Tokens that have to repeat before anything is guessed."""
MAX_MATCH = 32
"""Tokens looked back over; a longer repeat is no surer."""
MAX_PLACES = 16
"""Earlier places of the last tokens that are compared, the latest first."""
GROWTH = 4096
"""Tokens indexed at a time, about 3 ms: a long prompt must not delay a step."""


class LookupMatch(NamedTuple):
    """An earlier repeat of a sequence's last tokens.

    Attributes:
        place: where the token after the repeat is.
        length: how many last tokens repeat, GRAM to MAX_MATCH, or as far as it was followed.
    """

    place: int
    length: int


class SuffixIndex:
    """Where each GRAM of one list of tokens was before. The list is given each time and only gets longer.

    Costs about a microsecond a token to grow, and some ten to match; about 150 bytes a token.
    """

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        self._before = [0] * GRAM  # of each place the one before it with the same GRAM; 0: there is none
        self._match: tuple[int, LookupMatch] | None = None

    def __repr__(self) -> str:
        return f"<SuffixIndex of {len(self._before)} tokens>"

    def match(self, tokens: list[int]) -> LookupMatch | None:
        """The longest repeat of the last tokens; None: there is none, or the index has not grown that far."""
        self._grow(tokens)
        if len(self._before) < len(tokens):
            return None
        found = self._followed(tokens) or self._longest(tokens)
        self._match = None if found is None else (len(tokens), found)
        return found

    def _grow(self, tokens: list[int]) -> None:
        """Note every place but the end itself, of which nothing is known yet."""
        latest, before = self._latest, self._before
        for place in range(len(before), min(len(tokens), len(before) + GROWTH)):
            key = _key(tokens, place)
            before.append(latest.get(key, 0))
            latest[key] = place

    def _followed(self, tokens: list[int]) -> LookupMatch | None:
        """The match of before, if all that came since continues it: no other can be longer then."""
        if self._match is None:
            return None
        seen, match = self._match
        count = len(tokens) - seen
        if tokens[match.place : match.place + count] != tokens[seen:]:
            return None
        return LookupMatch(match.place + count, match.length + count)

    def _longest(self, tokens: list[int]) -> LookupMatch | None:
        if len(tokens) < GRAM:
            return None
        best: LookupMatch | None = None
        place = self._latest.get(_key(tokens, len(tokens)), 0)
        for _ in range(MAX_PLACES):
            if not place:
                break
            length = _common(tokens, place)
            if length >= GRAM and (best is None or length > best.length):
                best = LookupMatch(place, length)
            place = self._before[place]
        return best


def continuation(tokens: list[int], match: LookupMatch, count: int) -> list[int]:
    """`count` tokens from the match on; one that reaches the end repeats what it guesses itself."""
    place, period = match.place, len(tokens) - match.place
    known = tokens[place : place + count]
    while len(known) < count:
        known += known[len(known) - period :][: count - len(known)]
    return known


def _common(tokens: list[int], place: int) -> int:
    most, length = min(MAX_MATCH, place), 0
    while length < most and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def _key(tokens: list[int], end: int) -> int:
    """Of the GRAM before `end`; two GRAMs may have the same one."""
    return (tokens[end - 3] << 42) ^ (tokens[end - 2] << 21) ^ tokens[end - 1]
