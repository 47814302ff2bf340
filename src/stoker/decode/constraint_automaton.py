"""A regex as positions and what may follow each (Glushkov), to see whether a longest match could go wrong.

Counted repetitions are taken as endless, which allows more: a clash may be reported that is none, never the
other way round.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from stoker.decode.constraint_notation import Chars, Choice, Node, Ranges, Ref, Repeat, Rules, Sequence

MAX_POSITIONS = 2000
_MAX_NODES = 20_000


class Overlong(Exception):  # noqa: N818 - it says what the regex is
    """A regex of too many positions to look at."""


class Automaton:
    """The positions of some nodes in turn.

    Args:
        items: without recursion.
        rules: what their references name.

    Attributes:
        ranges: the characters of each position.
        first: positions that may come first.
        last: positions a match may end with.
        follow: positions that may come after each.
        is_nullable: whether it matches the empty text.

    Raises:
        Overlong: over `MAX_POSITIONS`, or as many nodes as would take long.
    """

    def __init__(self, items: tuple[Node, ...], rules: Rules) -> None:
        self.ranges: list[Ranges] = []
        self.follow: list[set[int]] = []
        self._rules = rules
        self._num_nodes = 0
        first, last, self.is_nullable = self._sequence(items)
        self.first, self.last = frozenset(first), frozenset(last)

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
        return first, last, is_nullable

    def _build(self, node: Node) -> tuple[set[int], set[int], bool]:
        self._num_nodes += 1
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
            case Sequence(items):
                return self._sequence(items)
            case Choice(options):
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
        for position in last:
            self.follow[position] |= first


class Meeting(NamedTuple):
    """What two regexes that are possible at one place have in common.

    Attributes:
        has_clash: a match of the one could go on as one of the other where something else should begin.
        has_match: some text matches both.
        num_steps: pairs of positions it took to see.
    """

    has_clash: bool
    has_match: bool
    num_steps: int


def first_chars(parts: Iterable[Automaton]) -> frozenset[Ranges]:
    """The characters that a match of one of these may begin with."""
    return frozenset(part.ranges[position] for part in parts for position in part.first)


def meet(short: Automaton, long: Automaton, next_chars: AbstractSet[Ranges], max_steps: int) -> Meeting:
    """Compare `short`, behind which `next_chars` stand, with `long`; past `max_steps` the answers are yes."""
    waiting = [(p, q) for p in short.first for q in long.first]
    seen = set(waiting)
    has_clash, has_match, num_steps = False, short.is_nullable and long.is_nullable, 0
    while waiting:
        p, q = waiting.pop()
        num_steps += 1
        if num_steps > max_steps:
            return Meeting(has_clash=True, has_match=True, num_steps=num_steps)
        if not _overlap(short.ranges[p], long.ranges[q]):
            continue
        if p in short.last:
            has_match = has_match or q in long.last
            has_clash = has_clash or any(
                _overlap(long.ranges[r], chars) for r in long.follow[q] for chars in next_chars
            )
        fresh = {(r, s) for r in short.follow[p] for s in long.follow[q]} - seen
        seen |= fresh
        waiting.extend(fresh)
    return Meeting(has_clash, has_match, num_steps)


def _overlap(one: Ranges, other: Ranges) -> bool:
    return any(low <= top and bottom <= high for low, high in one for bottom, top in other)
