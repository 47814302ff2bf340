"""Which texts are nothing but valid tool calls, as a grammar (SPEC D7).

Owns the grammar of a forced answer. `stoker.grammar` compiles it and bounds its schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.chat.tools.tools import ChoiceMode, Tool, ToolChoice, ToolSyntax
from stoker.errors import InvalidRequestError

MAX_FORCED_CALLS = 8  # a small model that is not made to stop would call until max_tokens cuts it short
MAX_GRAMMAR_BYTES = 128 * 1024

_NO_RULE = re.compile(r"[^a-z0-9_]")
_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # No \uXXXX: a key spelled with one would escape what is said of its plain spelling.
    "json_allowed_escapes": 'nrbtf\\"',
}
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties", "if"})


def forced_calls(
    syntax: ToolSyntax, tools: Sequence[Tool], choice: ToolChoice, max_calls: int = MAX_FORCED_CALLS
) -> tuple[str, str]:
    """The constraint that makes an answer of calls and nothing else, as (kind, source).

    The kind is `lark`: literal text around a JSON Schema for each tool's arguments (`%json`, as llguidance
    reads it), so that references inside a schema keep their root. The text begins behind `syntax.prefill`.

    Args:
        syntax: how the model writes calls.
        tools: at least one.
        choice: required: one call or more of any of the tools; named: exactly one of that tool.
        max_calls: how many calls at most; 1: exactly one.

    Raises:
        InvalidRequestError: the tools make a grammar over the limit.
    """
    assert choice.is_forced, f"{choice} forces nothing"
    if choice.mode is ChoiceMode.NAMED:
        tools, max_calls = [tool for tool in tools if tool.name == choice.name], 1
    assert tools, f"{choice} has no tool to call"
    before, between, after = _around(syntax)
    rules = [f"start: {_literal(before)}calls{_literal(after, is_last=True)}".rstrip()]
    rest = f" ({_literal(between)}call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    rules.append(f"calls: call{rest}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        head, tail = _call(syntax, tool.name)
        args = f"args_{index}_{_NO_RULE.sub('_', tool.name.lower())}"  # the name is for errors
        rules.append(f"call_{index}: {_literal(head)}{args}{_literal(tail, is_last=True)}".rstrip())
        rules.append(f"{args}: %json {json.dumps(_closed(tool.parameters), ensure_ascii=False)}")
    source = "\n".join(rules) + "\n"
    if (size := len(source.encode("utf-8", "replace"))) > MAX_GRAMMAR_BYTES:
        text = f"the tools that may be forced have {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken"
        raise InvalidRequestError(text, param="tools")
    return "lark", source


def _around(syntax: ToolSyntax) -> tuple[str, str, str]:
    """Text before all calls, between two of them, and after all."""
    if syntax.is_list:
        return "[", ", ", "]"
    if syntax.closer:
        return "", "\n", ""
    return "", f"{syntax.separator} " if syntax.separator else "", ""


def _call(syntax: ToolSyntax, name: str) -> tuple[str, str]:
    """Text before and after the arguments of a call."""
    if syntax.marker:
        return f"{syntax.opener}{name}{syntax.marker}", ""
    head = f'{{"name": {json.dumps(name)}, {json.dumps(syntax.arguments_key)}: '
    if syntax.closer:
        return f"{syntax.opener}\n{head}", f"}}\n{syntax.closer}"
    return head, "}"


def _literal(text: str, *, is_last: bool = False) -> str:
    """The text as a terminal with the space that keeps it apart; nothing for no text."""
    if not text:
        return ""
    return f" {json.dumps(text)}" if is_last else f"{json.dumps(text)} "


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema laid out on one line, without properties that it does not list.

    What JSON Schema allows beside the listed ones, a model would have to make up. Only the outermost object
    is closed: further in, a schema may be one part of several.
    """
    closed = dict(schema)
    if not _COMPOSED & closed.keys():
        closed.setdefault("additionalProperties", False)
    return {**closed, "x-guidance": _LAYOUT}
