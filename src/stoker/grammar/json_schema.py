"""Checks a JSON Schema before the grammar engine reads it: what that would ignore or hang on is refused.

Owns which keywords are taken and the limits on their numbers. The engine judges what the taken ones mean
together. Only what the root reaches is read; `$defs` without a reference may hold anything.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from stoker.errors import InvalidRequestError
from stoker.grammar.limits import deepest_path, refusal

MAX_SCHEMAS = 10_000
# The grammar engine recurses along references: from 1,400 on it may overrun its stack of 8 MiB.
MAX_NESTED = 400
MAX_COUNT = 1_000_000
# A multiple is recognised by an automaton of as many states; 20,000 take 0.2 s.
MAX_MULTIPLE = 20_000
_MAX_ROUNDS = 100

_PARAM = "response_format"
_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OTHERS = ("$ref", "const", "enum", "type", "required", "pattern", "format", *_RANGES)
_ANNOTATIONS = (
    *("$anchor", "$comment", "$defs", "$schema", "default", "definitions", "deprecated", "description"),
    *("contentEncoding", "contentMediaType", "contentSchema", "discriminator", "example", "examples"),
    *("readOnly", "title", "writeOnly"),
)
_TAKEN = frozenset((*_ONE, *_LISTS, *_MAPS, *_COUNTS, *_OTHERS, *_ANNOTATIONS))
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# As json.dumps writes characters that have no short escape; the grammar engine would leave them out.
_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]|\x7f")
_JOINS = frozenset(("$ref", "allOf", "anyOf", "oneOf"))


def checked_schema(source: str) -> str:
    """The schema as JSON text for the grammar engine.

    Keywords that forbid nothing are left out; a `oneOf` whose branches exclude each other becomes `anyOf`.

    Raises:
        InvalidRequestError: no JSON, a keyword that is not taken, a number over its limit, a reference that
            leads nowhere, or a recursion that never ends; the message names the keyword and its place.
    """
    try:
        root = json.loads(source, parse_constant=_refused, parse_float=_finite)
    except ValueError as error:
        raise InvalidRequestError(f"the JSON Schema is no JSON: {error}", param=_PARAM) from error
    if root is True:
        root = {}
    if not isinstance(root, dict):
        raise InvalidRequestError("a JSON Schema is an object", param=_PARAM)
    for name in ("$id", "id", "x-guidance"):  # a base for references elsewhere, and the engine's own settings
        root.pop(name, None)
    schema = SchemaReader(root)
    schema.read()
    return json.dumps(schema.root)


class SchemaReader:
    """One document: walks what its root reaches and rewrites it in place.

    Args:
        root: the parsed schema.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self._seen: dict[int, str] = {}
        self._schemas: list[dict[str, Any]] = []
        self._edges: dict[int, list[int]] = {}
        self._multiples: set[Fraction] = set()
        self._has_joins = False

    def __repr__(self) -> str:
        return f"SchemaReader(num_schemas={len(self._schemas)})"

    def read(self) -> None:
        """Check and rewrite. Raises InvalidRequestError."""
        waiting = [("", self.root)]
        while waiting:
            place, schema = waiting.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                raise self._error(f"{json.dumps(schema)[:40]} is no schema", place)
            if id(schema) in self._seen:
                continue
            self._seen[id(schema)] = place
            self._schemas.append(schema)
            if len(self._schemas) > MAX_SCHEMAS:
                raise self._error(f"over {MAX_SCHEMAS} schemas in one", place)
            self._check(schema, place)
            children = list(self._children(schema, place))
            self._edges[id(schema)] = [id(child) for _, child in children if isinstance(child, dict)]
            waiting.extend(children)
        if (depth := deepest_path(self._edges, id(self.root))) > MAX_NESTED:
            raise self._error(f"{depth} schemas lead into each other by $ref, at most {MAX_NESTED} may", "")
        self._check_common_multiple()
        self._check_endings()
        for schema in self._schemas:
            self._rewrite_one_of(schema)

    def resolve(self, reference: Any, place: str = "") -> Any:
        """The schema that a `$ref` of this document names. Raises InvalidRequestError."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise self._error(f"$ref {reference!r} leads outside the schema; only '#/...' is taken", place)
        target: Any = self.root
        for part in reference[1:].split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise self._error(f"$ref {reference!r} leads nowhere", place)
        return target

    def _check(self, schema: dict[str, Any], place: str) -> None:
        for name in list(schema):
            if name == "uniqueItems" and schema[name] is False:
                del schema[name]
            elif name not in _TAKEN and not name.startswith("x-"):
                raise self._error(f"the keyword {name!r} is not supported", place)
        self._has_joins |= not _JOINS.isdisjoint(schema) and len(schema) > 1
        for name in _COUNTS:
            self._check_count(schema, name, place)
        if "multipleOf" in schema:
            self._check_multiple(schema["multipleOf"], place)
        if "format" in schema and schema["format"] not in _FORMATS:
            raise self._error(f"format {schema['format']!r} is not supported", place)
        self._check_texts(schema, place)
        self._check_free_keys(schema, place)

    def _check_texts(self, schema: dict[str, Any], place: str) -> None:
        patterns = [schema.get("pattern"), *_mapping(schema, "patternProperties")]
        for pattern in patterns:
            if isinstance(pattern, str) and (reason := refusal(pattern)):
                raise self._error(f"a pattern {reason}", place)
        for name in ("const", "enum", "required", "properties"):
            value = schema.get(name)
            spelled = json.dumps(list(value) if name == "properties" and isinstance(value, dict) else value)
            if _CONTROL.search(spelled):
                raise self._error(f"{name} holds a control character that needs an escape", place)

    def _check_count(self, schema: dict[str, Any], name: str, place: str) -> None:
        count = schema.get(name, 0)
        if isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 <= count <= MAX_COUNT:
            raise self._error(
                f"{name} must be between 0 and {MAX_COUNT}, got {json.dumps(count)[:40]}", place
            )

    def _check_multiple(self, value: Any, place: str) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._error(f"multipleOf must be above 0, got {json.dumps(value)[:40]}", place)
        multiple = Fraction(Decimal(str(value)))
        self._multiples.add(multiple)
        if multiple.numerator > MAX_MULTIPLE or multiple.denominator > MAX_COUNT:
            raise self._error(f"multipleOf {value} is out of range (1e-6 to {MAX_MULTIPLE})", place)

    def _check_free_keys(self, schema: dict[str, Any], place: str) -> None:
        """Keys that no `properties` names may come twice and then count as one."""
        low = schema.get("minProperties", 0)
        if low > max(1, len(_names(schema, "required"))):
            raise self._error(
                f"minProperties {low} is not supported beyond the number of required properties", place
            )

    def _check_common_multiple(self) -> None:
        """Where schemas are joined, their multiples are, too."""
        if not self._multiples or not self._has_joins:
            return
        scale = math.lcm(*(multiple.denominator for multiple in self._multiples))
        common = math.lcm(*(int(multiple * scale) for multiple in self._multiples))
        common //= math.gcd(common, scale)
        if common > MAX_MULTIPLE:
            raise self._error(f"the multipleOf of joined schemas have {common} in common", "")

    def _children(self, schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
        for name in _ONE:
            if name in schema and not isinstance(schema[name], list):
                yield f"{place}/{name}", schema[name]
        for name in _LISTS:
            value = schema.get(name)
            if isinstance(value, list):
                yield from ((f"{place}/{name}/{index}", item) for index, item in enumerate(value))
            elif value is not None and name != "items":
                raise self._error(f"{name} must be a list", place)
        for name in _MAPS:
            if name in schema and not isinstance(schema[name], dict):
                raise self._error(f"{name} must be an object", place)
            yield from ((f"{place}/{name}/{key}", item) for key, item in _mapping(schema, name).items())
        if "$ref" in schema:
            yield schema["$ref"], self.resolve(schema["$ref"], place)

    def _check_endings(self) -> None:
        """Refuses a schema that only endless texts satisfy: who can end is found from its parts up."""
        ending: set[int] = set()
        left = self._schemas[::-1]  # parts come before what they are part of, so few rounds are needed
        for _ in range(_MAX_ROUNDS):
            num_left = len(left)
            for schema in left:
                if self._can_end(schema, ending):
                    ending.add(id(schema))
            left = [schema for schema in left if id(schema) not in ending]
            if id(self.root) in ending:
                return
            if len(left) == num_left:
                raise self._error(
                    "no finite text satisfies it: what it requires is false or leads back to itself", ""
                )

    def _can_end(self, schema: dict[str, Any], ending: set[int]) -> bool:
        def can(part: Any) -> bool:
            return part is not False and (not isinstance(part, dict) or id(part) in ending)

        if "$ref" in schema and not can(self.resolve(schema["$ref"])):
            return False
        if not all(can(part) for part in schema.get("allOf", ())):
            return False
        for name in ("anyOf", "oneOf"):
            if name in schema and not any(can(part) for part in schema[name]):
                return False
        if schema.get("type") == "object":
            listed = _mapping(schema, "properties")
            return all(can(listed[name]) for name in _names(schema, "required") if name in listed)
        if schema.get("type") == "array":
            low = int(schema.get("minItems", 0))
            first = schema.get("prefixItems", [])
            rest = schema.get("items", {})
            return all(can(part) for part in first[:low]) and (
                low <= len(first) or isinstance(rest, list) or can(rest)
            )
        return True

    def _rewrite_one_of(self, schema: dict[str, Any]) -> None:
        """`oneOf` means `anyOf` where no value satisfies two branches; the engine sees fewer such cases."""
        options = schema.get("oneOf")
        if not options or "anyOf" in schema or not are_disjoint(options, self.resolve):
            return
        renamed = {("anyOf" if name == "oneOf" else name): value for name, value in schema.items()}
        schema.clear()
        schema.update(renamed)

    def _error(self, text: str, place: str) -> InvalidRequestError:
        where = f"at {place}" if place.startswith("#") else f"at #{place}"
        return InvalidRequestError(f"JSON Schema: {text} ({where})", param=_PARAM, place=where)


def _refused(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text[:40])


def _names(schema: dict[str, Any], keyword: str) -> list[str]:
    value = schema.get(keyword)
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _mapping(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}


_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MAX_REFERENCES = 16
_MAX_BRANCHES = 200

Resolve = Callable[[Any], Any]


def are_disjoint(branches: Sequence[Any], resolve: Resolve) -> bool:
    """Whether no value satisfies two of `branches`, so that `oneOf` says no more than `anyOf`.

    Yes only where it is certain: other types, or a property that both require with other constants.
    `resolve` finds what a `$ref` names.
    """
    if len(branches) > _MAX_BRANCHES:
        return False
    plain = [_followed(branch, resolve) for branch in branches]
    return all(_exclude(one, other, resolve) for one, other in itertools.combinations(plain, 2))


def _exclude(one: Any, other: Any, resolve: Resolve) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is False or other is False
    if _types(one).isdisjoint(_types(other)) or _differ(one, other):
        return True
    if one.get("type") != "object" or other.get("type") != "object":
        return False
    return any(
        _differ(_property(one, name, resolve), _property(other, name, resolve))
        for name in set(_names(one, "required")) & set(_names(other, "required"))
    )


def _differ(one: Any, other: Any) -> bool:
    """Whether both list their values, with none in common."""
    mine, others = _constants(one), _constants(other)
    return mine is not None and others is not None and mine.isdisjoint(others)


def _followed(schema: Any, resolve: Resolve) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = resolve(schema["$ref"])
    return schema


def _types(schema: dict[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    if named is None:
        return _TYPES
    types = {named} if isinstance(named, str) else set(named)
    return frozenset(types | {"integer"} if "number" in types else types)


def _constants(schema: Any) -> frozenset[str] | None:
    """The values a schema allows as JSON text, None where it does not, or lists numbers or more."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(
        isinstance(value, (str, bool)) or value is None for value in values
    ):
        return None
    return frozenset(json.dumps(value) for value in values)


def _property(schema: dict[str, Any], name: str, resolve: Resolve) -> Any:
    listed = _mapping(schema, "properties")
    return _followed(listed.get(name), resolve)
