"""Whether the branches of a `oneOf` exclude each other, so that it says no more than `anyOf`.

Answers yes only where it is certain: other types, or a property that both require with other constants.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MAX_REFERENCES = 16
_MAX_BRANCHES = 200

Resolve = Callable[[Any], Any]


def are_disjoint(branches: Sequence[Any], resolve: Resolve) -> bool:
    """Whether no value satisfies two of `branches`; `resolve` finds what a `$ref` names."""
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
        for name in set(_required(one)) & set(_required(other))
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


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _property(schema: dict[str, Any], name: str, resolve: Resolve) -> Any:
    listed = schema.get("properties")
    return _followed(listed.get(name), resolve) if isinstance(listed, dict) else None
