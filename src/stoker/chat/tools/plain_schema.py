"""Tools in the plainest words of JSON Schema, for templates that write a schema as types of Python.

Such a template reads the name of one type and a description of each parameter. It fails where one of them is
missing, and recurses without end at a union with `null`. The model is told less then than what it is held
to: constraints follow the schema as it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PYTHON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
_TYPES = frozenset(_PYTHON_TYPES.values())


def plain_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The declarations, in OpenAI's form, with one type and a description for each parameter."""
    return [{**tool, "function": _plain_function(tool["function"])} for tool in tools]


def _plain_function(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "required": [], **function["parameters"]}
    parameters["properties"] = _plain_parts(parameters["properties"])
    return {**function, "parameters": parameters}


def _plain_parts(parts: Any) -> dict[str, Any]:
    return {name: _plain(part) for name, part in parts.items()} if isinstance(parts, Mapping) else {}


def _plain(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, Mapping):  # true and false are schemas
        return {"type": "string", "description": ""}
    plain = {"description": "", **schema, "type": _type_of(schema)}
    if plain["type"] == "array":
        plain["items"] = _plain(schema.get("items"))
    elif plain["type"] == "object":
        plain["properties"] = _plain_parts(schema.get("properties"))
        plain["additionalProperties"] = _plain(schema.get("additionalProperties"))
    return plain


def _type_of(schema: Mapping[str, Any]) -> str:
    """The first type besides `null` that a value may have; text where the schema does not say."""
    named = schema.get("type")
    names = [*named] if isinstance(named, list) else [named]
    choices = schema.get("anyOf") or schema.get("oneOf") or ()
    names += [_type_of(one) for one in choices if isinstance(one, Mapping) and one.get("type") != "null"]
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    names += [_PYTHON_TYPES.get(type(value)) for value in values]
    return next((name for name in names if name in _TYPES), "string")
