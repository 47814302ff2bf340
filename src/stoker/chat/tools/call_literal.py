"""Calls whose arguments are literals, as Python and Gemma write them, made JSON as they come (SPEC D12).

Owns `name(key=value, ...)` and `name{key:value, ...}`: texts in either quote, or between marks of the
format's own; True, False and None beside JSON's words; tuples, which are lists; a comma behind the last item.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, auto

from stoker.chat.json_scan import MAX_DEPTH, MAX_NUMBER_CHARS, WHITE, Step
from stoker.chat.tools.call_text import CALL_NAME, MAX_NAME_CHARS, CallText, escaped

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD_CHAR = re.compile(r"[\w.+$/-]")
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", '"': '\\"', "\\": "\\\\", "'": "'"}
_ESCAPES |= {"/": "/", "\n": ""}
_NUM_HEX = {"x": 2, "u": 4}
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


class _Due(Enum):
    """What comes next."""

    OPENER = auto()
    KEY = auto()
    ASSIGN = auto()
    VALUE = auto()
    COMMA = auto()
    TEXT = auto()
    ESCAPED = auto()
    WORD = auto()
    QUOTE = auto()


@dataclass(slots=True)
class _Bracket:
    """An open one; `assign` stands between a key and its value, and is empty in a list."""

    closer: str
    assign: str = ""
    has_items: bool = False


class LiteralText:
    """Turns one bracketed literal into JSON, a character at a time.

    Args:
        quote: what encloses a text beside the usual quotes; nothing is escaped between. Empty: nothing does.
        has_parameters: a round bracket that comes first holds `key=value`.
    """

    def __init__(self, quote: str = "", *, has_parameters: bool = False) -> None:
        self._quote = quote
        self._has_parameters = has_parameters
        self._open: list[_Bracket] = []
        self._due = _Due.OPENER
        self._held = ""  # a word, or the beginning of a quote or of an escape
        self._end = ""  # of the text that is being read
        self._is_key = False
        self._out: list[str] = []

    def __repr__(self) -> str:
        return f"LiteralText(depth={len(self._open)}, {self._due.name.lower()})"

    def take(self) -> str:
        """JSON that has come since this was asked last."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def push(self, char: str) -> Step:
        """Take one character; LAST with the last bracket."""
        match self._due:
            case _Due.TEXT:
                return self._in_text(char)
            case _Due.ESCAPED:
                return self._in_escape(char)
            case _Due.WORD:
                return self._in_word(char)
            case _Due.QUOTE:
                return self._in_quote(char)
            case _Due.OPENER:
                return self._begin_bracket(char) if char in _CLOSERS else Step.WRONG
        return Step.MORE if char in WHITE else self._structure(char)

    def _structure(self, char: str) -> Step:
        inner = self._open[-1]
        match self._due:
            case _Due.ASSIGN:
                self._due = _Due.VALUE
                self._out.append(": ")
                return Step.MORE if char == inner.assign else Step.WRONG
            case _Due.COMMA if char == ",":
                self._due = _Due.KEY if inner.assign else _Due.VALUE
                return Step.MORE
            case _Due.VALUE if inner.assign:
                return self._begin(char)
        if char == inner.closer:
            self._open.pop()
            self._out.append("}" if inner.assign else "]")
            return self._end_value()
        return Step.WRONG if self._due is _Due.COMMA else self._begin_item(char, inner)

    def _begin_item(self, char: str, inner: _Bracket) -> Step:
        """A key of an object or a value of a list."""
        if inner.has_items:
            self._out.append(", ")
        inner.has_items, self._is_key = True, bool(inner.assign)
        return self._begin(char)

    def _begin(self, char: str) -> Step:
        if char in _CLOSERS and not self._is_key:
            return self._begin_bracket(char)
        if self._quote and self._quote[0] == char:
            self._due, self._held = _Due.QUOTE, char
        elif char in "\"'":
            self._begin_text(char)
        elif _WORD_CHAR.match(char):
            self._due, self._held = _Due.WORD, char
        else:
            return Step.WRONG
        return Step.MORE

    def _begin_bracket(self, char: str) -> Step:
        assign = "=" if char == "(" and self._has_parameters and not self._open else ""
        assign = ":" if char == "{" else assign
        self._open.append(_Bracket(_CLOSERS[char], assign))
        self._out.append("{" if assign else "[")
        self._due = _Due.KEY if assign else _Due.VALUE
        return Step.MORE if len(self._open) <= MAX_DEPTH else Step.WRONG

    def _begin_text(self, end: str) -> None:
        self._due, self._end, self._held = _Due.TEXT, end, ""
        self._out.append('"')

    def _in_quote(self, char: str) -> Step:
        self._held += char
        if self._held == self._quote:
            self._begin_text(self._quote)
            return Step.MORE
        return Step.MORE if self._quote.startswith(self._held) else Step.WRONG

    def _in_text(self, char: str) -> Step:
        """A mark begins with a character that it has once, so no more than its beginning is held."""
        if char == "\\" and len(self._end) == 1:
            self._due, self._held = _Due.ESCAPED, ""
            return Step.MORE
        held = self._held + char
        if not self._end.startswith(held):
            self._say(self._held)
            held = char if self._end[0] == char else ""
            self._say("" if held else char)
        self._held = held
        if held != self._end:
            return Step.MORE
        self._out.append('"')
        return self._end_value()

    def _say(self, text: str) -> None:
        self._out += map(_in_json, text)

    def _in_escape(self, char: str) -> Step:
        self._held += char
        kind = self._held[0]
        if kind in _NUM_HEX:
            if len(self._held) > 1 and char not in _HEX:
                return Step.WRONG
            if len(self._held) <= _NUM_HEX[kind]:
                return Step.MORE
            self._out.append("\\u" + self._held[1:].rjust(_NUM_HEX["u"], "0"))
        else:
            self._out.append(_ESCAPES.get(char, "\\\\" + _in_json(char)))
        self._due, self._held = _Due.TEXT, ""
        return Step.MORE

    def _in_word(self, char: str) -> Step:
        if _WORD_CHAR.match(char):
            self._held += char
            return Step.MORE if len(self._held) <= MAX_NUMBER_CHARS else Step.WRONG
        word, self._held = self._held, ""
        if self._is_key:
            self._out.append(json.dumps(word, ensure_ascii=False))
        elif word in _WORDS:
            self._out.append(_WORDS[word])
        elif _NUMBER.fullmatch(word):
            self._out.append(word)
        else:
            return Step.WRONG
        self._end_value()
        return self.push(char)

    def _end_value(self) -> Step:
        self._due = _Due.ASSIGN if self._is_key else _Due.COMMA
        self._is_key = False
        self._held = ""
        return Step.MORE if self._open else Step.LAST


class LiteralCall(CallText):
    """`name(key=value)`, or `name{key:value}` where the format has quotes of its own.

    Args:
        names: the names that the call may have; None: any.
        quote: as of `LiteralText`.
    """

    def __init__(self, names: AbstractSet[str] | None = None, quote: str = "") -> None:
        super().__init__()
        self._names = names
        self._head = ""
        self._text = LiteralText(quote, has_parameters=True)

    def __repr__(self) -> str:
        return f"LiteralCall({self.name or self._head!r})"

    def take(self) -> str:
        """Return the JSON of the arguments read since the last call of this method."""
        return self._text.take()

    def push(self, char: str) -> Step:
        """Take one character."""
        if not self.name and not self._begins(char):
            return Step.WRONG
        if not self.name:
            return Step.MORE
        step = self._text.push(char)
        self._is_complete = step is Step.LAST
        return step

    def _begins(self, char: str) -> bool:
        """Take a character of the name, or find it ended; whether it can be one."""
        if char not in "({":
            self._head += char
            return len(self._head) <= MAX_NAME_CHARS and bool(CALL_NAME.fullmatch(char) or char in WHITE)
        name = self._head.strip()
        if not CALL_NAME.fullmatch(name) or not (self._names is None or name in self._names):
            return False
        self.name = name
        return True


def _in_json(char: str) -> str:
    return f"\\{char}" if char in '"\\' else escaped(char)
