"""Guesses what comes next from what was there before: the continuation of the longest earlier repeat.

Owns the index over one sequence's tokens. `DraftLength` says whether a guess is worth its step;
a token is drawn as ever, a guess only says what is computed beside it.
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
    """Where each GRAM of `tokens` was before. Grows with the list, which only ever gets longer.

    Costs about a microsecond a token to grow, and some ten to match; about 150 bytes a token.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._latest: dict[int, int] = {}
        self._before = [0] * GRAM  # of each place the one before it with the same GRAM; 0: there is none
        self._match: tuple[int, LookupMatch] | None = None

    def __repr__(self) -> str:
        return f"<SuffixIndex of {len(self._before)} of {len(self.tokens)} tokens>"

    def match(self) -> LookupMatch | None:
        """The longest repeat of the last tokens; None: there is none, or the index has not grown that far."""
        num_tokens = len(self.tokens)
        self._grow(num_tokens)
        if len(self._before) < num_tokens:
            return None
        found = self._followed(num_tokens) or self._longest(num_tokens)
        self._match = None if found is None else (num_tokens, found)
        return found

    def continuation(self, match: LookupMatch, count: int) -> list[int]:
        """`count` tokens from the match on; one that reaches the end repeats what it guesses itself."""
        place, period = match.place, len(self.tokens) - match.place
        known = self.tokens[place : place + count]
        while len(known) < count:
            known += known[len(known) - period :][: count - len(known)]
        return known

    def _grow(self, num_tokens: int) -> None:
        """Note every place but the end itself, of which nothing is known yet."""
        tokens, latest, before = self.tokens, self._latest, self._before
        for place in range(len(before), min(num_tokens, len(before) + GROWTH)):
            key = _key(tokens, place)
            before.append(latest.get(key, 0))
            latest[key] = place

    def _followed(self, num_tokens: int) -> LookupMatch | None:
        """The match of before, if all that came since continues it: no other can be longer then."""
        if self._match is None:
            return None
        seen, match = self._match
        count = num_tokens - seen
        if self.tokens[match.place : match.place + count] != self.tokens[seen:]:
            return None
        return LookupMatch(match.place + count, match.length + count)

    def _longest(self, num_tokens: int) -> LookupMatch | None:
        if num_tokens < GRAM:
            return None
        best: LookupMatch | None = None
        place = self._latest.get(_key(self.tokens, num_tokens), 0)
        for _ in range(MAX_PLACES):
            if not place:
                break
            length = self._common(place, num_tokens)
            if length >= GRAM and (best is None or length > best.length):
                best = LookupMatch(place, length)
            place = self._before[place]
        return best

    def _common(self, place: int, end: int) -> int:
        tokens, most = self.tokens, min(MAX_MATCH, place)
        length = 0
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


def _key(tokens: list[int], end: int) -> int:
    """Of the GRAM before `end`; two GRAMs may have the same one."""
    return (tokens[end - 3] << 42) ^ (tokens[end - 2] << 21) ^ tokens[end - 1]
