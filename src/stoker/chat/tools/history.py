"""A conversation with tools as a chat template expects it (SPEC D7).

Owns what families differ in: arguments as objects, how ids look, one call a turn, schemas in plainer words,
and, where a template knows no tools, everything told in plain text. Takes OpenAI's form; what the template
makes of it is the template's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.chat.tools.syntax import History, ToolFormat
from stoker.chat.tools.tools import Tool
from stoker.chat.turns import text_of

MAX_CALLS = 128
"""Of one turn; one with more of them is shown to the model as text."""

_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_MISTRAL_ID_CHARS = 9
_NO_SYSTEM = re.compile(r"system role (?:is )?not supported", re.IGNORECASE)

_PYTHON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
_TYPES = frozenset(_PYTHON_TYPES.values())

_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a template is given: its variables `messages` and `tools`.

    Attributes:
        num_spelled: turns whose calls are malformed; they are in `messages` as text.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    num_spelled: int = 0


def template_input(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    style: ToolFormat,
    template: str | None = None,
) -> TemplateInput:
    """The conversation for a template of this family.

    A call that is malformed, as models write some, ends no conversation: its turn and its results are text.

    Args:
        messages: in OpenAI's form; contents as text or parts.
        tools: those that the model is shown; none where it may not call any.
        style: the format of calls, which the template has to be given its own way.
        template: its source, to see whether it takes a system turn.
    """
    turns = [_checked_turn(message) for message in messages]
    malformed = _malformed(turns)
    num_spelled = sum(turns[index]["role"] != "tool" for index in malformed)
    if style.is_native:
        spelled = malformed | (set() if _reads_calls(template) else _with_calls(turns))
        turns = _native(list(_plain(turns, spelled, style)), style.history)
        if tools and style.history.tools_in_system:
            _tell_system(turns, tools)
        return TemplateInput(turns, [tool.to_template() for tool in tools] or None, num_spelled)
    turns = list(_plain(turns, range(len(turns)), style))
    if tools:
        has_system = not (template and _NO_SYSTEM.search(template))
        _introduce(turns, tools, style.introduction or _INTRODUCTION, has_system=has_system)
    return TemplateInput(turns, None, num_spelled)


def _reads_calls(template: str | None) -> bool:
    """Whether it writes the calls of old turns out: Phi-4's writes contents alone."""
    return template is None or "tool_calls" in template


def _with_calls(turns: Sequence[Mapping[str, Any]]) -> set[int]:
    return {index for index, turn in enumerate(turns) if turn.get("tool_calls")}


# ------------------------------------------------------------ OpenAI's form, checked


def _checked_turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """The turn; a call that is malformed is text in it."""
    turn = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = message.get("tool_calls")
    if not calls:
        return turn
    if not isinstance(calls, list):
        turn["tool_calls"] = [_raw(calls)]
    elif len(calls) > MAX_CALLS:
        turn["tool_calls"] = [_raw(call) for call in calls]
    else:
        turn["tool_calls"] = [_checked_call(call) for call in calls]
    turn["content"] = turn.get("content") or ""
    return turn


def _malformed(turns: Sequence[Mapping[str, Any]]) -> set[int]:
    """Indexes of the turns with a malformed call, and of the results behind each."""
    found: set[int] = set()
    for index, turn in enumerate(turns):
        has_text = any(isinstance(call, str) for call in turn.get("tool_calls", ()))
        if has_text or (turn["role"] == "tool" and index - 1 in found):
            found.add(index)
    return found


def _checked_call(call: Any) -> dict[str, Any] | str:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        return _raw(call)
    arguments = _object(function.get("arguments"))
    if arguments is None:
        return _raw(call)
    own_id = call.get("id")
    return {
        "id": own_id if isinstance(own_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _raw(call: Any) -> str:
    """A call as its model wrote it, as far as that is known."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(arguments := function.get("arguments"), str):
        return f'{{"name": {_json(function.get("name"))}, "arguments": {arguments}}}'
    return call if isinstance(call, str) else _json(call if function is None else function)


def _object(arguments: Any) -> dict[str, Any] | None:
    """Arguments as an object, which the API carries as text; None: they are none."""
    if arguments is None or arguments == "":
        return {}
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
    return value if isinstance(value, dict) else None


# ------------------------------------------------------------ templates that know tools


def _native(turns: list[dict[str, Any]], wanted: History) -> list[dict[str, Any]]:
    _name_results(turns)
    if wanted.has_short_ids:
        _shorten_ids(turns)
    for turn in turns:
        _place_thought(turn, wanted)
    return _one_call_a_turn(turns) if wanted.has_one_call_a_turn else turns


def _place_thought(turn: dict[str, Any], wanted: History) -> None:
    """Put the reasoning where the template looks for it, and the text with it where both are refused."""
    thought = turn.get(wanted.thought) or turn.get("reasoning_content")
    if not thought:
        return
    if wanted.thought_or_text and turn.get("tool_calls") and (text := text_of(turn.get("content"))):
        thought, turn["content"] = f"{thought}\n\n{text}", ""
    turn[wanted.thought] = thought


def _tell_system(turns: list[dict[str, Any]], tools: Sequence[Tool]) -> None:
    """Put the tools, as JSON text, into the system's turn."""
    if not turns or turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": ""})
    turns[0] = {**turns[0], "tools": _json([tool.to_template()["function"] for tool in tools])}


def _name_results(turns: list[dict[str, Any]]) -> None:
    """Tell each result the name of its function, which some templates print."""
    names: dict[str, str] = {}
    for turn in turns:
        names |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ())}
        if turn["role"] == "tool" and (name := names.get(turn.get("tool_call_id") or "")):
            turn.setdefault("name", name)


def _shorten_ids(turns: list[dict[str, Any]]) -> None:
    """Mistral's templates refuse ids of any length but nine."""
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            call["id"] = _short_id(call["id"])
        if turn["role"] == "tool" and isinstance(turn.get("tool_call_id"), str):
            turn["tool_call_id"] = _short_id(turn["tool_call_id"])


def _short_id(own_id: str) -> str:
    if _MISTRAL_ID.fullmatch(own_id):
        return own_id
    return hashlib.sha256(own_id.encode("utf-8", "replace")).hexdigest()[:_MISTRAL_ID_CHARS]


def _one_call_a_turn(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a template takes one call of a turn, each becomes a turn, its result behind it."""
    results = {
        turn["tool_call_id"]: turn for turn in turns if turn["role"] == "tool" and turn.get("tool_call_id")
    }
    moved: set[str] = set()
    split: list[dict[str, Any]] = []
    for turn in turns:
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:  # noqa: PLR2004 - one or none
            if turn.get("tool_call_id") not in moved:
                split.append(turn)
            continue
        for index, call in enumerate(calls):
            kept = {"role": turn["role"], "content": ""} if index else turn
            split.append({**kept, "tool_calls": [call]})
            if call["id"] in results:
                split.append(results[call["id"]])
                moved.add(call["id"])
    return split


# ------------------------------------------------------------ templates that read the plainest schemas


def plain_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The declarations, in OpenAI's form, with one type and a description for each parameter.

    For templates that write a schema as types of Python: they fail where a type or a description is missing,
    and recurse without end at a union with `null`. The model is told less then than what it is held to:
    constraints follow the schema as it was given.
    """
    return [{**tool, "function": _plain_function(tool["function"])} for tool in tools]


def _plain_function(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "required": [], **function["parameters"]}
    parameters["properties"] = _plain_parts(parameters["properties"])
    return {**function, "parameters": parameters}


def _plain_parts(parts: Any) -> dict[str, Any]:
    return {name: _plain_schema(part) for name, part in parts.items()} if isinstance(parts, Mapping) else {}


def _plain_schema(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, Mapping):  # true and false are schemas
        return {"type": "string", "description": ""}
    plain = {"description": "", **schema, "type": _type_of(schema)}
    if plain["type"] == "array":
        plain["items"] = _plain_schema(schema.get("items"))
    elif plain["type"] == "object":
        plain["properties"] = _plain_parts(schema.get("properties"))
        plain["additionalProperties"] = _plain_schema(schema.get("additionalProperties"))
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


# ------------------------------------------------------------ templates that know none


def _plain(
    turns: Sequence[dict[str, Any]], spelled: Container[int], style: ToolFormat
) -> Iterator[dict[str, Any]]:
    """Calls and results of these turns as text; results share a turn with what the user says behind them."""
    results: list[str] = []
    for index, turn in enumerate(turns):
        if turn["role"] == "tool" and index in spelled:
            results.append(f"<tool_response>\n{text_of(turn.get('content'))}\n</tool_response>")
            continue
        if results and turn["role"] == "user":
            yield {**turn, "content": "\n".join([*results, text_of(turn.get("content"))])}
        else:
            if results:
                yield {"role": "user", "content": "\n".join(results)}
            yield _spelled(turn, style) if index in spelled else turn
        results = []
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _spelled(turn: dict[str, Any], style: ToolFormat) -> dict[str, Any]:
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    if any(isinstance(call, str) for call in calls):
        texts = [call if isinstance(call, str) else _json(call["function"]) for call in calls]
        written = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    else:
        written = _written([call["function"] for call in calls], style)
    content = "\n".join(text for text in (text_of(turn["content"]), written) if text)
    return {name: value for name, value in turn.items() if name != "tool_calls"} | {"content": content}


def _written(functions: Sequence[Mapping[str, Any]], style: ToolFormat) -> str:
    """Calls as the model itself would write them, so that a history shows it the form that it is to use."""
    tags = style.syntax.tags
    calls = [
        (one["name"], _json(one["arguments"]) if tags is None else tags.written(one["arguments"]))
        for one in functions
    ]
    closer = style.syntax.closer if style.prefill else ""
    return f"{style.prefill}{style.forced.written(calls)}{closer}"


def _introduce(
    turns: list[dict[str, Any]], tools: Sequence[Tool], introduction: str, *, has_system: bool
) -> None:
    """Tell the model of its tools: in the system's turn, or the user's first where there is no such turn."""
    listed = "\n".join(_json(tool.to_template()) for tool in tools)
    text = introduction.format(tools=listed)
    first = turns[0] if turns else None
    if first is not None and first["role"] == "system":
        turns[0] = {**first, "content": f"{text_of(first.get('content'))}\n\n{text}".lstrip()}
    elif has_system:
        turns.insert(0, {"role": "system", "content": text})
    else:
        at = next((index for index, turn in enumerate(turns) if turn["role"] == "user"), None)
        if at is None:
            turns.insert(0, {"role": "user", "content": text})
        else:
            turns[at] = {**turns[at], "content": f"{text}\n\n{text_of(turns[at].get('content'))}"}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
