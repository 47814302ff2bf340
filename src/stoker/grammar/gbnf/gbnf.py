"""Reads llama.cpp's GBNF and plain BNF into rules; errors name line and column.

Both end a rule where the next one begins (`name ::=`), so line breaks mean nothing. In BNF names stand in
angle brackets, and what is neither a name nor quoted stands for itself: `<digit> ::= 0 | 1`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from stoker.errors import InvalidRequestError
from stoker.grammar.gbnf.notation import (
    MAX_CODEPOINT,
    Alternatives,
    Concatenation,
    Node,
    Ref,
    Repeat,
    Rules,
    char_class,
    is_character,
    references,
    text,
)

MAX_RULES = 500  # each refers to the next at worst, and the grammar engine recurses
MAX_TIMES = 10_000

_GBNF = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\n]*)
      | (?P<rule>[A-Za-z0-9_-]+[ \t]*::=)
      | (?P<name>[A-Za-z0-9_-]+)
      | (?P<quoted>"(?:\\.|[^"\\\n])*")
      | (?P<chars>\[\^?(?:\\.|[^\]\\\n])*\])
      | (?P<times>\{[ \t]*+\d{0,99}+[ \t]*+,?[ \t]*+\d{0,99}+[ \t]*+\})
      | (?P<mark>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_BNF = re.compile(
    r"""(?P<blank>[ \t\r\n]+)
      | (?P<rule><[^<>\n]+>[ \t]*::=)
      | (?P<name><[^<>\n]+>)
      | (?P<quoted>"[^"\n]*"|'[^'\n]*')
      | (?P<mark>\|)
      | (?P<word>[^\s|<>"']+)""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\\\"\[\]^-]))|\\?(.)", re.DOTALL
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class _Symbol:
    kind: str
    text: str
    at: int


def parse_gbnf(source: str) -> tuple[Rules, str]:
    """The rules of a GBNF grammar and the name of its first, "root". Raises InvalidRequestError."""
    return _Reader(source, _GBNF, "GBNF").read("root")


def parse_bnf(source: str) -> tuple[Rules, str]:
    """The rules of a BNF grammar and the name of the first one. Raises InvalidRequestError."""
    return _Reader(source, _BNF, "BNF").read(None)


class _Reader:
    """Recursive descent over the symbols of one grammar; `Constraint` bounds the nesting of its brackets."""

    def __init__(self, source: str, pattern: re.Pattern[str], notation: str) -> None:
        self._source = source
        self._notation = notation
        self._symbols = list(self._split(pattern))
        self._index = 0
        self._uses: dict[str, int] = {}

    def read(self, root: str | None) -> tuple[Rules, str]:
        rules: dict[str, Node] = {}
        while (head := self._symbol()).kind != "end":
            if head.kind != "rule":
                self._refuse(f"expected a rule, got {head.text!r}", head.at)
            self._index += 1
            name = head.text.removesuffix("::=").strip()
            if name in rules:
                self._refuse(f"the rule {name} is there twice", head.at)
            if len(rules) == MAX_RULES:
                self._refuse(f"over {MAX_RULES} rules", head.at)
            rules[name] = self._options()
            if self._symbol().text == ")":
                self._refuse("a bracket is closed that is not open", self._symbol().at)
        root = next(iter(rules), "") if root is None else root
        if root not in rules:
            self._refuse(f"there is no rule {root or 'at all'}", 0)
        for node in rules.values():
            for name in references(node):
                if name not in rules:
                    self._refuse(f"there is no rule {name}", self._uses[name])
        return rules, root

    def _split(self, pattern: re.Pattern[str]) -> list[_Symbol]:
        symbols, at = [], 0
        while at < len(self._source):
            match = pattern.match(self._source, at)
            if match is None:
                self._refuse(f"cannot read {self._source[at : at + 20]!r}", at)
            kind = match.lastgroup or ""
            if kind != "blank":
                symbols.append(_Symbol(kind, match[0], at))
            at = match.end()
        symbols.append(_Symbol("end", "the end", len(self._source)))
        return symbols

    def _symbol(self) -> _Symbol:
        return self._symbols[self._index]

    def _options(self) -> Node:
        options = [self._sequence()]
        while self._symbol().text == "|" and self._symbol().kind == "mark":
            self._index += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alternatives(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while True:
            symbol = self._symbol()
            if symbol.kind in {"rule", "end"} or (symbol.kind == "mark" and symbol.text in "|)"):
                break
            self._index += 1
            if symbol.kind == "times" or (symbol.kind == "mark" and symbol.text in "*+?"):
                if not items:
                    self._refuse(f"{symbol.text!r} follows nothing", symbol.at)
                items[-1] = self._repeated(items[-1], symbol)
            else:
                items.append(self._item(symbol))
        return items[0] if len(items) == 1 else Concatenation(tuple(items))

    def _item(self, symbol: _Symbol) -> Node:
        match symbol.kind, symbol.text:
            case "name", name:
                self._uses.setdefault(name, symbol.at)
                return Ref(name)
            case "quoted", quoted:
                inside = quoted[1:-1]
                return text(inside if self._notation == "BNF" else self._plain(inside, symbol.at + 1))
            case "word", word:
                return text(word)
            case "chars", chars:
                return self._class(chars, symbol.at)
            case _, ".":
                return char_class([(0, MAX_CODEPOINT)], is_negated=False)
        inside_group = self._options()
        if self._symbol().text != ")":
            self._refuse("a bracket is not closed", symbol.at)
        self._index += 1
        return inside_group

    def _repeated(self, item: Node, symbol: _Symbol) -> Node:
        match symbol.text:
            case "*":
                return Repeat(item, 0, None)
            case "+":
                return Repeat(item, 1, None)
            case "?":
                return Repeat(item, 0, 1)
        first, comma, second = symbol.text.strip("{}").partition(",")
        low = int(first.strip() or 0)
        high = int(second) if second.strip() else (None if comma else low)
        if (
            max(low, high or 0) > MAX_TIMES
            or (high is not None and high < low)
            or not (first + second).strip()
        ):
            self._refuse(f"cannot repeat {symbol.text} times, at most {MAX_TIMES} are taken", symbol.at)
        return Repeat(item, low, high)

    def _class(self, chars: str, at: int) -> Node:
        is_negated = chars.startswith("[^")
        inside, start = chars[1 + is_negated : -1], at + 1 + is_negated
        ranges: list[tuple[int, int]] = []
        matches = list(_ESCAPE.finditer(inside))
        index = 0
        while index < len(matches):
            low = high = ord(self._char(matches[index], start))
            is_range = index + 2 < len(matches) and matches[index + 1][0] == "-"
            if is_range:
                high = ord(self._char(matches[index + 2], start))
            if high < low:
                self._refuse("a range of characters runs backwards", start + matches[index].start())
            ranges.append((low, high))
            index += 3 if is_range else 1
        node = char_class(ranges, is_negated=is_negated)
        if not node.ranges:
            self._refuse("a class without a character", at)
        return node

    def _plain(self, escaped: str, at: int) -> str:
        return "".join(self._char(match, at) for match in _ESCAPE.finditer(escaped))

    def _char(self, match: re.Match[str], at: int) -> str:
        digits = match[1] or match[2] or match[3]
        if digits:
            code = int(digits, 16)
            if not is_character(code):
                self._refuse(f"{match[0]} is no character", at + match.start())
            return chr(code)
        if match[4]:
            return _LETTERS.get(match[4], match[4])
        if match[0].startswith("\\"):
            self._refuse(f"unknown escape {match[0]}", at + match.start())
        return match[0]

    def _refuse(self, reason: str, at: int) -> NoReturn:
        line = self._source.count("\n", 0, at) + 1
        column = at - self._source.rfind("\n", 0, at)
        raise InvalidRequestError(
            f"{self._notation}: {reason} (line {line}, column {column})",
            param="grammar",
            line=line,
            column=column,
        )
