"""A conversation laid out: from messages, tools and a template to a prompt, and how its answer is read.

Owns the order of the steps; each is a module of its own. What goes in and comes out are values of JSON, so
that a worker process can do it: a template is a stranger's program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.chat.answer import AnswerForm
from stoker.chat.continuation import Continuation, continuation_of
from stoker.chat.reasoning import is_opened_by, reasoning_tags_of, strip_reasoning
from stoker.chat.template import LayOut, accepted, template_of
from stoker.chat.tools.constraints import MAX_FORCED_CALLS, forced_calls
from stoker.chat.tools.formats import tool_syntax_of
from stoker.chat.tools.history import TemplateInput, template_input
from stoker.chat.tools.tools import AUTO, ChoiceMode, LeftOut, Tool, ToolChoice


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """What a caller offers.

    Attributes:
        tools: what may be called.
        choice: whether and which.
        max_calls: in one answer; only 1 is kept to in an answer that is not forced.
        left_out: tools of the request that are no functions; the model is not told of them.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO
    max_calls: int = MAX_FORCED_CALLS
    left_out: tuple[LeftOut, ...] = ()


NO_TOOLS = ToolOffer()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A turn as text.

    Attributes:
        prompt: for the model.
        form: how its text is to be read.
        constraint, stops, control_tokens: as in `PreparedTurn`.
    """

    prompt: str
    form: AnswerForm
    constraint: tuple[str, str] | None = None
    stops: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """One turn before it is rendered.

    Attributes:
        messages: the template's variable.
        tools: the template's variable.
        prefill: text that the rendered prompt is continued with.
        constraint: (kind, source) of the grammar that the answer has to follow, behind its reasoning; None:
            it is free.
        stops: stop strings that end the answer behind its first call, where it may have no other.
        control_tokens: tokens that have to be spelled out in the answer's text to be seen in it.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prefill: str
    constraint: tuple[str, str] | None
    stops: tuple[str, ...]
    control_tokens: tuple[str, ...]
    _form: AnswerForm
    _continuation: Continuation | None = None

    def prompt(self, lay_out: LayOut) -> str:
        """The prompt as the template that `lay_out` renders with writes it. Raises InvalidRequestError."""
        if self._continuation is None:
            return accepted(self.messages, lay_out) + self.prefill
        return self._continuation.prompt(self.messages, self._form.tags, lay_out) + self.prefill

    def form(self, prompt: str) -> AnswerForm:
        """How the answer to the prompt is to be read."""
        tags, continued = self._form.tags, self._continuation
        if tags is None:
            return self._form
        is_reasoning = continued.is_reasoning(prompt, tags) if continued else is_opened_by(prompt, tags)
        return dataclasses.replace(self._form, is_reasoning=is_reasoning)

    def laid_out(self, lay_out: LayOut) -> Layout:
        """The turn as text, by the template that `lay_out` renders with. Raises InvalidRequestError."""
        prompt = self.prompt(lay_out)
        return Layout(
            prompt=prompt,
            form=self.form(prompt),
            constraint=self.constraint,
            stops=self.stops,
            control_tokens=self.control_tokens,
        )


def prepared_turn(
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    offer: ToolOffer = NO_TOOLS,
    continuation: Continuation | None = None,
) -> PreparedTurn:
    """The turn for a model with that chat template (Jinja source; None: it has none).

    Args:
        messages: in OpenAI's form, with contents as text.
        template: of the model.
        offer: of tools.
        continuation: what the answer goes on with; None: it is a turn of its own.

    Raises:
        InvalidRequestError: a call in the history is malformed, or the tools are too many to be forced;
            `param` names it.
    """
    tags = reasoning_tags_of(template)
    syntax = tool_syntax_of(template)
    tools = () if offer.choice.mode is ChoiceMode.NONE else offer.tools
    if continuation is not None:
        messages = continuation.marked(messages)
    kept = strip_reasoning(messages, tags)
    given: TemplateInput = template_input(kept, tools, syntax, template)
    is_forced = offer.choice.is_forced
    spelled = [*(syntax.control_tokens if tools else ()), *((tags.opener, tags.closer) if tags else ())]
    return PreparedTurn(
        messages=given.messages,
        tools=given.tools,
        # Reasoning comes first, and behind it the model opens the call by itself.
        prefill=syntax.prefill if is_forced and tags is None else "",
        constraint=forced_calls(syntax, tools, offer.choice, offer.max_calls) if is_forced else None,
        stops=(syntax.closer,) if tools and not is_forced and offer.max_calls == 1 and syntax.closer else (),
        control_tokens=tuple(spelled),
        _form=AnswerForm(syntax if tools else None, tuple(tool.name for tool in tools), tags),
        _continuation=continuation,
    )


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
