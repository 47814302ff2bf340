"""Gemma 4 and FunctionGemma: `call:name{key:value}` with marks around texts; Gemma 3, asked for JSON.

Gemma 3's template knows no tools: the prompt tells it of them in the words that it was trained with. It
answers with JSON or with Python, at times in a fence.

Apart because each family's format is a module.
"""

from __future__ import annotations

from stoker.chat.tools.syntax import CallBody, ForcedForm, ToolFormat, ToolSyntax

GEMMA4 = ToolSyntax(
    "gemma4",
    "<|tool_call>call:",
    "<tool_call|>",
    body=CallBody.LITERAL,
    quote='<|"|>',
)
FUNCTION_GEMMA = ToolSyntax(
    "functiongemma",
    "<start_function_call>call:",
    "<end_function_call>",
    body=CallBody.LITERAL,
    quote="<escape>",
)
GEMMA3 = ToolSyntax("gemma3", "```tool_code", "```", body=CallBody.LITERAL)

GEMMA4_FORMAT = ToolFormat(
    GEMMA4,
    ForcedForm("<|tool_call>call:$name", "<tool_call|>"),
    marks=(("<|tool_call>", "call:"),),
    control_tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
)
FUNCTION_GEMMA_FORMAT = ToolFormat(
    FUNCTION_GEMMA,
    ForcedForm("<start_function_call>call:$name", "<end_function_call>"),
    marks=(("<start_function_call>",),),
    control_tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
)
GEMMA3_FORMAT = ToolFormat(
    GEMMA3,
    ForcedForm('{"name": "$name", "parameters": ', "}", between="\n"),
    marks=(("<start_of_turn>",),),
    is_native=False,
    introduction="""\
You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of
{{"name": function name, "parameters": dictionary of argument name and its value}}

You SHOULD NOT include any other text in the response if you call a function
{tools}""",
)
