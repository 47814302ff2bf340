"""What a generated text must match: a JSON Schema, a regex, a list or a grammar (SPEC D2).

Validated for size and nesting only, without native code; `stoker.grammar` compiles it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from stoker.errors import InvalidRequestError

JsonSchema = Mapping[str, Any] | bool
MAX_SOURCE_BYTES = 128 * 1024
MAX_DEPTH = 64
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 4096
MAX_MARKER_CHARS = 64

_OPENING, _CLOSING = "([{", ")]}"
# What is no nesting: an escaped character, a string and, but for JSON, a class of characters. A class that is
# never closed is matched to the end, so that the search for its end is not begun anew at each character.
_STRINGS = re.compile(r'\\.|"(?:\\.|[^"\\])*"', re.DOTALL)
_STRINGS_CLASSES = re.compile(
    r'\\.|"(?:\\.|[^"\\])*"|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|(?P<rest>\\?\Z))', re.DOTALL
)
# These read foreign text on the client's one thread: each line once, and nothing twice.
_BNF_RULE = re.compile(r"^[^\S\n]*+<[^<>\n]++>\s*+::=", re.MULTILINE)
_GBNF_RULE = re.compile(r"^[^\S\n]*+[\w-]++\s*+::=", re.MULTILINE)


class ConstraintKind(StrEnum):
    """Language a constraint is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    GBNF = "gbnf"
    BNF = "bnf"

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return _LABELS.get(self, self.value)


_LABELS = {
    ConstraintKind.JSON_SCHEMA: "JSON Schema",
    ConstraintKind.JSON_OBJECT: "JSON object",
    ConstraintKind.LARK: "Lark grammar",
    ConstraintKind.GBNF: "GBNF grammar",
    ConstraintKind.BNF: "BNF grammar",
}

_FORMAT = "response_format"
_PARAMS = {
    ConstraintKind.JSON_SCHEMA: _FORMAT,
    ConstraintKind.JSON_OBJECT: _FORMAT,
    ConstraintKind.REGEX: "regex",
    ConstraintKind.CHOICE: "choice",
}


class Notation(StrEnum):
    """Languages that the grammar engine compiles."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class NativeGrammar(msgspec.Struct, frozen=True):
    """A constraint checked and translated for the grammar engine, not yet compiled."""

    notation: Notation
    text: str


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What the generated text must match as a whole.

    Attributes:
        kind: the language of `source`.
        source: the schema as JSON text, the regex or the grammar; empty for the other two kinds.
        choices: the texts to choose from, with kind `choice`; no two alike.
        reasoning_end: the constraint begins after the model has written this, "</think>" for instance; empty:
            with the first token.
        asked_as: the request field that its errors name; empty: the usual one of its kind.
        reasoning_start: `reasoning_end` counts only if the generation begins with this; empty: the prompt has
            opened the reasoning already.
        native: its translation by `stoker.grammar.source`, which is compiled; None: there is none yet.

    Raises:
        InvalidRequestError: over a limit, or what belongs to another kind.
    """

    kind: ConstraintKind
    source: str = ""
    choices: tuple[str, ...] = ()
    asked_as: str = ""
    reasoning_start: str = ""
    reasoning_end: str = ""
    native: NativeGrammar | None = None

    def __post_init__(self) -> None:
        if self.kind is ConstraintKind.CHOICE:
            self._check_choices()
        elif self.choices:
            raise InvalidRequestError(f"a constraint of kind {self.kind} takes no choices", param=self.param)
        if self.kind in {ConstraintKind.CHOICE, ConstraintKind.JSON_OBJECT}:
            if self.source:
                raise InvalidRequestError(
                    f"a constraint of kind {self.kind} takes no source text", param=self.param
                )
        else:
            self._check_source()
        for marker in (self.reasoning_start, self.reasoning_end):
            if len(marker) > MAX_MARKER_CHARS:
                raise InvalidRequestError(
                    f"a marker of reasoning has {len(marker)} characters, at most {MAX_MARKER_CHARS} fit"
                )
        if self.reasoning_start and not self.reasoning_end:
            raise InvalidRequestError("reasoning that starts needs a text that ends it")

    @property
    def param(self) -> str:
        """The request field that its errors name."""
        return self.asked_as or _PARAMS.get(self.kind, "grammar")

    @property
    def is_format(self) -> bool:
        """Whether it was asked for as the format of the answer's text, by the fields for that."""
        return self.param in {_FORMAT, "schema"}

    @classmethod
    def of_grammar(cls, text: str, asked_as: str = "") -> Constraint:
        """A grammar whose notation shows in its rules: `<a> ::=` BNF, `a ::=` GBNF, else Lark."""
        kind = ConstraintKind.LARK
        begin = text[:MAX_SOURCE_BYTES]  # a longer text is refused, so the rest of it is not searched
        if _BNF_RULE.search(begin):
            kind = ConstraintKind.BNF
        elif _GBNF_RULE.search(begin):
            kind = ConstraintKind.GBNF
        return cls(kind=kind, source=text, asked_as=asked_as)

    @classmethod
    def of_schema(cls, schema: JsonSchema | str, asked_as: str = "") -> Constraint:
        """JSON of a schema, which may be its JSON text; the order of its keys is the answer's."""
        # msgspec is five times as fast as json, and either holds the interpreter's lock until it is done
        source = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        return cls(kind=ConstraintKind.JSON_SCHEMA, source=source, asked_as=asked_as)

    @classmethod
    def of_regex(cls, source: str, asked_as: str = "") -> Constraint:
        """A text that the regex matches as a whole."""
        return cls(kind=ConstraintKind.REGEX, source=source, asked_as=asked_as)

    @classmethod
    def of_choice(cls, choices: Sequence[str], asked_as: str = "") -> Constraint:
        """One of the texts."""
        return cls(kind=ConstraintKind.CHOICE, choices=tuple(choices), asked_as=asked_as)

    def _check_choices(self) -> None:
        if not 0 < len(self.choices) <= MAX_CHOICES:
            raise InvalidRequestError(
                f"choice has {len(self.choices)} texts, 1 to {MAX_CHOICES} are taken", param=self.param
            )
        num_bytes = 0
        for index, choice in enumerate(self.choices):
            size = _num_bytes(choice, self.param)
            num_bytes += size
            if not 0 < size <= MAX_CHOICE_BYTES:
                raise InvalidRequestError(
                    f"choice {index} has {size} bytes, 1 to {MAX_CHOICE_BYTES} are taken", param=self.param
                )
        if num_bytes > MAX_SOURCE_BYTES:
            raise InvalidRequestError(
                f"the choices have {num_bytes} bytes, at most {MAX_SOURCE_BYTES} are taken", param=self.param
            )
        if len(set(self.choices)) < len(self.choices):
            raise InvalidRequestError("two of the choices are alike", param=self.param)

    def _check_source(self) -> None:
        size = _num_bytes(self.source, self.param)
        if not self.source.strip():
            raise InvalidRequestError(f"the {self.kind} is empty", param=self.param)
        if size > MAX_SOURCE_BYTES:
            raise InvalidRequestError(
                f"the {self.kind} has {size} bytes, at most {MAX_SOURCE_BYTES} are taken", param=self.param
            )
        depth, at = _deepest(
            self.source, _STRINGS if self.kind is ConstraintKind.JSON_SCHEMA else _STRINGS_CLASSES
        )
        if depth > MAX_DEPTH:
            raise InvalidRequestError(
                f"the {self.kind} nests deeper than {MAX_DEPTH} at character {at}", param=self.param
            )


def _num_bytes(text: str, param: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text is not valid Unicode: {error}", param=param) from error


def _blanked(match: re.Match[str]) -> str:
    """As many dots; what only looked like the beginning of a class stays."""
    if match.groupdict().get("rest") is None:
        return "." * len(match[0])
    return match[0][0] + _STRINGS.sub(_blanked, match[0][1:])


def _deepest(text: str, skipped: re.Pattern[str]) -> tuple[int, int]:
    """Depth of brackets in `text`, and where it is reached; what `skipped` matches is left out."""
    plain = skipped.sub(_blanked, text)
    depth = deepest = at = 0
    for index, char in enumerate(plain):
        if char in _OPENING:
            depth += 1
            if depth > deepest:
                deepest, at = depth, index
        elif char in _CLOSING:
            depth = max(0, depth - 1)
    return deepest, at
