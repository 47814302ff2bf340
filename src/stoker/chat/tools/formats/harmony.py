"""gpt-oss: an answer is messages with headers, and a call one that is addressed to its function.

Apart because each family's format is a module; `channels` reads it.
"""

from __future__ import annotations

from stoker.chat.reasoning import HARMONY_TAGS
from stoker.chat.tools.syntax import CallBody, ForcedForm, History, ToolFormat, ToolSyntax

HARMONY = ToolSyntax("harmony", "<|channel|>", "<|call|>", body=CallBody.CHANNELS, bare="")

HARMONY_FORMAT = ToolFormat(
    HARMONY,
    ForcedForm(
        "<|channel|>commentary to=functions.$name <|constrain|>json<|message|>",
        "<|call|>",
        between="<|start|>assistant",
    ),
    marks=(("<|channel|>", "<|message|>"),),
    control_tokens=(
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
    history=History(has_one_call_a_turn=True, thought="thinking", thought_or_text=True),
    tags=HARMONY_TAGS,
)
