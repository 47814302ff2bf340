"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, at times behind a tag.

Functionary 3.1 is one of them, trained to write `<function=name>{...}</function>`.

Apart because each family's format is a module.
"""

from __future__ import annotations

from stoker.chat.tools.syntax import CallBody, ForcedForm, History, ToolFormat, ToolSyntax

LLAMA3 = ToolSyntax("llama3", "<|python_tag|>", separator=";")

LLAMA3_FORMAT = ToolFormat(
    LLAMA3,
    ForcedForm('{"name": "$name", "parameters": ', "}", between="; "),
    marks=(("<|start_header_id|>", '"parameters"'),),
    control_tokens=("<|python_tag|>",),
    history=History(has_one_call_a_turn=True),
)

FUNCTIONARY = ToolSyntax(
    "functionary", "<function=", "</function>", body=CallBody.MARKED, bare="", marker=">"
)

FUNCTIONARY_FORMAT = ToolFormat(
    FUNCTIONARY,
    ForcedForm("<function=$name>", "</function>"),
    marks=(("<function=", "</function>"),),
    unmarked=("<parameter=", "<tool_call>"),
)
