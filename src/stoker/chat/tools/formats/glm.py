"""GLM 4.5 to 4.7: the name, then each argument as `<arg_key>` and `<arg_value>`.

Hunyuan 3 writes the same with a suffix in each tag.

Apart because each family's format is a module.
"""

from __future__ import annotations

from stoker.chat.tools.syntax import CallBody, CallTags, ForcedForm, ToolFormat, ToolSyntax

_KEY, _VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")

GLM = ToolSyntax(
    "glm",
    "<tool_call>",
    body=CallBody.TAGGED,
    tags=CallTags(name_end="", key=_KEY, value=_VALUE, end="</tool_call>"),
)

GLM_FORMAT = ToolFormat(
    GLM,
    ForcedForm("<tool_call>$name\n", "</tool_call>", between="\n"),
    marks=(("<arg_key>", "<tool_call>"),),
    control_tokens=("<tool_call>", "</tool_call>", *_KEY, *_VALUE),
)

_SUFFIX = ":opensource"
_CALLS, _CALLS_END = f"<tool_calls{_SUFFIX}>", f"</tool_calls{_SUFFIX}>"
_CALL, _CALL_END, _SEP = f"<tool_call{_SUFFIX}>", f"</tool_call{_SUFFIX}>", f"<tool_sep{_SUFFIX}>"
_HY_KEY = (f"<arg_key{_SUFFIX}>", f"</arg_key{_SUFFIX}>")
_HY_VALUE = (f"<arg_value{_SUFFIX}>", f"</arg_value{_SUFFIX}>")

HUNYUAN = ToolSyntax(
    "hunyuan",
    _CALLS,
    _CALLS_END,
    body=CallBody.TAGGED,
    call_opener=_CALL,
    tags=CallTags(name_end=_SEP, key=_HY_KEY, value=_HY_VALUE, end=_CALL_END),
)
HUNYUAN_FORMAT = ToolFormat(
    HUNYUAN,
    ForcedForm(f"{_CALL}$name{_SEP}\n", f"{_CALL_END}\n", before=f"{_CALLS}\n", after=_CALLS_END),
    marks=(("<tool_calls{}>", _SUFFIX), (_CALLS,)),
    control_tokens=(_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP, *_HY_KEY, *_HY_VALUE),
)
