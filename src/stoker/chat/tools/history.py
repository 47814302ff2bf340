"""A conversation with tools as a chat template expects it (SPEC D7).

Owns what families differ in: arguments as objects, how ids look, one call a turn, and, where a template knows
no tools, everything told in plain text. Takes OpenAI's form; what the template makes of it is the template's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.chat.tools.tools import LLAMA3, MISTRAL, MISTRAL_ARGS, Tool, ToolSyntax
from stoker.chat.turns import text_of
from stoker.errors import InvalidRequestError

MAX_CALLS = 128

_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_MISTRAL_ID_CHARS = 9
_NO_SYSTEM = re.compile(r"system role (?:is )?not supported", re.IGNORECASE)

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
    """What a template is given: its variables `messages` and `tools`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def template_input(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    syntax: ToolSyntax,
    template: str | None = None,
) -> TemplateInput:
    """The conversation for a template of this family.

    Args:
        messages: in OpenAI's form; contents as text or parts.
        tools: those that the model is shown; none where it may not call any.
        syntax: the template's family.
        template: its source, to see whether it takes a system turn.

    Raises:
        InvalidRequestError: a call in the history is malformed; `param` names it.
    """
    turns = [_checked_turn(message, f"messages.{index}") for index, message in enumerate(messages)]
    if syntax.is_native:
        turns = _native(turns, syntax)
        return TemplateInput(turns, [tool.to_template() for tool in tools] or None)
    turns = list(_plain(turns))
    if tools:
        _introduce(turns, tools, has_system=not (template and _NO_SYSTEM.search(template)))
    return TemplateInput(turns, None)


# ------------------------------------------------------------ OpenAI's form, checked


def _checked_turn(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    turn = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = message.get("tool_calls")
    if not calls:
        return turn
    where = f"{where}.tool_calls"
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequestError(f"{where} is not a list of at most {MAX_CALLS} calls", param=where)
    turn["tool_calls"] = [_checked_call(call, f"{where}.{index}") for index, call in enumerate(calls)]
    turn["content"] = turn.get("content") or ""
    return turn


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidRequestError(f"{where} is not a call of a function with a name", param=where)
    arguments = _object(function.get("arguments"), f"{where}.function.arguments")
    own_id = call.get("id")
    return {
        "id": own_id if isinstance(own_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _object(arguments: Any, where: str) -> dict[str, Any]:
    """Arguments as an object; the API carries them as text."""
    if arguments is None or arguments == "":
        return {}
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where} is not a JSON object", param=where)
    return value


# ------------------------------------------------------------ templates that know tools


def _native(turns: list[dict[str, Any]], syntax: ToolSyntax) -> list[dict[str, Any]]:
    _name_results(turns)
    if syntax is LLAMA3:
        return _one_call_a_turn(turns)
    if syntax in {MISTRAL, MISTRAL_ARGS}:
        _shorten_ids(turns)
    return turns


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
    """Llama 3's templates refuse a turn with several calls: each becomes a turn, its result behind it."""
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
            split.append({**turn, "content": "" if index else turn["content"], "tool_calls": [call]})
            if call["id"] in results:
                split.append(results[call["id"]])
                moved.add(call["id"])
    return split


# ------------------------------------------------------------ templates that know none


def _plain(turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Calls and results as text; results share a turn with what the user says behind them."""
    results: list[str] = []
    for turn in turns:
        if turn["role"] == "tool":
            results.append(f"<tool_response>\n{text_of(turn.get('content'))}\n</tool_response>")
            continue
        if results and turn["role"] == "user":
            yield {**turn, "content": "\n".join([*results, text_of(turn.get("content"))])}
        else:
            if results:
                yield {"role": "user", "content": "\n".join(results)}
            yield _spelled(turn)
        results = []
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _spelled(turn: dict[str, Any]) -> dict[str, Any]:
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    written = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
    content = "\n".join([text for text in (text_of(turn["content"]),) if text] + written)
    return {name: value for name, value in turn.items() if name != "tool_calls"} | {"content": content}


def _introduce(turns: list[dict[str, Any]], tools: Sequence[Tool], *, has_system: bool) -> None:
    """Tell the model of its tools: in the system's turn, or the user's first where there is no such turn."""
    listed = "\n".join(_json(tool.to_template()) for tool in tools)
    text = _INTRODUCTION.format(tools=listed)
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
