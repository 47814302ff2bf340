"""A conversation laid out: from messages, tools and a template to a prompt, and how its answer is read.

Owns the order of the steps. What goes in and comes out are values of JSON, so that a worker process can do
it: a template is a stranger's program.

Also owns when a last turn of the assistant is continued by the answer (prefill), as vLLM, llama-server and
others do, and the prompt that ends within the turn. The answer is the new text alone. The turn is laid out
by the template with a mark behind its text, and the prompt ends there, so that what the template puts around
it is what the model was trained with; where the template shows no mark, the text follows the opening of the
assistant's turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stoker.chat.answer import AnswerForm
from stoker.chat.reasoning import (
    WHITE,
    ReasoningTags,
    is_opened_by,
    reasoning_of,
    reasoning_tags_of,
    strip_reasoning,
)
from stoker.chat.tools.call_tags import texts_of
from stoker.chat.tools.constraints import MAX_FORCED_CALLS, forced_calls
from stoker.chat.tools.formats.table import format_named, format_of
from stoker.chat.tools.history import TemplateInput, plain_tools, template_input
from stoker.chat.tools.tools import AUTO, ChoiceMode, LeftOut, Tool, ToolChoice
from stoker.chat.turn_ends import turn_ends_of
from stoker.chat.turns import LayOut, accepted, text_of, without_changing_line
from stoker.errors import InvalidRequestError

_MARK = "StokerGoesOnHere"
_CONTINUE, _OPEN = "continue_final_message", "add_generation_prompt"


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the answer goes on with: content, or reasoning where there is none; both empty: a new turn's."""

    content: str
    reasoning: str

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with the mark behind the last turn's text."""
        *before, last = map(dict, messages)
        if self.content or not self.reasoning:
            return [*before, {**last, "content": self.content + _MARK}]
        return [*before, {**last, "content": "", "reasoning_content": self.reasoning + _MARK}]

    def prompt(self, marked: Sequence[Mapping[str, Any]], tags: ReasoningTags | None, lay_out: LayOut) -> str:
        """The prompt that ends with the given text. Raises InvalidRequestError."""
        if self.content or self.reasoning:
            with contextlib.suppress(InvalidRequestError):  # some templates want the user's turn last
                before, found, _ = accepted(marked, lay_out, **{_OPEN: False}).rpartition(_MARK)
                if found:
                    return self._closed(before, tags)
        if len(marked) == 1:
            text = "a last assistant turn is continued: the template wants a turn before it"
            raise InvalidRequestError(text, param="messages")
        return self._behind(accepted(marked[:-1], lay_out, **{_OPEN: True}), tags)

    def is_reasoning(self, prompt: str, tags: ReasoningTags) -> bool:
        """Whether the answer to the prompt begins inside reasoning."""
        if self.content:
            return self.content.lstrip(WHITE).startswith(tags.opener) and tags.closer not in self.content
        return bool(self.reasoning) or is_opened_by(prompt, tags)

    def _closed(self, prompt: str, tags: ReasoningTags | None) -> str:
        """The prompt as the template wrote it; where that puts the content inside reasoning, it is closed."""
        head = prompt.removesuffix(self.content.lstrip(WHITE)) if self.content else prompt
        if tags is None or head == prompt or not is_opened_by(head, tags):
            return prompt
        return self._behind(head, tags)

    def _behind(self, prompt: str, tags: ReasoningTags | None) -> str:
        """The text behind a prompt that opens the assistant's turn, and perhaps its reasoning."""
        if tags is None:
            return prompt + self.content
        bare, is_open = prompt.rstrip(WHITE), is_opened_by(prompt, tags)
        if self.content.lstrip(WHITE).startswith(tags.opener):
            return (bare.removesuffix(tags.opener) if is_open else prompt) + self.content
        if tags.closer in self.content:
            return prompt + self.content
        if self.reasoning and bare.endswith(tags.closer):  # what the template closed was empty
            prompt = bare.removesuffix(tags.closer).rstrip(WHITE).removesuffix(tags.opener)
        if not (is_open or self.reasoning):
            return prompt + self.content
        opened = prompt if is_open else f"{prompt}{tags.opener}\n"
        return opened + self.reasoning + (f"\n{tags.closer}\n\n{self.content}" if self.content else "")


def continuation_of(messages: Sequence[Mapping[str, Any]], args: dict[str, Any]) -> Continuation | None:
    """What the answer is to go on with; None: it is a turn of its own.

    A last turn of the assistant without calls is continued, unless `args` say otherwise.

    Args:
        messages: with contents as text, as far as they are continued.
        args: variables of the template; `continue_final_message`, which is none, is taken out.

    Raises:
        InvalidRequestError: it is asked for and cannot be, or a new turn is asked for as well.
    """
    wanted, opens = args.pop(_CONTINUE, None), args.get(_OPEN)
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if wanted and opens:
        raise InvalidRequestError(f"{_OPEN} and {_CONTINUE} cannot both be true", param=_CONTINUE)
    if wanted and (last.get("role") != "assistant" or last.get("tool_calls")):
        text = f"{_CONTINUE}: the last message is no text of the assistant, so it cannot be continued"
        raise InvalidRequestError(text, param=_CONTINUE)
    is_continued = wanted or (wanted is None and not opens)
    if not is_continued or last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    return Continuation(text_of(last.get("content")), reasoning_of(last))


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """What a caller offers.

    Attributes:
        tools: what may be called.
        choice: whether and which.
        max_calls: in one answer; only 1 is kept to in an answer that is not forced.
        left_out: tools of the request that are no functions; the model is not told of them.
        tool_format: the name of the format of calls; None: the model's own.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO
    max_calls: int = MAX_FORCED_CALLS
    left_out: tuple[LeftOut, ...] = ()
    tool_format: str | None = None


NO_TOOLS = ToolOffer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a prompt is made of.

    Attributes:
        messages: in OpenAI's form; contents as text or parts.
        offer: of tools.
        template: Jinja source.
        bos_text, eos_text: the model's special tokens as text.
        args: further variables of the template, and `continue_final_message`.
    """

    messages: list[dict[str, Any]]
    template: str
    offer: ToolOffer = NO_TOOLS
    bos_text: str = ""
    eos_text: str = ""
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A turn as text.

    Attributes:
        prompt: for the model.
        form: how its text is to be read.
        constraint, stops, control_tokens, num_spelled: as in `PreparedTurn`.
    """

    prompt: str
    form: AnswerForm
    constraint: tuple[str, str] | None = None
    stops: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = ()
    num_spelled: int = 0


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """One turn before it is rendered.

    Attributes:
        messages: the template's variable.
        tools: the template's variable.
        prefill: text that the rendered prompt is continued with.
        constraint: (kind, source) of the grammar that the answer has to follow, behind its reasoning; None:
            it is free.
        stops: strings that end the answer: the end of its turn, and what is behind its first call, where it
            may have no other.
        control_tokens: tokens that have to be spelled out in the answer's text to be seen in it.
        num_spelled: earlier turns whose malformed calls the model is shown as text.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prefill: str
    constraint: tuple[str, str] | None
    stops: tuple[str, ...]
    control_tokens: tuple[str, ...]
    num_spelled: int
    _form: AnswerForm
    _continuation: Continuation | None = None

    def prompt(self, lay_out: LayOut) -> str:
        """The prompt as the template that `lay_out` renders with writes it.

        Raises:
            InvalidRequestError: it takes the conversation in no form, nor tools in plainer words.
        """
        try:
            return self._prompt(lay_out)
        except InvalidRequestError:
            if self.tools:
                with contextlib.suppress(InvalidRequestError):
                    return self._prompt(partial(lay_out, tools=plain_tools(self.tools)))
            raise

    def _prompt(self, lay_out: LayOut) -> str:
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
            num_spelled=self.num_spelled,
        )


def prepared_turn(
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    offer: ToolOffer = NO_TOOLS,
    continuation: Continuation | None = None,
    eos_text: str = "",
) -> PreparedTurn:
    """The turn for a model with that chat template (Jinja source; None: it has none).

    Args:
        messages: in OpenAI's form, with contents as text.
        template: of the model.
        offer: of tools.
        continuation: what the answer goes on with; None: it is a turn of its own.
        eos_text: the token that ends the model's text in any case.

    Raises:
        InvalidRequestError: the tools are too many to be forced, or there is no format of that name; `param`
            names it.
    """
    style = format_named(offer.tool_format) if offer.tool_format else format_of(template)
    tags = style.tags or reasoning_tags_of(template)
    syntax = style.syntax
    tools = () if offer.choice.mode is ChoiceMode.NONE else offer.tools
    if continuation is not None:
        messages = continuation.marked(messages)
    kept = strip_reasoning(without_changing_line(messages), tags)
    given: TemplateInput = template_input(kept, tools, style, template)
    is_forced = offer.choice.is_forced
    ends = turn_ends_of(template, eos_text)
    spelled = [*(style.control_tokens if tools or style.tags else ()), *(tags.spelled if tags else ()), *ends]
    stop = style.stop if tools and not is_forced and offer.max_calls == 1 else ""
    texts = {tool.name: texts_of(tool.parameters) for tool in tools} if syntax.tags else {}
    return PreparedTurn(
        messages=given.messages,
        tools=given.tools,
        # Reasoning comes first, and behind it the model opens the call by itself.
        prefill=style.prefill if is_forced and tags is None else "",
        constraint=forced_calls(style, tools, offer.choice, offer.max_calls) if is_forced else None,
        stops=(*ends, *([stop] if stop else ())),
        control_tokens=tuple(spelled),
        num_spelled=given.num_spelled,
        _form=AnswerForm(
            syntax if tools else None,
            tuple(tool.name for tool in tools if offer.choice.allows(tool.name)),
            tags,
            texts=texts,
            refused=tuple(tool.name for tool in tools if not offer.choice.allows(tool.name)),
        ),
        _continuation=continuation,
    )


def lay_out(conversation: Conversation) -> Layout:
    """The prompt, and what goes with it.

    Raises:
        InvalidRequestError: the template refuses or fails on the messages.
        UnsupportedError: the template itself is broken.
    """
    from stoker.chat.template import template_of  # noqa: PLC0415 - only worker processes render

    args = dict(conversation.args)
    continuation = continuation_of(conversation.messages, args)
    source, eos_text = conversation.template, conversation.eos_text
    turn = prepared_turn(conversation.messages, source, conversation.offer, continuation, eos_text)
    args |= {"tools": turn.tools} if turn.tools else {}
    template = template_of(source, conversation.bos_text, eos_text)
    return turn.laid_out(lambda messages, /, **changes: template.render(messages, **(args | changes)))
