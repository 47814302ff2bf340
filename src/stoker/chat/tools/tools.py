"""The tools a caller offers, and which of them the model has to call (SPEC D7).

Owns OpenAI's form of `tools` and `tool_choice`, checked like a stranger's, the bounds on them, and which
kinds of tools are left out: a tool that is no function runs at its vendor or has a schema that only its
vendor's models know. What a schema allows is known to the grammar compiler, how another API spells all this
to its own module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.json_size import num_chars

MAX_TOOLS = 128  # OpenAI's
MAX_NAME_CHARS = 256  # Anthropic's 128; OpenAI's 64, twice where a namespace stands before it
MAX_DESCRIPTION_CHARS = 65_536  # coding agents send 19,000
MAX_SCHEMA_CHARS = 65_536
MAX_SCHEMAS_CHARS = 524_288
MAX_SCHEMA_DEPTH = 32

_NAME = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_NAME_CHARS}}}")
_SHOWN_CHARS = 40  # of what a caller wrote, in errors and headers
_ALLOWED = "tool_choice.allowed_tools"
_ALLOWED_MODES = ("auto", "none", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}}


class ChoiceMode(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`tool_choice`.

    Attributes:
        mode: whether the model calls tools.
        name: of the tool that it has to call, where the mode is named.
        allowed: names of the tools that it may call, of all that it is told of; empty: every one.
    """

    mode: ChoiceMode = ChoiceMode.AUTO
    name: str = ""
    allowed: tuple[str, ...] = ()

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in {ChoiceMode.REQUIRED, ChoiceMode.NAMED}

    def allows(self, name: str) -> bool:
        """Whether the tool of that name may be called."""
        return not self.allowed or name in self.allowed


AUTO = ToolChoice()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; `parameters` is a JSON Schema of an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_NO_PARAMETERS))

    def to_template(self) -> dict[str, Any]:
        """As chat templates expect it, which is OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A tool that is no function; the model is not told of it.

    Attributes:
        where: its place in the request, such as `tools.4`.
        kind: its `type`.
        name: empty where it has none.
    """

    where: str
    kind: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of a request: the functions, and what was left out."""

    tools: tuple[Tool, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def require_all(self) -> None:
        """Raises UnsupportedError if a tool was left out; `param` names the first."""
        if self.left_out:
            first = self.left_out[0]
            raise UnsupportedError(
                f"{first.where}: tools of type {first.kind[:_SHOWN_CHARS]!r} are not supported",
                param=f"{first.where}.type",
            )


def checked_toolset(given: Any) -> Toolset:
    """The tools of a request, `given` being its field `tools` as JSON; None and an empty list: none.

    Raises:
        InvalidRequestError: malformed, two of one name, or over a bound; `param` names the place.
    """
    if given is None:
        return Toolset()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequestError("tools is not a list", param="tools")
    if len(given) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools has {len(given)} entries, at most {MAX_TOOLS} are taken", param="tools"
        )
    found = [_checked_tool(one, f"tools.{index}") for index, one in enumerate(given)]
    tools: dict[str, Tool] = {}
    for index, tool in enumerate(found):
        if isinstance(tool, LeftOut):
            continue
        if tool.name in tools:
            where = f"tools.{index}.function.name"
            raise InvalidRequestError(f"{where}: there are two tools named {tool.name!r}", param=where)
        tools[tool.name] = tool
    size = sum(_size(tool.parameters) for tool in tools.values())
    if size > MAX_SCHEMAS_CHARS:
        raise InvalidRequestError(
            f"the parameters of all tools have {size} characters, at most {MAX_SCHEMAS_CHARS} are taken",
            param="tools",
        )
    return Toolset(tuple(tools.values()), tuple(tool for tool in found if isinstance(tool, LeftOut)))


def checked_choice(given: Any, tools: Sequence[Tool], left_out: Sequence[LeftOut] = ()) -> ToolChoice:
    """The choice of a request, `given` being its field `tool_choice` as JSON; None: auto.

    Raises:
        InvalidRequestError: malformed, an unknown name, or a call is required and there are no tools.
        UnsupportedError: a form of OpenAI's that is not served, or it forces a tool that was left out.
    """
    choice = _choice(given, left_out)
    if choice.is_forced and not tools:
        why = ""
        if left_out:
            kinds = ", ".join(sorted({one.kind[:_SHOWN_CHARS] for one in left_out}))
            why = f" that is served (not supported: {kinds})"
        raise InvalidRequestError(
            f"tool_choice needs tools, and the request has none{why}", param="tool_choice"
        )
    if choice.mode is ChoiceMode.NAMED and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequestError(
            f"tool_choice names {choice.name[:80]!r}, which is none of the tools", param="tool_choice"
        )
    if strange := sorted(set(choice.allowed).difference(tool.name for tool in tools)):
        text = f"{_ALLOWED} names {strange[0][:80]!r}, which is none of the tools"
        raise InvalidRequestError(text, param=_ALLOWED)
    return choice


def _choice(given: Any, left_out: Sequence[LeftOut]) -> ToolChoice:
    if given is None:
        return AUTO
    if isinstance(given, str) and given in {"auto", "none", "required"}:
        return ToolChoice(ChoiceMode(given))
    if isinstance(given, Mapping):
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        kind = given.get("type")
        if kind == "function" and isinstance(name, str):
            _refuse_left_out(name, left_out)
            return ToolChoice(ChoiceMode.NAMED, name)
        if kind == "allowed_tools":
            return _allowed_tools(given, left_out)
        if isinstance(kind, str) and kind != "function":
            raise UnsupportedError(
                f"tool_choice of type {kind[:_SHOWN_CHARS]!r} is not supported", param="tool_choice"
            )
    raise InvalidRequestError(
        'tool_choice is "auto", "none", "required", {"type": "function", "function": {"name": ...}} or'
        ' {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        param="tool_choice",
    )


def _allowed_tools(choice: Mapping[str, Any], left_out: Sequence[LeftOut]) -> ToolChoice:
    """A mode, and the tools it holds for; of those that are no functions the model is not told anyway."""
    given = choice.get("allowed_tools")
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{_ALLOWED} is not an object", param=_ALLOWED)
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in _ALLOWED_MODES:
        text = f"{_ALLOWED}.mode is {', '.join(_ALLOWED_MODES)}"
        raise InvalidRequestError(text, param=f"{_ALLOWED}.mode")
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools or len(tools) > MAX_TOOLS:
        text = f"{_ALLOWED}.tools is not a list of 1 to {MAX_TOOLS} tools"
        raise InvalidRequestError(text, param=f"{_ALLOWED}.tools")
    kinds = {one.kind for one in left_out}
    names = [_allowed_name(tool, f"{_ALLOWED}.tools.{index}", kinds) for index, tool in enumerate(tools)]
    allowed = tuple(dict.fromkeys(name for name in names if name is not None))
    if not allowed:
        text = f"{_ALLOWED}.tools holds no function, and no other tool is served"
        raise UnsupportedError(text, param=f"{_ALLOWED}.tools")
    return ToolChoice(ChoiceMode(mode), allowed=allowed)


def _allowed_name(tool: Any, where: str, left_out: Collection[str]) -> str | None:
    """The name of a function that may be called; None: it is a tool that the model is not told of."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    function = tool.get("function") if kind == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str):
        return name
    if isinstance(kind, str) and kind in left_out:
        return None
    text = f'{where} is not of the form {{"type": "function", "function": {{"name": ...}}}}'
    raise InvalidRequestError(text, param=where)


def _refuse_left_out(name: str, left_out: Sequence[LeftOut]) -> None:
    for one in left_out:
        if one.name == name:
            raise UnsupportedError(
                f"tool_choice forces {name[:_SHOWN_CHARS]!r}, whose type {one.kind[:_SHOWN_CHARS]!r} "
                "is not supported",
                param="tool_choice",
            )


def _checked_tool(given: Any, where: str) -> Tool | LeftOut:
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{where} is not an object", param=where)
    kind = given.get("type")
    if isinstance(kind, str) and kind != "function":
        name = given.get("name")
        return LeftOut(where, kind, name if isinstance(name, str) else "")
    function = given.get("function")
    if kind is None or not isinstance(function, Mapping):
        raise InvalidRequestError(
            f'{where} is not of the form {{"type": "function", "function": {{"name": ...}}}}', param=where
        )
    where = f"{where}.function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.name: 1 to {MAX_NAME_CHARS} letters, digits and characters of _.:- are taken",
            param=f"{where}.name",
        )
    return Tool(
        name,
        _checked_description(function.get("description"), f"{where}.description"),
        _checked_parameters(function.get("parameters"), f"{where}.parameters"),
    )


def _checked_description(given: Any, where: str) -> str:
    if given is None:
        return ""
    if not isinstance(given, str):
        raise InvalidRequestError(f"{where} is not text", param=where)
    if len(given) > MAX_DESCRIPTION_CHARS:
        raise InvalidRequestError(
            f"{where} has {len(given)} characters, at most {MAX_DESCRIPTION_CHARS} are taken", param=where
        )
    return given


def _checked_parameters(given: Any, where: str) -> dict[str, Any]:
    if given is None or given == {}:
        return dict(_NO_PARAMETERS)
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        raise InvalidRequestError(f'{where} is not a JSON Schema of type "object"', param=where)
    depth = _depth(given)  # first, as encoding recurses
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(
            f"{where} is nested over {MAX_SCHEMA_DEPTH} deep, which is the most that is taken", param=where
        )
    if (size := _size(given)) > MAX_SCHEMA_CHARS:
        raise InvalidRequestError(
            f"{where} has {size} characters, at most {MAX_SCHEMA_CHARS} are taken", param=where
        )
    return {"type": "object", **given}


def _size(schema: Mapping[str, Any]) -> int:
    """Characters of its JSON; of its strings alone where these are too many, as encoding holds the lock."""
    least = num_chars(schema)
    if least > MAX_SCHEMA_CHARS:
        return least
    return len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def _depth(value: Any) -> int:
    """Levels of objects and lists, counted no further than one past the bound."""
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        level = [child for one in level for child in _children(one)]
        depth += 1
    return depth


def _children(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [child for child in children if isinstance(child, Mapping | list)]
