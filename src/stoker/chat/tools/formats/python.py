"""Llama 4, LFM2 and Llama 3.2's Python: a list of calls, `[name(key=value), ...]`.

Apart because each family's format is a module.
"""

from __future__ import annotations

from stoker.chat.tools.syntax import CallBody, ForcedForm, ToolFormat, ToolSyntax

PYTHON = ToolSyntax("python", "<|python_start|>", "<|python_end|>", body=CallBody.LITERAL)
LFM2 = ToolSyntax("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", body=CallBody.LITERAL)

_OBJECTS = ForcedForm('{"name": "$name", "arguments": ', "}", before="[", between=", ", after="]")

PYTHON_FORMAT = ToolFormat(
    PYTHON,
    _OBJECTS,
    marks=(("<|python_start|>",),),
    control_tokens=("<|python_start|>", "<|python_end|>"),
)
LFM2_FORMAT = ToolFormat(
    LFM2,
    _OBJECTS,
    marks=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [", "<|im_start|>")),
    control_tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    prefill="<|tool_call_start|>",
)
