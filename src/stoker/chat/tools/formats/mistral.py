"""Mistral: a list behind `[TOOL_CALLS]` up to its tokenizer 7, from 11 on `[TOOL_CALLS]name[ARGS]{...}`.

Apart because each family's format is a module.
"""

from __future__ import annotations

from stoker.chat.tools.syntax import CallBody, ForcedForm, History, ToolFormat, ToolSyntax

MISTRAL = ToolSyntax("mistral", "[TOOL_CALLS]")
MISTRAL_ARGS = ToolSyntax("mistral-args", "[TOOL_CALLS]", body=CallBody.MARKED, bare="", marker="[ARGS]")

MISTRAL_FORMAT = ToolFormat(
    MISTRAL,
    ForcedForm('{"name": "$name", "arguments": ', "}", before="[", between=", ", after="]"),
    marks=(("[TOOL_CALLS]",),),
    unmarked=("[ARGS]",),
    control_tokens=("[TOOL_CALLS]",),
    prefill="[TOOL_CALLS]",
    history=History(has_short_ids=True),
)
MISTRAL_ARGS_FORMAT = ToolFormat(
    MISTRAL_ARGS,
    ForcedForm("[TOOL_CALLS]$name[ARGS]"),
    marks=(("[TOOL_CALLS]", "[ARGS]"),),
    control_tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    history=History(has_short_ids=True),
)
