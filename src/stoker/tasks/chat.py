"""Conversations: from messages and tools to one request, and from its text to answers (SPEC D7).

Owns what the library and the HTTP routes have in common there: the prompt, the form of the answer, how the
form is kept with the request, and one reader a choice. Templates and parsing are `stoker.chat`'s, the process
that they run in `stoker.client.worker`'s, what an answer looks like on the wire is the server's.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stoker.chat.answer import AnswerForm, AnswerReader, WholeCall
from stoker.chat.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    CallBroken,
    CallCut,
    CallEnded,
    Reasoning,
)
from stoker.chat.conversation import NO_TOOLS, Conversation, Layout, ToolOffer
from stoker.chat.tools.constraints import MAX_FORCED_CALLS
from stoker.chat.tools.formats.table import format_named
from stoker.chat.tools.tools import ChoiceMode, LeftOut, checked_choice, checked_toolset
from stoker.client.client import require_generating
from stoker.client.requests.stream import TextDelta, ToolCall
from stoker.client.worker.jobs import RenderChat
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.images.turns import Given, illustrated
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.events import Delta
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import IMAGE_MARKER, MAX_STOPS, FinishReason
from stoker.ipc.usage import TokenLogprob
from stoker.tasks.fields import Message, stops_of, turns_of
from stoker.tasks.functions import described

log = logging.getLogger(__name__)

PLAIN = AnswerForm()
"""Nothing is looked for in the text; it is content as it comes."""

_THINKING = frozenset({"enable_thinking", "reasoning_effort"})
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnswerForm).decode


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A conversation ready to be run.

    Attributes:
        layout: the conversation as text, and what holds for the answer.
        images: what the prompt's markers stand for, in their order.
        left_out: tools that the model is not told of.
    """

    layout: Layout
    images: tuple[Given, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def prompt(self) -> str:
        """For the model."""
        return self.layout.prompt

    @property
    def form(self) -> AnswerForm:
        """How the answer's text is to be read."""
        return self.layout.form

    def fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a `GenerateRequest`: `given`, by their names, with what the conversation adds.

        Raises:
            InvalidRequestError: a call is forced, and a constraint is given that is no format of the answer.
        """
        return {
            **given,
            "is_chat": True,
            "stop": _with_stops(stops_of(given.get("stop")), self.layout.stops),
            "spelled": self.layout.control_tokens,
            "constraint": self._constraint(given.get("constraint")),
            "note": b"" if self.form == PLAIN else _encode(self.form),
        }

    def _constraint(self, asked: Constraint | None) -> Constraint | None:
        """What the answer has to match, behind its reasoning: a forced call, or what is asked for.

        A format is that of a text, and an answer that is a call has none: clients send both together.
        """
        if self.layout.constraint is not None:
            if asked is not None and not asked.is_format:
                text = f"tool_choice forces a call: {asked.param} cannot be asked for with it"
                raise InvalidRequestError(text, param="tool_choice")
            kind, source = self.layout.constraint
            asked = Constraint(kind=ConstraintKind(kind), source=source, asked_as="tools")
        if asked is None or self.form.tags is None:
            return asked
        if self.form.tags.final and self.layout.constraint is None:
            return msgspec.structs.replace(asked, reasoning_end=self.form.tags.final)
        opener = "" if self.form.is_reasoning else self.form.tags.opener
        return msgspec.structs.replace(asked, reasoning_start=opener, reasoning_end=self.form.tags.closer)


def _with_stops(asked: tuple[str, ...], own: Sequence[str]) -> tuple[str, ...]:
    """The caller's stop strings, and of those of the conversation as many as there is room for."""
    return asked + tuple(own)[: max(0, MAX_STOPS - len(asked))]


def chat_job(
    info: ModelInfo,
    messages: str | Sequence[Message],
    offer: ToolOffer = NO_TOOLS,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[RenderChat, tuple[Given, ...]]:
    """What a worker process has to lay out, and the images of it; it takes longer the larger `messages` are.

    Args:
        info: of the model.
        messages: in OpenAI's form; contents as text or parts. A text is one turn, the user's.
        offer: of tools.
        template_args: further variables of the model's chat template; with `continue_final_message` true the
            last turn, which has to be the assistant's, is continued, with false it is not (None: it is).

    Raises:
        InvalidRequestError: they are no messages, or an image in them is malformed.
        UnsupportedError: there are images and it reads none, it is an encoder, or it has no chat template.
    """
    turns, images = illustrated(turns_of(messages), info)
    require_generating(info)
    if not info.chat_template:
        text = (
            f"{info.id} is {info.class_text} without a chat template: send it a text as a prompt, or serve it"
            " with a template for conversations (chat_template, --chat-template FILE)"
        )
        raise UnsupportedError(text, param="messages")
    conversation = Conversation(
        messages=turns,
        offer=replace(offer, tool_format=offer.tool_format or info.tool_format),
        template=info.chat_template,
        bos_text=info.bos_text,
        eos_text=info.eos_text,
        args=_with_thinking(info, template_args or {}),
    )
    return RenderChat(model=info.id, conversation=conversation), images


def effort_args(effort: str) -> dict[str, Any]:
    """The variables by which templates know how much the model is to think; "none": not at all."""
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


def _with_thinking(info: ModelInfo, given: Mapping[str, Any]) -> dict[str, Any]:
    """The variables; where they say nothing of thinking, what is so by default: on, off, or how hard."""
    default = info.thinking
    if default is None or _THINKING.intersection(given):
        return dict(given)
    return {**(effort_args(default) if isinstance(default, str) else {"enable_thinking": default}), **given}


def planned(job: RenderChat, images: tuple[Given, ...], layout: Layout) -> ChatPlan:
    """The plan of a conversation that was laid out.

    Raises:
        InvalidRequestError: the template left an image out, or shows one twice.
    """
    if layout.num_spelled:
        text = "%d earlier turns have malformed tool calls, which %s is shown as text"
        log.info(text, layout.num_spelled, job.model)
    if images and (shown := layout.prompt.count(IMAGE_MARKER)) != len(images):
        text = f"the chat template of {job.model} shows {shown} of {len(images)} pictures"
        raise InvalidRequestError(text, param="messages")
    return ChatPlan(layout, images, job.conversation.offer.left_out)


def offer_of(
    tools: Any, tool_choice: Any = None, *, is_parallel: bool = True, tool_format: str | None = None
) -> ToolOffer:
    """The tools a caller offers, in OpenAI's form or as Python functions, and what is to be done with them.

    Every tool has to be a function. `tool_format` names the format of calls (None: the model's).

    Raises:
        InvalidRequestError, UnsupportedError: naming the field.
    """
    tools = described(tools)
    checked_toolset(tools).require_all()
    return offer_of_functions(tools, tool_choice, is_parallel=is_parallel, tool_format=tool_format)


def offer_of_functions(
    tools: Any, tool_choice: Any = None, *, is_parallel: bool = True, tool_format: str | None = None
) -> ToolOffer:
    """As `offer_of`, but tools that are no functions are left out, unless the choice forces one.

    Raises:
        InvalidRequestError, UnsupportedError: naming the field.
    """
    found = checked_toolset(tools)
    choice = checked_choice(tool_choice, found.tools, found.left_out)
    if tool_format is not None:
        format_named(tool_format)
    if choice.mode is ChoiceMode.NONE:
        return ToolOffer(tool_format=tool_format)
    max_calls = MAX_FORCED_CALLS if is_parallel else 1
    return ToolOffer(found.tools, choice, max_calls, found.left_out, tool_format)


def form_of(note: bytes) -> AnswerForm:
    """The form that a request's `note` keeps; one that cannot be read is plain."""
    try:
        return _decode(note) if note else PLAIN
    except (msgspec.DecodeError, TypeError):  # another version wrote it
        return PLAIN


class ChoiceReaders:
    """The readers of one answer's choices.

    Args:
        form: what to look for in the text.
        seed: the answer's id, which the ids of calls are made from.
    """

    def __init__(self, form: AnswerForm, seed: str) -> None:
        self._form = form
        self._seed = seed
        self._readers: dict[int, AnswerReader] = {}
        self.num_reasoning_tokens = 0

    def __repr__(self) -> str:
        return f"ChoiceReaders({len(self._readers)} choices)"

    def read(self, delta: Delta | TextDelta) -> list[AnswerEvent]:
        """What the delta adds to its choice; with the last one, all that was held back."""
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = AnswerReader(self._form, self._seed, delta.index)
        if reader.is_reasoning:
            self.num_reasoning_tokens += len(delta.token_ids)
        events = reader.feed(delta.text)
        return [*events, *reader.finish()] if delta.finish_reason is not None else events

    def finish_reason(self, delta: Delta | TextDelta) -> FinishReason | None:
        """Why the choice ended: an answer that stopped and holds calls ended for their sake (SPEC D4)."""
        reader = self._readers.get(delta.index)
        if delta.finish_reason is FinishReason.STOP and reader is not None and reader.num_calls:
            return FinishReason.TOOL_CALLS
        return delta.finish_reason


async def chat_deltas(deltas: AsyncIterator[TextDelta], form: AnswerForm) -> AsyncGenerator[TextDelta, None]:
    """The deltas of an answer with reasoning and calls told apart from its text; calls come whole.

    None but the last is empty: the tokens of a call come with the call.
    """
    readers = ChoiceReaders(form, secrets.token_hex(8))
    begun: dict[int, WholeCall] = {}  # the call that each choice is writing
    held: dict[int, list[TextDelta]] = {}  # of each choice, deltas that show nothing yet
    async for delta in deltas:
        text, reasoning, calls = "", "", []
        for event in readers.read(delta):
            match event:
                case str(piece):
                    text += piece
                case Reasoning(piece):
                    reasoning += piece
                case CallBegan(_, own_id, name):
                    begun[delta.index] = WholeCall(own_id, name)
                case CallArguments(_, fragment):
                    begun[delta.index].arguments += fragment
                case CallEnded():
                    call = begun.pop(delta.index)
                    calls.append(ToolCall(call.id, call.name, call.arguments))
                case CallBroken(_, source) | CallCut(_, source):
                    begun.pop(delta.index, None)
                    text += source
        if not (text or reasoning or calls or delta.finish_reason or delta.usage):
            held.setdefault(delta.index, []).append(delta)
            continue
        tokens = [*held.pop(delta.index, ()), delta]
        yield msgspec.structs.replace(
            delta,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            token_ids=[token for each in tokens for token in each.token_ids],
            logprobs=_joined(tokens),
            finish_reason=readers.finish_reason(delta),
        )


def _joined(deltas: Sequence[TextDelta]) -> list[TokenLogprob] | None:
    """The logprobs of deltas that are given out as one; None: none has any."""
    if all(delta.logprobs is None for delta in deltas):
        return None
    return [one for delta in deltas for one in delta.logprobs or ()]
