"""Grammar rules as a tree, whatever notation they came in: characters, sequences, alternatives, repetitions.

Nodes compare by identity, so that two places that look alike can be treated differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]

MAX_CODEPOINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)  # no characters of any text


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character of some ranges of code points, ascending, ends included."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Concatenation:
    """All items in turn; none is the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """One of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """An item `low` to `high` times; None: without end."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """Another rule."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Lexeme:
    """Items in turn, without recursion, that are matched as one regex; a leaf of the tree."""

    items: tuple[Node, ...]


Node: TypeAlias = Chars | Concatenation | Alternatives | Repeat | Ref | Lexeme
Rules: TypeAlias = Mapping[str, Node]


def parts(node: Node) -> tuple[Node, ...]:
    """The nodes directly below."""
    match node:
        case Concatenation(items):
            return items
        case Alternatives(options):
            return options
        case Repeat(item):
            return (item,)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """A node and everything below it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(parts(node))


def references(node: Node) -> Iterator[str]:
    """Names of the rules that a tree refers to."""
    return (part.name for part in walk(node) if isinstance(part, Ref))


def rules_that(rules: Rules, *, are_chars: bool) -> frozenset[str]:
    """Names of the rules that are something: the least set, found in linear time.

    A sequence is it if all its items are, a choice if one of its options is, a repetition if its item is or
    may be left out, and a character if `are_chars`.
    """
    num_missing: dict[Node | str, int] = {}
    users: dict[Node | str, list[Node | str]] = {}
    found: list[Node | str] = []
    for name, root in rules.items():
        num_missing[name] = 1
        users.setdefault(root, []).append(name)
        waiting = [root]
        while waiting:
            node = waiting.pop()
            num_missing[node] = _num_wanted(node, are_chars=are_chars)
            if not num_missing[node]:
                found.append(node)
            for part in (node.name,) if isinstance(node, Ref) else parts(node):
                users.setdefault(part, []).append(node)
            waiting.extend(parts(node))
    names = set()
    while found:
        item = found.pop()
        if isinstance(item, str):
            names.add(item)
        for user in users.get(item, ()):
            num_missing[user] -= 1
            if num_missing[user] == 0:
                found.append(user)
    return frozenset(names)


def _num_wanted(node: Node, *, are_chars: bool) -> int:
    """How many of the nodes directly below have to be it before this one is."""
    match node:
        case Chars():
            return 0 if are_chars else 1
        case Concatenation(items):
            return len(items)
        case Repeat(low=0):
            return 0
        case _:
            return 1


def is_nullable(node: Node, nullable: AbstractSet[str]) -> bool:
    """Whether a tree matches the empty text, where the rules that do are known."""
    match node:
        case Chars():
            return False
        case Ref(name):
            return name in nullable
        case Concatenation(items) | Lexeme(items):
            return all(is_nullable(item, nullable) for item in items)
        case Alternatives(options):
            return any(is_nullable(option, nullable) for option in options)
        case Repeat(item, low, _):
            return low == 0 or is_nullable(item, nullable)


def one_char(char: str) -> Chars:
    """That character."""
    return Chars(((ord(char), ord(char)),))


def is_character(code: int) -> bool:
    """Whether a code point may stand in a text."""
    return code <= MAX_CODEPOINT and not _SURROGATES[0] <= code <= _SURROGATES[1]


def text(chars: str) -> Node:
    """These characters in turn."""
    items = tuple(map(one_char, chars))
    return items[0] if len(items) == 1 else Concatenation(items)


def char_class(ranges: list[tuple[int, int]], *, is_negated: bool) -> Chars:
    """A class of characters with its ranges put in order and joined; surrogates are left out."""
    if is_negated:
        ranges = list(_gaps([*joined(ranges), _SURROGATES]))
    kept: list[tuple[int, int]] = []
    for low, high in joined(ranges):
        if low < _SURROGATES[0]:
            kept.append((low, min(high, _SURROGATES[0] - 1)))
        if high > _SURROGATES[1]:
            kept.append((max(low, _SURROGATES[1] + 1), high))
    return Chars(tuple(kept))


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in ascending order; those that overlap or touch are one."""
    whole: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if whole and low <= whole[-1][1] + 1:
            whole[-1] = (whole[-1][0], max(high, whole[-1][1]))
        else:
            whole.append((low, high))
    return whole


def _gaps(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = 0
    for low, high in joined(ranges):
        if low > start:
            yield start, low - 1
        start = high + 1
    if start <= MAX_CODEPOINT:
        yield start, MAX_CODEPOINT
