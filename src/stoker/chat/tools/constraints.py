"""Which texts are nothing but valid tool calls, as a grammar (SPEC D7).

Owns the grammar of a forced answer, in the form that a format declares. Arguments are a JSON object of the
tool's schema; those between tags are each held to the schema of their property, texts to what holds no
closing tag. `stoker.grammar` compiles it and bounds its schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.chat.tools.call_tags import texts_of
from stoker.chat.tools.syntax import CallTags, ToolFormat
from stoker.chat.tools.tools import ChoiceMode, Tool, ToolChoice
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
_MAX_COUNTED_CHARS = 1000
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties", "if"})


def forced_calls(
    style: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, max_calls: int = MAX_FORCED_CALLS
) -> tuple[str, str]:
    """The constraint that makes an answer of calls and nothing else, as (kind, source).

    The kind is `lark`: literal text around a JSON Schema for each tool's arguments (`%json`, as llguidance
    reads it), so that references inside a schema keep their root. The text begins behind `style.prefill`.

    Args:
        style: how the model writes calls.
        tools: at least one.
        choice: required: one call or more of any of the tools that it allows; named: exactly one of that
            tool.
        max_calls: how many calls at most; 1: exactly one.

    Raises:
        InvalidRequestError: the tools make a grammar over the limit.
    """
    assert choice.is_forced, f"{choice} forces nothing"
    if choice.mode is ChoiceMode.NAMED:
        tools, max_calls = [tool for tool in tools if tool.name == choice.name], 1
    tools = [tool for tool in tools if choice.allows(tool.name)]
    assert tools, f"{choice} has no tool to call"
    form = style.forced
    rules = [f"start: {_literal(form.before)}calls{_literal(form.after, is_last=True)}".rstrip()]
    rest = f" ({_literal(form.between)}call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    rules.append(f"calls: call{rest}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        head = form.head.replace("$name", tool.name)
        args = f"args_{index}_{_NO_RULE.sub('_', tool.name.lower())}"  # the name is for errors
        rules.append(f"call_{index}: {_literal(head)}{args}{_literal(form.tail, is_last=True)}".rstrip())
        rules += _arguments(args, tool.parameters, style.syntax.tags)
    source = "\n".join(rules) + "\n"
    if (size := len(source.encode("utf-8", "replace"))) > MAX_GRAMMAR_BYTES:
        text = f"the tools that may be forced have {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken"
        raise InvalidRequestError(text, param="tools")
    return "lark", source


def _arguments(rule: str, schema: Mapping[str, Any], tags: CallTags | None) -> list[str]:
    if tags is None:
        return [f"{rule}: %json {json.dumps(_closed(schema), ensure_ascii=False)}"]
    texts = texts_of(schema)
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    kept = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    names, rules = [], []
    for index, (name, one) in enumerate(properties.items()):
        part = f"{rule}_{index}"
        names.append(part if name in required else f"{part}?")
        before, after = tags.before(name, is_text=name in texts), tags.after
        if name in texts and not (isinstance(one, Mapping) and "enum" in one):
            rules.append(f'{part}: {_literal(before)}{part}_text "\\n"')
            rules.append(f"{part}_text[suffix={_quoted(after)}]: /(?s:.{_length(one)})/")
            continue
        rules.append(f'{part}: {_literal(before)}{part}_value {_quoted(after)} "\\n"')
        rules.append(f"{part}_value: {_value(one, kept)}")
    return [f"{rule}: {' '.join(names)}" if names else f'{rule}: ""', *rules]


def _length(schema: Any) -> str:
    """How many characters a text may have, as in a regular expression; large bounds are left out."""
    given = schema if isinstance(schema, Mapping) else {}
    least, most = (given.get(name) for name in ("minLength", "maxLength"))
    least = least if isinstance(least, int) and 0 < least <= _MAX_COUNTED_CHARS else 0
    most = most if isinstance(most, int) and least <= most <= _MAX_COUNTED_CHARS else ""
    return f"{{{least},{most}}}" if least or most != "" else "*"


def _value(schema: Any, kept: Mapping[str, Any]) -> str:
    """What stands between the tags of one argument: one of a few, or JSON."""
    given = schema if isinstance(schema, Mapping) else {}
    if given.get("enum"):
        return " | ".join(_quoted(one if isinstance(one, str) else json.dumps(one)) for one in given["enum"])
    return f"%json {json.dumps({**kept, **given, 'x-guidance': _LAYOUT}, ensure_ascii=False)}"


def _literal(text: str, *, is_last: bool = False) -> str:
    """The text as a terminal with the space that keeps it apart; nothing for no text."""
    if not text:
        return ""
    return f" {_quoted(text)}" if is_last else f"{_quoted(text)} "


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema laid out on one line, without properties that it does not list.

    What JSON Schema allows beside the listed ones, a model would have to make up. Only the outermost object
    is closed: further in, a schema may be one part of several.
    """
    closed = dict(schema)
    if not _COMPOSED & closed.keys():
        closed.setdefault("additionalProperties", False)
    return {**closed, "x-guidance": _LAYOUT}
