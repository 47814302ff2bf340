"""How a model writes tool calls: the text around and inside them, found from its chat template.

Owns the written form of each family: `calls` reads it, `history` writes it, `constraints` force it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """One family's way to write calls.

    Attributes:
        name: of the family, for people and logs.
        opener: the text before a call; of a list, before the list.
        closer: the text after a call; empty: a call ends with its last brace.
        bare: characters that a call without its opener begins with, where it stands alone; empty: none is
            taken.
        separator: what may stand between two calls besides white space.
        marker: between the name and the arguments, for families that do not write one JSON object.
        arguments_key: key of the arguments in the object.
        is_list: calls stand in one JSON list, however few.
        is_native: the template takes `tools` itself; else the system prompt has to tell the model.
        control_tokens: tokens that have to be spelled out in the text for a call to be seen.
        prefill: what a forced call's prompt ends with, so that the constraint begins behind it.
    """

    name: str
    opener: str
    closer: str = ""
    bare: str = "{["
    separator: str = ""
    marker: str = ""
    arguments_key: str = "arguments"
    is_list: bool = False
    is_native: bool = True
    control_tokens: tuple[str, ...] = ()
    prefill: str = ""


HERMES = ToolSyntax("hermes", "<tool_call>", "</tool_call>")
"""Hermes, Qwen 2.5 and 3, SmolLM3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

LLAMA3 = ToolSyntax(
    "llama3",
    "<|python_tag|>",
    separator=";",
    arguments_key="parameters",
    control_tokens=("<|python_tag|>",),
)
"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, at times behind a tag."""

MISTRAL = ToolSyntax(
    "mistral",
    "[TOOL_CALLS]",
    is_list=True,
    control_tokens=("[TOOL_CALLS]",),
    prefill="[TOOL_CALLS]",
)
"""Mistral up to its tokenizer 7: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""

MISTRAL_ARGS = ToolSyntax(
    "mistral-args",
    "[TOOL_CALLS]",
    bare="",
    marker="[ARGS]",
    control_tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
"""Mistral from its tokenizer 11 on: `[TOOL_CALLS]name[ARGS]{...}`, once a call."""

GENERIC = ToolSyntax("generic", "<tool_call>", "</tool_call>", is_native=False)
"""A template that knows no tools, or writes them in a way unknown here: asked for the first family's way."""

_TOOLS = re.compile(r"\btools\b")
# Families that borrow the first one's tag and write something other than JSON between.
_FOREIGN = ("<function=", "<arg_key>", "<parameter=")


@lru_cache(maxsize=64)
def tool_syntax_of(template: str | None) -> ToolSyntax:
    """The family whose template this is (Jinja source; None: the model has none).

    A template is taken at its word only where it gets the tools by itself and spells out the family's form.
    """
    if not template or not _TOOLS.search(template):
        return GENERIC
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and not any(mark in template for mark in _FOREIGN):
        return HERMES
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return GENERIC
