"""Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Also owns the generic format, which is this one for templates that know no tools, or write them in a way
unknown here: the prompt asks for it.

Apart because each family's format is a module.
"""

from __future__ import annotations

import dataclasses

from stoker.chat.tools.syntax import ForcedForm, ToolFormat, ToolSyntax

HERMES = ToolSyntax("hermes", "<tool_call>", "</tool_call>")
GENERIC = dataclasses.replace(HERMES, name="generic")

_FORCED = ForcedForm(
    '<tool_call>\n{"name": "$name", "arguments": ',
    "}\n</tool_call>",
    between="\n",
)

HERMES_FORMAT = ToolFormat(
    HERMES,
    _FORCED,
    marks=(("<tool_call>",),),
    # Families that borrow the tag and write something other than JSON between.
    unmarked=("<function=", "<arg_key>", "<parameter=", "<invoke "),
)
GENERIC_FORMAT = ToolFormat(GENERIC, _FORCED, is_native=False)
