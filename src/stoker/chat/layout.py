"""A conversation laid out: from messages, tools and a template to a prompt, and how its answer is read.

Everything here is a value of JSON, so that a worker process can do it: a template is a stranger's program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.chat.continuation import continuation_of
from stoker.chat.conversation import NO_TOOLS, Layout, ToolOffer, prepared_turn
from stoker.chat.template import template_of

__all__ = ["Conversation", "Layout", "lay_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a prompt is made of.

    Attributes:
        messages: in OpenAI's form; contents as text or parts.
        offer: of tools.
        template: Jinja source; None: the model brings none.
        bos_text, eos_text: the model's special tokens as text.
        args: further variables of the template, and `continue_final_message`.
    """

    messages: list[dict[str, Any]]
    offer: ToolOffer = NO_TOOLS
    template: str | None = None
    bos_text: str = ""
    eos_text: str = ""
    args: dict[str, Any] = field(default_factory=dict)


def lay_out(conversation: Conversation) -> Layout:
    """The prompt, and what goes with it.

    Raises:
        InvalidRequestError: the template refuses or fails on the messages, or a call in them is malformed.
        UnsupportedError: the template itself is broken.
    """
    args = dict(conversation.args)
    continuation = continuation_of(conversation.messages, args)
    turn = prepared_turn(conversation.messages, conversation.template, conversation.offer, continuation)
    args |= {"tools": turn.tools} if turn.tools else {}
    template = template_of(conversation.template, conversation.bos_text, conversation.eos_text)
    return turn.laid_out(lambda messages, /, **changes: template.render(messages, **(args | changes)))
