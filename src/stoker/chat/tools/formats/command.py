"""Command R7B and Command A: a JSON list behind `<|START_ACTION|>`; Command R a fenced one.

Apart because each family's format is a module.
"""

from __future__ import annotations

from stoker.chat.tools.syntax import ForcedForm, ToolFormat, ToolSyntax

_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"

COMMAND = ToolSyntax("command", _BEGIN, _END)
COMMAND_R = ToolSyntax("command-r", "Action:```json", "```", also=("Action: ```json", "Action:\n```json"))

COMMAND_FORMAT = ToolFormat(
    COMMAND,
    ForcedForm(
        '{"tool_call_id": "0", "tool_name": "$name", "parameters": ',
        "}",
        before=f"{_BEGIN}[\n    ",
        between=",\n    ",
        after=f"\n]{_END}",
    ),
    marks=(("<|START_ACTION|>",),),
    control_tokens=(_BEGIN, _END),
)
COMMAND_R_FORMAT = ToolFormat(
    COMMAND_R,
    ForcedForm(
        '{"tool_name": "$name", "parameters": ',
        "}",
        before="Action: ```json\n[\n    ",
        between=",\n    ",
        after="\n]\n```",
    ),
    marks=(("<|START_OF_TURN_TOKEN|>", "Action:"),),
)
