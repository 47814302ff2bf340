"""Kimi K2: a section of calls, each `functions.name:index` and a JSON object.

Apart because each family's format is a module.
"""

from __future__ import annotations

from stoker.chat.tools.syntax import CallBody, ForcedForm, ToolFormat, ToolSyntax

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"

KIMI = ToolSyntax(
    "kimi",
    _BEGIN,
    _END,
    body=CallBody.MARKED,
    also=("<|tool_call_section_begin|>",),  # its models write that, too
    call_opener=_CALL,
    call_closer=_CALL_END,
    bare="",
    marker=_ARGUMENTS,
    name_prefix="functions.",
)

KIMI_FORMAT = ToolFormat(
    KIMI,
    ForcedForm(f"{_CALL}functions.$name:0{_ARGUMENTS}", _CALL_END, before=_BEGIN, after=_END),
    marks=(("<|tool_call_begin|>",), ("<|tool_calls_section_begin|>",)),
    control_tokens=(_BEGIN, _END, _CALL, _CALL_END, _ARGUMENTS, *KIMI.also),
)
