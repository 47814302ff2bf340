"""JSON read one character at a time: whether what came so far can still become a value.

Owns the grammar of RFC 8259, with one leniency: raw control characters inside strings pass, as models write
line breaks there. The caller decides what the value means.
"""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 64
MAX_NUMBER_CHARS = 512
WHITE = " \t\r\n"

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_START = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_NUMBER_CHARS = frozenset("0123456789+-.eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_HEX_DIGITS = 4
_CLOSERS = {"{": "}", "[": "]"}


class Step(Enum):
    """What a character meant."""

    MORE = auto()
    LAST = auto()  # the value ends with it
    PAST = auto()  # the value, a number, had ended before it
    WRONG = auto()


class _Expected(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPED = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()


class JsonScanner:
    """Follows one JSON value; it begins with its first character, no white space before it."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._want = _Expected.VALUE
        self._is_key = False
        self._word = ""  # a literal's characters to come, or a number so far
        self._num_hex = 0

    def __repr__(self) -> str:
        return f"JsonScanner(depth={len(self._open)}, wants {self._want.name.lower()})"

    @property
    def is_in_string(self) -> bool:
        """Whether the next character is one of a string's."""
        return self._want is _Expected.STRING

    def push(self, char: str) -> Step:
        """Take one character. Nothing may follow LAST, PAST or WRONG."""
        match self._want:
            case _Expected.STRING:
                return self._in_string(char)
            case _Expected.ESCAPED | _Expected.HEX:
                return self._in_escape(char)
            case _Expected.LITERAL:
                return self._in_literal(char)
            case _Expected.NUMBER:
                return self._in_number(char)
        return Step.MORE if char in WHITE and self._open else self._structure(char)

    def _structure(self, char: str) -> Step:
        match self._want:
            case _Expected.VALUE | _Expected.VALUE_OR_END:
                is_end = char == "]" and self._want is _Expected.VALUE_OR_END
                return self._close() if is_end else self._begin(char)
            case _Expected.COLON:
                self._want = _Expected.VALUE
                return Step.MORE if char == ":" else Step.WRONG
            case _Expected.COMMA_OR_END if char == ",":
                self._want = _Expected.KEY if self._open[-1] == "{" else _Expected.VALUE
                return Step.MORE
            case _Expected.COMMA_OR_END:
                return self._close() if char == _CLOSERS[self._open[-1]] else Step.WRONG
        return self._begin_key(char)

    def _begin_key(self, char: str) -> Step:
        if char == '"':
            self._want, self._is_key = _Expected.STRING, True
            return Step.MORE
        return self._close() if char == "}" and self._want is _Expected.KEY_OR_END else Step.WRONG

    def _begin(self, char: str) -> Step:
        if char in _CLOSERS:
            self._open.append(char)
            self._want = _Expected.KEY_OR_END if char == "{" else _Expected.VALUE_OR_END
            return Step.MORE if len(self._open) <= MAX_DEPTH else Step.WRONG
        if char == '"':
            self._want, self._is_key = _Expected.STRING, False
        elif char in _LITERALS:
            self._want, self._word = _Expected.LITERAL, _LITERALS[char][1:]
        elif char == "-" or (char.isascii() and char.isdigit()):
            self._want, self._word = _Expected.NUMBER, char
        else:
            return Step.WRONG
        return Step.MORE

    def _in_string(self, char: str) -> Step:
        if char == "\\":
            self._want = _Expected.ESCAPED
        elif char == '"':
            if not self._is_key:
                return self._end_value()
            self._want = _Expected.COLON
        return Step.MORE

    def _in_escape(self, char: str) -> Step:
        if self._want is _Expected.HEX:
            self._num_hex += 1
            if self._num_hex == _HEX_DIGITS:
                self._want = _Expected.STRING
            return Step.MORE if char in _HEX else Step.WRONG
        if char == "u":
            self._want, self._num_hex = _Expected.HEX, 0
            return Step.MORE
        self._want = _Expected.STRING
        return Step.MORE if char in '"\\/bfnrt' else Step.WRONG

    def _in_literal(self, char: str) -> Step:
        if char != self._word[0]:
            return Step.WRONG
        self._word = self._word[1:]
        return Step.MORE if self._word else self._end_value()

    def _in_number(self, char: str) -> Step:
        if char in _NUMBER_CHARS:
            self._word += char
            fits = len(self._word) <= MAX_NUMBER_CHARS and _NUMBER_START.fullmatch(self._word)
            return Step.MORE if fits else Step.WRONG
        if not _NUMBER.fullmatch(self._word):
            return Step.WRONG
        return Step.PAST if self._end_value() is Step.LAST else self.push(char)

    def _close(self) -> Step:
        self._open.pop()
        return self._end_value()

    def _end_value(self) -> Step:
        self._want = _Expected.COMMA_OR_END
        return Step.MORE if self._open else Step.LAST
