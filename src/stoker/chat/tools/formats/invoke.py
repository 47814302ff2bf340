"""Formats that name the tool and each argument in attributes of tags.

Those of MiniMax M2, DeepSeek V3.2 and V4, and MiniCPM 5.
"""

# ruff: noqa: RUF001 - the tokens of DeepSeek have wide bars

from __future__ import annotations

import dataclasses

from stoker.chat.tools.syntax import CallBody, CallTags, ForcedForm, ToolFormat, ToolSyntax


def _sections(name: str, mark: str, section: str, kinds: tuple[str, ...] = ()) -> ToolFormat:
    """A format of sections of `<invoke name="...">`, each argument a `<parameter name="...">`.

    Args:
        name: of the format.
        mark: what stands before `invoke` and `parameter` in each tag.
        section: the tag around the calls.
        kinds: as of `CallTags`.
    """
    opener, closer, call_end = f"<{section}>", f"</{section}>", f"</{mark}invoke>"
    tags = CallTags(
        name_end='">',
        key=(f'<{mark}parameter name="', '">'),
        value=("", f"</{mark}parameter>"),
        end=call_end,
        kinds=kinds,
    )
    call_opener = f'<{mark}invoke name="'
    syntax = ToolSyntax(name, opener, closer, body=CallBody.TAGGED, call_opener=call_opener, tags=tags)
    forced = ForcedForm(f'{call_opener}$name">\n', f"{call_end}\n", before=f"{opener}\n", after=closer)
    return ToolFormat(syntax, forced, marks=((opener,),), control_tokens=(opener, closer))


_DEEPSEEK = "｜DSML｜"
_KINDS = ('" string="true', '" string="false')

MINIMAX_FORMAT = _sections("minimax", "", "minimax:tool_call")
DEEPSEEK_V32_FORMAT = dataclasses.replace(
    _sections("deepseek-v3.2", _DEEPSEEK, f"{_DEEPSEEK}function_calls", _KINDS),
    marks=((_DEEPSEEK,),),
    unmarked=("tool_calls>",),
    control_tokens=(_DEEPSEEK,),
)
DEEPSEEK_V4_FORMAT = dataclasses.replace(
    _sections("deepseek-v4", _DEEPSEEK, f"{_DEEPSEEK}tool_calls", _KINDS),
    marks=((_DEEPSEEK, "tool_calls>"),),
    control_tokens=(_DEEPSEEK,),
)

MINICPM = ToolSyntax(
    "minicpm",
    '<function name="',
    body=CallBody.TAGGED,
    bare="",
    tags=CallTags(
        name_end='">',
        key=('<param name="', '">'),
        value=("", "</param>"),
        end="</function>",
        wrapper=("<![CDATA[", "]]>"),
    ),
)
MINICPM_FORMAT = ToolFormat(
    MINICPM,
    ForcedForm('<function name="$name">', "</function>", between="\n"),
    marks=(('<function name="', '<param name="'),),
)
