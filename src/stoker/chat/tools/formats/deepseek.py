"""DeepSeek V3 and R1: a name and a fenced JSON object; V3.1 without a fence.

Apart because each family's format is a module; V3.2 and V4 are in `invoke`.
"""

# ruff: noqa: RUF001 - its tokens have wide bars

from __future__ import annotations

import dataclasses

from stoker.chat.tools.syntax import CallBody, ForcedForm, ToolFormat, ToolSyntax

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_KIND = f"function{_SEP}"

DEEPSEEK = ToolSyntax(
    "deepseek",
    _BEGIN,
    _END,
    body=CallBody.MARKED,
    also=(
        "<｜tool_calls_begin｜>",
        "<｜tool calls begin｜>",
        "<｜tool\\_calls\\_begin｜>",
        "<｜tool▁calls｜>",
    ),
    call_opener=_CALL,
    call_closer=_CALL_END,
    bare="",
    marker="```json",
    name_prefix=_KIND,
)
DEEPSEEK_V31 = dataclasses.replace(DEEPSEEK, name="deepseek-v3.1", marker=_SEP, name_prefix="")
_TOKENS = (_BEGIN, _END, _CALL, _CALL_END, _SEP)

DEEPSEEK_FORMAT = ToolFormat(
    DEEPSEEK,
    ForcedForm(
        f"{_CALL}{_KIND}$name\n```json\n", f"\n```{_CALL_END}", before=_BEGIN, between="\n", after=_END
    ),
    marks=((_BEGIN, "```json"),),
    control_tokens=_TOKENS,
)
DEEPSEEK_V31_FORMAT = ToolFormat(
    DEEPSEEK_V31,
    ForcedForm(f"{_CALL}$name{_SEP}", _CALL_END, before=_BEGIN, after=_END),
    marks=((_BEGIN,), (_CALL,)),
    unmarked=("```json",),
    control_tokens=_TOKENS,
)
