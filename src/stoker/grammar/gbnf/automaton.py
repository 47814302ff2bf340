"""A regex as positions and what may follow each (Glushkov), to see whether a longest match could go wrong.

Counted repetitions are taken as endless, which allows more: a clash may be reported that is none, never the
other way round. All work is counted: a hostile regex of some bytes has millions of pairs of positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from stoker.grammar.gbnf.notation import (
    Alternatives,
    Chars,
    Concatenation,
    Lexeme,
    Node,
    Ranges,
    Ref,
    Repeat,
    Rules,
    joined,
)
from stoker.grammar.limits import Effort

MAX_POSITIONS = 2000
_MAX_NODES = 20_000
_STEPS_A_NODE = 4
_STEPS_A_PAIR = 4
_STEPS_A_MEETING = 8
_LINKS_A_STEP = 8  # so many members of sets are joined in the time of a step
_RANGES_A_STEP = 4


class Overlong(Exception):  # noqa: N818 - it says what the regex is
    """A regex of too many positions to look at."""


class Automaton:
    """The positions of some nodes in turn.

    Args:
        items: without recursion.
        rules: what their references name.
        effort: what this work, and looking at the result, is counted on.

    Attributes:
        ranges: the characters of each position.
        first: positions that may come first.
        last: positions a match may end with.
        follow: positions that may come after each.
        is_nullable: whether it matches the empty text.
        first_ranges: characters that a match may begin with.

    Raises:
        Overlong: over `MAX_POSITIONS`, or as many nodes as would take long.
        Exhausted: the effort is spent.
    """

    def __init__(self, items: tuple[Node, ...], rules: Rules, effort: Effort) -> None:
        self.ranges: list[Ranges] = []
        self.follow: list[set[int]] = []
        self._rules = rules
        self._effort = effort
        self._num_nodes = 0
        self._following: dict[int, Ranges] = {}
        first, last, self.is_nullable = self._sequence(items)
        self.first, self.last = frozenset(first), frozenset(last)
        self.first_ranges = union((self.ranges[position] for position in first), effort)

    def following(self, position: int) -> Ranges:
        """The characters that may come after a position."""
        found = self._following.get(position)
        if found is None:
            behind = (self.ranges[other] for other in self.follow[position])
            found = self._following[position] = union(behind, self._effort)
        return found

    def _sequence(self, items: Iterable[Node]) -> tuple[set[int], set[int], bool]:
        first: set[int] = set()
        last: set[int] = set()
        is_nullable = True
        for item in items:
            item_first, item_last, item_nullable = self._build(item)
            self._link(last, item_first)
            if is_nullable:
                first |= item_first
            last = last | item_last if item_nullable else item_last
            is_nullable = is_nullable and item_nullable
            self._effort.spend((len(first) + len(last)) // _LINKS_A_STEP)
        return first, last, is_nullable

    def _build(self, node: Node) -> tuple[set[int], set[int], bool]:
        self._num_nodes += 1
        self._effort.spend(_STEPS_A_NODE)
        if self._num_nodes > _MAX_NODES or len(self.ranges) > MAX_POSITIONS:
            raise Overlong
        match node:
            case Chars(ranges):
                self.ranges.append(ranges)
                self.follow.append(set())
                position = len(self.ranges) - 1
                return {position}, {position}, False
            case Ref(name):
                return self._build(self._rules[name])
            case Concatenation(items) | Lexeme(items):
                return self._sequence(items)
            case Alternatives(options):
                built = [self._build(option) for option in options]
                return (
                    {position for part in built for position in part[0]},
                    {position for part in built for position in part[1]},
                    any(part[2] for part in built),
                )
            case Repeat(item, low, high):
                first, last, is_nullable = self._build(item)
                if high != 1:
                    self._link(last, first)
                return first, last, is_nullable or low == 0

    def _link(self, last: set[int], first: set[int]) -> None:
        self._effort.spend(len(last) * len(first) // _LINKS_A_STEP)
        for position in last:
            self.follow[position] |= first


class Meeting(NamedTuple):
    """What two regexes that are possible at one place have in common.

    Attributes:
        has_clash: a match of the one could go on as one of the other where something else should begin.
        has_match: some text matches both.
    """

    has_clash: bool
    has_match: bool


def meet(short: Automaton, long: Automaton, next_chars: Ranges, effort: Effort) -> Meeting:
    """Compare `short`, behind which `next_chars` stand, with `long`. Raises Exhausted."""
    effort.spend(_STEPS_A_MEETING + len(short.first) * len(long.first) // _LINKS_A_STEP)
    waiting = list(itertools.product(short.first, long.first))
    seen = set(waiting)
    has_clash, has_match = False, short.is_nullable and long.is_nullable
    while waiting and not (has_clash and has_match):
        p, q = waiting.pop()
        if not _overlap(short.ranges[p], long.ranges[q], effort):
            continue
        if p in short.last:
            has_match = has_match or q in long.last
            has_clash = has_clash or _overlap(long.following(q), next_chars, effort)
        effort.spend(len(short.follow[p]) * len(long.follow[q]) // _LINKS_A_STEP)
        fresh = set(itertools.product(short.follow[p], long.follow[q])) - seen
        seen |= fresh
        waiting.extend(fresh)
    return Meeting(has_clash, has_match)


def union(parts: Iterable[Ranges], effort: Effort) -> Ranges:
    """The characters of any of these. Raises Exhausted."""
    ranges = list(itertools.chain.from_iterable(parts))
    effort.spend(1 + len(ranges) // _RANGES_A_STEP)
    return tuple(joined(ranges))


def _overlap(one: Ranges, other: Ranges, effort: Effort) -> bool:
    """Whether two have a character in common; both ascend."""
    effort.spend(_STEPS_A_PAIR + (len(one) + len(other)) // _RANGES_A_STEP)
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][0] <= other[j][1] and other[j][0] <= one[i][1]:
            return True
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return False
