"""Calls whose arguments stand between tags, made JSON as they come (SPEC D12).

Owns what type a value has: its text says nothing of it, the tool's schema does. A value that can be nothing
but text goes out as it comes, any other at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Never

from stoker.chat.json_scan import WHITE, Step
from stoker.chat.tools.call_literal import LiteralText
from stoker.chat.tools.call_text import CALL_NAME, MAX_NAME_CHARS, CallText
from stoker.chat.tools.syntax import CallTags

Texts = Mapping[str, tuple[str, ...]]
"""Of one tool, the arguments that may be text, each with the other JSON types that it may have."""

_MAX_KEY_CHARS = MAX_NAME_CHARS + 32
_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_MAX_SCHEMA_STEPS = 64


class _Part(Enum):
    NAME = auto()
    BETWEEN = auto()
    KEY = auto()
    GAP = auto()  # between a key and its value
    VALUE = auto()


class TaggedCall(CallText):
    """A name, and each argument between tags.

    Args:
        tags: of the format.
        texts: of each tool the arguments that may be text.
    """

    def __init__(self, tags: CallTags, texts: Mapping[str, Texts]) -> None:
        super().__init__()
        self._tags = tags
        self._texts = texts
        self._part = _Part.NAME
        self._held = ""  # what a mark may begin with, a name or a key
        self._keys: set[str] = set()
        self._others: tuple[str, ...] | None = (
            None  # types that the value may have beside text; None: unknown
        )
        self._value: list[str] = []
        self._streams = False  # the value is nothing but text, and goes out as it comes
        self._is_line_due = False  # the line break between a value and its opening tag

    def __repr__(self) -> str:
        return f"TaggedCall({self.name or self._held!r}, {self._part.name.lower()})"

    def push(self, char: str) -> Step:
        """Take one character."""
        match self._part:
            case _Part.VALUE:
                return self._in_value(char)
            case _Part.NAME:
                return self._in_name(char)
            case _Part.BETWEEN:
                return self._between(char)
            case _Part.KEY:
                return self._in_key(char)
            case _Part.GAP:
                return self._in_gap(char)

    def _in_name(self, char: str) -> Step:
        end = self._tags.name_end
        if end:
            self._held += char
            if not self._held.endswith(end):
                is_name = CALL_NAME.match(char) or char in WHITE + end
                return Step.MORE if is_name and len(self._held) <= MAX_NAME_CHARS + len(end) else Step.WRONG
            return self._begin(self._held.removesuffix(end).strip())
        if CALL_NAME.match(char) or (char in WHITE and not self._held):
            self._held = (self._held + char).strip()
            return Step.MORE if len(self._held) <= MAX_NAME_CHARS else Step.WRONG
        return self._between(char) if self._begin(self._held) is Step.MORE else Step.WRONG

    def _begin(self, name: str) -> Step:
        if not CALL_NAME.fullmatch(name):
            return Step.WRONG
        self.name, self._part, self._held = name, _Part.BETWEEN, ""
        self._out.append("{")
        return Step.MORE

    def _between(self, char: str) -> Step:
        begun = (self._held + char).lstrip(WHITE)
        before, _ = self._tags.key
        if begun == self._tags.end:
            self._out.append("}")
            self._is_complete = True
            return Step.LAST
        self._part, self._held = (_Part.KEY, "") if begun == before else (_Part.BETWEEN, begun)
        return Step.MORE if before.startswith(begun) or self._tags.end.startswith(begun) else Step.WRONG

    def _in_key(self, char: str) -> Step:
        self._held += char
        end = self._tags.key[1]
        if not self._held.endswith(end):
            return Step.MORE if len(self._held) <= _MAX_KEY_CHARS else Step.WRONG
        key = self._held.removesuffix(end)
        self._others = self._texts.get(self.name, {}).get(key)
        for kind, others in zip(self._tags.kinds, ((), None), strict=False):
            if key.endswith(kind):
                key, self._others = key.removesuffix(kind), others
        key = key.strip()
        if not key or key in self._keys:
            return Step.WRONG
        self._out.append(f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys.add(key)
        self._held = ""
        if self._tags.value[0]:
            self._part = _Part.GAP
        else:
            self._begin_value()
        return Step.MORE

    def _in_gap(self, char: str) -> Step:
        before = self._tags.value[0]
        self._held = (self._held + char).lstrip(WHITE)
        if self._held == before:
            self._begin_value()
            return Step.MORE
        return Step.MORE if before.startswith(self._held) else Step.WRONG

    def _begin_value(self) -> None:
        self._part, self._held = _Part.VALUE, ""
        self._is_line_due = self._tags.is_padded
        self._streams = self._others == () and not any(self._tags.wrapper)
        if self._streams:
            self._out.append('"')

    def _in_value(self, char: str) -> Step:
        """A closing tag begins with a character that it has once, so no more than its beginning is held."""
        if self._is_line_due:
            self._is_line_due = False
            if char == "\n":
                return Step.MORE
        end = self._tags.value[1]
        held = self._held + char
        if not end.startswith(self._tag_in(held)):
            self._say(self._held)
            held = char if end.startswith(self._tag_in(char)) else ""
            self._say("" if held else char)
        self._held = held
        if self._tag_in(held) != end:
            return Step.MORE
        if self._is_wrapper_open():
            self._say(held)
            self._held = ""
        else:
            self._end_value()
        return Step.MORE

    def _is_wrapper_open(self) -> bool:
        """Whether the closing tag just read stands inside a wrapped value, and is part of it."""
        before, after = self._tags.wrapper
        if not before:
            return False
        text = "".join(self._value).strip()
        return text.startswith(before) and not text.endswith(after)

    def _tag_in(self, held: str) -> str:
        """What was held without the line break that stands before the tag."""
        return held.removeprefix("\n") if self._tags.is_padded else held

    def _say(self, text: str) -> None:
        if self._streams:
            self._out.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        if self._streams:
            self._out.append('"')
        else:
            text, others = "".join(self._value), self._others
            before, after = self._tags.wrapper
            if before and (bare := text.strip()).startswith(before):
                text, others = bare.removeprefix(before).removesuffix(after), ()
            self._out.append(value_as_json(text, others))
            self._value.clear()
        self._part, self._held = _Part.BETWEEN, ""


def value_as_json(text: str, others: tuple[str, ...] | None) -> str:
    """The JSON that a value's text stands for.

    Args:
        text: as the model wrote it.
        others: the JSON types that it may have, text aside; None: any type, text where it reads as no other.
    """
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if others != () and (literal := _literal(bare)):
            return literal
        return json.dumps(text, ensure_ascii=False)
    kind = "null" if value is None else _TYPES[type(value)]
    if others is None or kind in others or (kind == "integer" and "number" in others):
        return bare
    return json.dumps(text, ensure_ascii=False)


def texts_of(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The properties of a tool's schema that may be text, each with the other types that it may have."""
    properties = schema.get("properties")
    found: dict[str, tuple[str, ...]] = {}
    for name, one in properties.items() if isinstance(properties, Mapping) else ():
        types = _types_of(one, schema)
        if "string" in types:
            found[name] = tuple(sorted(types - {"string"}))
    return found


def _types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema names itself, by its parts or by what it refers to."""
    types: set[str] = set()
    todo, num_steps = [schema], 0
    while todo and num_steps < _MAX_SCHEMA_STEPS:
        one = todo.pop()
        num_steps += 1
        if not isinstance(one, Mapping):
            continue
        given = one.get("type")
        types |= (
            {given} if isinstance(given, str) else {kind for kind in _list(given) if isinstance(kind, str)}
        )
        if given is None:
            values = [*_list(one.get("enum")), *([one["const"]] if "const" in one else ())]
            types |= {"null" if value is None else _TYPES.get(type(value), "object") for value in values}
        for key in ("anyOf", "oneOf", "allOf"):
            todo += _list(one.get(key))
        if isinstance(reference := one.get("$ref"), str):
            todo.append(_referred(reference, root))
    return types


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _literal(text: str) -> str:
    """The JSON of a list or an object that is written as in Python; empty: it is none."""
    literal = LiteralText()
    for at, char in enumerate(text):
        match literal.push(char):
            case Step.LAST:
                return literal.take() if at == len(text) - 1 else ""
            case Step.WRONG:
                return ""
    return ""


def _refuse(constant: str) -> Never:
    raise ValueError(constant)  # NaN and infinities are not JSON
