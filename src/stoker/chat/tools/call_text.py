"""The text of one tool call, read one character at a time: its name, and its arguments as they come.

Owns the two forms whose arguments are JSON as written: an object with a name and arguments, and a name, a
marker and arguments. `call_tags` and `call_literal` own those whose arguments become JSON.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from typing import Never

from stoker.chat.json_scan import WHITE, JsonScanner, Step

MAX_NAME_CHARS = 256
NO_ARGUMENTS = "{}"

_ARGUMENTS = frozenset({"arguments", "parameters"})
_NAMES = frozenset({"name", "tool_name"})
_KEYS = _ARGUMENTS | _NAMES | {"type", "id", "tool_call_id"}
_FIRST_PRINTABLE = " "
CALL_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME_CHARS}}}")
_INDEX = re.compile(r":[0-9]+\Z")
_CALL_ID = "[CALL_ID]"
_MAX_HEAD_CHARS = MAX_NAME_CHARS + 128


class CallText(ABC):
    """Reads one call, a character at a time.

    Attributes:
        name: of the tool; empty until it is known.
    """

    def __init__(self) -> None:
        self.name = ""
        self._out: list[str] = []  # JSON of the arguments that nobody has taken yet
        self._is_complete = False

    @property
    def has_begun(self) -> bool:
        """Whether the name is known and arguments may follow."""
        return bool(self.name)

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are whole, even if what should follow them is missing."""
        return self._is_complete

    @abstractmethod
    def push(self, char: str) -> Step:
        """Read one character; nothing may follow LAST, PAST or WRONG."""

    def take(self) -> str:
        """Return the JSON of the arguments read since the last call of this method."""
        text = "".join(self._out)
        self._out.clear()
        return text


class _Awaited(Enum):
    OPEN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA_OR_END = auto()


_AFTER = {_Awaited.OPEN: ("{", _Awaited.KEY_OR_END), _Awaited.COLON: (":", _Awaited.VALUE)}


class CallObject(CallText):
    """`{"name": ..., "arguments": {...}}`, keys in any order; both known keys of the arguments are taken.

    Arguments written as a JSON string, as null or not at all are read as what they stand for.

    Args:
        names: the names a call may have; None: any. A call that is told from other JSON by nothing but its
            name and keys has to have one of these names and no keys but a call's.
    """

    def __init__(self, names: AbstractSet[str] | None = None) -> None:
        super().__init__()
        self._names = names
        self._want = _Awaited.OPEN
        self._scanner = JsonScanner()
        self._key = ""
        self._text: list[str] = []  # of the key or value being read
        self._streams = False  # its characters go out as they come
        self._arguments: str | None = None  # whole, or what waits for the name
        self._has_begun = False

    def __repr__(self) -> str:
        return f"CallObject({self.name!r}, wants {self._want.name.lower()})"

    @property
    def has_begun(self) -> bool:
        """Whether the name is known and arguments have come."""
        return self._has_begun

    @property
    def is_complete(self) -> bool:
        """Whether name and arguments are whole, even if the last brace is missing."""
        return self._has_begun and self._arguments is not None

    def push(self, char: str) -> Step:
        """Take one character. A complete call that goes on wrong ends before that character."""
        if self._want is _Awaited.IN_VALUE:
            return self._in_value(char)
        step = self._in_key(char) if self._want is _Awaited.IN_KEY else self._structure(char)
        return Step.PAST if step is Step.WRONG and self.is_complete else step

    def _structure(self, char: str) -> Step:
        want = self._want
        if char in WHITE and want is not _Awaited.OPEN:
            return Step.MORE
        match want:
            case _Awaited.OPEN | _Awaited.COLON:
                return self._move(*_AFTER[want], char)
            case _Awaited.VALUE:
                return self._begin_value(char)
            case _Awaited.COMMA_OR_END if char != "}":
                return self._move(",", _Awaited.KEY, char)
            case _Awaited.COMMA_OR_END | _Awaited.KEY_OR_END if char == "}":
                return self._close()
        self._begin_text(char)
        return self._move('"', _Awaited.IN_KEY, char)

    def _move(self, needed: str, want: _Awaited, char: str) -> Step:
        """Go on to `want`, if the character is the one that is needed."""
        self._want = want if char == needed else self._want
        return Step.MORE if char == needed else Step.WRONG

    def _begin_text(self, char: str) -> Step:
        self._scanner = JsonScanner()
        self._text = [char]
        return self._scanner.push(char)

    def _in_key(self, char: str) -> Step:
        step = self._scanner.push(char)
        self._text.append(char)
        if step is not Step.LAST:
            return step
        self._key = str(_loaded(self._text))
        if self._names is not None and self._key not in _KEYS:
            return Step.WRONG
        self._want = _Awaited.COLON
        return Step.MORE

    def _begin_value(self, char: str) -> Step:
        is_arguments = self._key in _ARGUMENTS
        if (is_arguments and self._arguments is not None) or (self._key in _NAMES and self.name):
            return Step.WRONG  # twice
        self._streams = is_arguments and char == "{" and bool(self.name)
        step = self._begin_text(char)
        if self._streams:
            self._has_begun = True
            self._out.append(char)
        self._want = _Awaited.IN_VALUE
        return step

    def _in_value(self, char: str) -> Step:
        spelled = escaped(char) if self._scanner.is_in_string else char
        step = self._scanner.push(char)
        if step in {Step.MORE, Step.LAST}:
            (self._out if self._streams else self._text).append(spelled)
        if step in {Step.MORE, Step.WRONG}:
            return step
        self._want = _Awaited.COMMA_OR_END
        if not self._end_value():
            return Step.WRONG
        return self.push(char) if step is Step.PAST else Step.MORE

    def _end_value(self) -> bool:
        """Take in the value of the key; whether a call may have it."""
        if self._streams:
            self._arguments = ""
        elif self._key in _NAMES:
            return self._take_name()
        elif self._key in _ARGUMENTS:
            arguments = _arguments_of("".join(self._text))
            if arguments is None:
                return False
            self._arguments = arguments
            if self.name:
                self._release()
        return True

    def _take_name(self) -> bool:
        name = _loaded(self._text)
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME_CHARS:
            return False
        if self._names is not None and name not in self._names:
            return False
        self.name = name
        if self._arguments is not None:
            self._release()
        return True

    def _release(self) -> None:
        self._has_begun = True
        self._out.append(self._arguments or NO_ARGUMENTS)

    def _close(self) -> Step:
        if not self.name:
            return Step.WRONG
        if self._arguments is None:
            self._arguments = NO_ARGUMENTS
            self._release()
        return Step.LAST


class MarkedCall(CallText):
    """`name[ARGS]{...}`, perhaps with `[CALL_ID]...` behind the name.

    Args:
        marker: the text between the name and the arguments.
        prefix: what may stand before the name and is not part of it; the name then may have an index behind
            it, as in `functions.look:0`.
    """

    def __init__(self, marker: str, prefix: str = "") -> None:
        super().__init__()
        self._marker = marker
        self._prefix = prefix
        self._allowed = frozenset(f"[]{WHITE}{marker}{prefix}")
        self._head = ""
        self._scanner: JsonScanner | None = None

    def __repr__(self) -> str:
        return f"MarkedCall({self.name or self._head!r})"

    @property
    def has_begun(self) -> bool:
        """Whether the name is known and arguments have come."""
        return self._scanner is not None

    def push(self, char: str) -> Step:
        """Take one character."""
        if self._scanner is None:
            return self._in_head(char)
        self._out.append(escaped(char) if self._scanner.is_in_string else char)
        step = self._scanner.push(char)
        if step is Step.WRONG:
            self._out.pop()
        self._is_complete = step is Step.LAST
        return step

    def _in_head(self, char: str) -> Step:
        if self.name:
            return self._open_arguments(char)
        self._head += char
        if self._head.endswith(self._marker):
            self.name = self._named(self._head.removesuffix(self._marker).split(_CALL_ID)[0].strip())
            return Step.MORE if CALL_NAME.fullmatch(self.name) else Step.WRONG
        if len(self._head) > _MAX_HEAD_CHARS:
            return Step.WRONG
        return Step.MORE if char in self._allowed or CALL_NAME.match(char) else Step.WRONG

    def _named(self, head: str) -> str:
        return _INDEX.sub("", head.removeprefix(self._prefix)) if self._prefix else head

    def _open_arguments(self, char: str) -> Step:
        if char in WHITE:
            return Step.MORE
        if char != "{":
            return Step.WRONG
        self._scanner = JsonScanner()
        self._out.append(char)
        return self._scanner.push(char)


def escaped(char: str) -> str:
    """A character of a string as JSON wants it; models write raw line breaks there."""
    return char if char >= _FIRST_PRINTABLE else json.dumps(char)[1:-1]


def _loaded(text: list[str]) -> object:
    return json.loads("".join(text), strict=False)


def _arguments_of(text: str) -> str | None:
    """The JSON object that a value stands for, as text; None if it stands for none."""
    if text.startswith("{"):
        return text
    value = json.loads(text, strict=False)
    if value is None or value == "":
        return NO_ARGUMENTS
    if not isinstance(value, str):
        return None
    try:
        inner = json.loads(value, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return json.dumps(inner) if isinstance(inner, dict) else None


def _refuse(constant: str) -> Never:
    raise ValueError(constant)  # NaN and infinities are not JSON
