"""Qwen3-Coder, Qwen 3.5, Nemotron 3, Seed-OSS: each argument a `<parameter=...>` of a `<function=...>`.

Apart because each family's format is a module.
"""

from __future__ import annotations

import dataclasses

from stoker.chat.tools.syntax import CallBody, CallTags, ForcedForm, ToolFormat, ToolSyntax

_TAGS = CallTags(
    name_end=">",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
    is_padded=True,
)
QWEN_XML = ToolSyntax(
    "qwen-xml",
    "<tool_call>",
    "</tool_call>",
    body=CallBody.TAGGED,
    call_opener="<function=",
    tags=_TAGS,
)
SEED = dataclasses.replace(QWEN_XML, name="seed", opener="<seed:tool_call>", closer="</seed:tool_call>")

QWEN_XML_FORMAT = ToolFormat(
    QWEN_XML,
    ForcedForm("<tool_call>\n<function=$name>\n", "</function>\n</tool_call>", between="\n"),
    marks=(("<function=", "<parameter="),),
    control_tokens=("<tool_call>", "</tool_call>"),
)
SEED_FORMAT = ToolFormat(
    SEED,
    ForcedForm("<seed:tool_call>\n<function=$name>\n", "</function>\n</seed:tool_call>", between="\n"),
    marks=(("<seed:tool_call>",),),
    control_tokens=("<seed:tool_call>", "</seed:tool_call>"),
)
