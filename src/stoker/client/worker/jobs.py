"""What a worker process can be asked to do: values in, values out, nothing kept between two jobs."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from stoker.chat.layout import Conversation, Layout, lay_out
from stoker.ipc.constraint import Constraint, NativeGrammar


class RenderChat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Render a conversation with the chat template of a model; answered with a `Layout`."""

    model: str
    conversation: Conversation

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return f"the chat template of {self.model}"

    @property
    def param(self) -> str:
        """The request field at fault where it fails."""
        return "messages"

    @property
    def remedy(self) -> str:
        """What helps where it takes too long or too much."""
        return "shorten the conversation, or use a model with another template"


class TranslateGrammar(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check a constraint and translate it for the grammar engine; answered with a `NativeGrammar`."""

    constraint: Constraint

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return f"the {self.constraint.kind.label}"

    @property
    def param(self) -> str:
        """The request field at fault where it fails."""
        return self.constraint.param

    @property
    def remedy(self) -> str:
        """What helps where it takes too long or too much."""
        return "make it smaller or less recursive"


Job: TypeAlias = RenderChat | TranslateGrammar


def do(job: Job) -> Layout | NativeGrammar:
    """The answer to a job. Raises whatever the work raises."""
    match job:
        case RenderChat(conversation=conversation):
            return lay_out(conversation)
        case TranslateGrammar(constraint=constraint):
            from stoker.grammar.source import native_grammar  # noqa: PLC0415 - a chat loads none of it

            return native_grammar(constraint)
