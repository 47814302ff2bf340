"""Formats whose calls are a JSON list, or objects, between two marks.

Those of Granite 3, Phi-4-mini, Nemotron Nano 2, Apriel and MiniMax M1. Apart because
each kind of format is a module.
"""

from __future__ import annotations

from stoker.chat.tools.syntax import ForcedForm, History, ToolFormat, ToolSyntax

GRANITE = ToolSyntax(
    "granite", "<|tool_call|>", also=("<tool_call>",), also_closers=("</tool_call>",)
)  # 3.0 and small models write the second spelling, and the template of 3.3 writes old calls so
PHI4 = ToolSyntax("phi4", "<|tool_call|>", "<|/tool_call|>", also=("functools",))
NEMOTRON = ToolSyntax("nemotron", "<TOOLCALL>", "</TOOLCALL>")
APRIEL = ToolSyntax("apriel", "<tool_calls>", "</tool_calls>")
MINIMAX_M1 = ToolSyntax("minimax-m1", "<tool_calls>", "</tool_calls>")

_HEAD, _TAIL = '{"name": "$name", "arguments": ', "}"
_LIST = ForcedForm(_HEAD, _TAIL, before="[", between=", ", after="]")

GRANITE_FORMAT = ToolFormat(
    GRANITE,
    _LIST,
    marks=(("<|tool_call|>", "<|start_of_role|>"),),
    control_tokens=("<|tool_call|>", "<tool_call>", "</tool_call>"),
    prefill="<|tool_call|>",
)
PHI4_FORMAT = ToolFormat(
    PHI4,
    _LIST,
    marks=(("<|tool|>",), ("<|tool_call|>",)),
    control_tokens=("<|tool_call|>", "<|/tool_call|>"),
    prefill="<|tool_call|>",
    history=History(tools_in_system=True),
)
NEMOTRON_FORMAT = ToolFormat(
    NEMOTRON,
    ForcedForm(_HEAD, _TAIL, before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
    marks=(("<TOOLCALL>",),),
    control_tokens=("<TOOLCALL>", "</TOOLCALL>"),
)
APRIEL_FORMAT = ToolFormat(
    APRIEL,
    ForcedForm(_HEAD, _TAIL, before="<tool_calls>[", between=", ", after="]</tool_calls>"),
    marks=(("<tool_calls>[", "</tool_calls>"),),
    control_tokens=("<tool_calls>", "</tool_calls>"),
    history=History(thought="thought"),
)
MINIMAX_M1_FORMAT = ToolFormat(
    MINIMAX_M1,
    ForcedForm(_HEAD, _TAIL, before="<tool_calls>\n", between="\n", after="\n</tool_calls>"),
    marks=(("<tool_calls></tool_calls>", "<beginning_of_sentence>"),),
    control_tokens=("<tool_calls>", "</tool_calls>"),
)
