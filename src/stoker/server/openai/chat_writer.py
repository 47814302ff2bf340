"""Chat completions on the wire: chunk by chunk, or one whole answer.

Reasoning, content and tool calls are told apart by `stoker.tasks.chat`; here they get their places in
OpenAI's shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from stoker.chat.answer import WholeAnswer
from stoker.chat.answer_events import CallArguments, CallBegan, Content, Reasoning
from stoker.ipc.events import Delta, Finished, PrefillProgress
from stoker.ipc.request import FinishReason
from stoker.server.openai.answers import (
    Call,
    CallPiece,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    Function,
    FunctionPiece,
)
from stoker.server.openai.logprobs import chat_logprobs
from stoker.server.streaming.head import Head, Totals, closing, progress, whole
from stoker.server.streaming.sse import frame
from stoker.tasks.chat import PLAIN, ChoiceReaders

if TYPE_CHECKING:
    from stoker.chat.answer import AnswerForm
    from stoker.chat.answer_events import AnswerEvent
    from stoker.client.requests.stream import StreamEvent
    from stoker.ipc.usage import TokenLogprob

_CHUNK = "chat.completion.chunk"
_WHOLE = "chat.completion"
_ROLE = ChatDelta(role="assistant", content="")
_NOTHING = ChatDelta()
_EMPTY = ChatDelta(content="")


class ChatChunks:
    """A chat completion as chunks; the first of each choice names the role."""

    def __init__(self, head: Head, form: AnswerForm = PLAIN) -> None:
        self._head = head
        self._readers = ChoiceReaders(form, head.id)
        self._totals = Totals()
        self._begun: set[int] = set()
        # Where usage was asked for, every chunk has the field and the last one fills it.
        self._no_usage = None if head.wants_usage else UNSET

    def write(self, _prompt: int, event: StreamEvent) -> bytes:
        """Frames of one event; empty if it shows nothing."""
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Finished):
            self._totals.add(event)
        elif isinstance(event, PrefillProgress):
            return progress(self._head, _CHUNK, event, [ChatChunkChoice(0, _NOTHING)])
        return b""

    def end(self) -> bytes:
        """Frames after the last event."""
        return closing(self._head, _CHUNK, self._totals, [ChatChunkChoice(0, _NOTHING)])

    def _delta(self, event: Delta) -> bytes:
        opening = b""
        if event.index not in self._begun:
            self._begun.add(event.index)
            opening = self._frame(ChatChunkChoice(event.index, _ROLE))
        found = [_delta_of(piece, self._head) for piece in self._readers.read(event)]
        deltas = [delta for delta in found if delta is not _NOTHING]
        if event.logprobs and not deltas:
            deltas = [_EMPTY]
        frames = [self._frame(ChatChunkChoice(event.index, delta)) for delta in deltas[:-1]]
        if deltas:
            logprobs = chat_logprobs(event.logprobs) if event.logprobs else None
            frames.append(self._frame(ChatChunkChoice(event.index, deltas[-1], logprobs)))
        if reason := self._readers.finish_reason(event):  # clients expect it in a chunk without text
            shown = _reason(reason, self._head)
            frames.append(self._frame(ChatChunkChoice(event.index, _NOTHING, None, shown)))
        return b"".join([opening, *frames])

    def _frame(self, choice: ChatChunkChoice) -> bytes:
        return frame(self._head.answer(_CHUNK, [choice], usage=self._no_usage))


class WholeChat:
    """A chat completion as one answer."""

    def __init__(self, head: Head, form: AnswerForm = PLAIN, *, has_logprobs: bool) -> None:
        self._head = head
        self._readers = ChoiceReaders(form, head.id)
        self._has_logprobs = has_logprobs
        self._totals = Totals()
        self._answers = [WholeAnswer() for _ in range(head.n)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(head.n)]
        self._reasons = ["length"] * head.n

    def add(self, _prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        if isinstance(event, Delta):
            self._answers[event.index].add(self._readers.read(event))
            self._logprobs[event.index].extend(event.logprobs or ())
            if reason := self._readers.finish_reason(event):
                self._reasons[event.index] = _reason(reason, self._head)
        elif isinstance(event, Finished):
            self._totals.add(event)

    def whole(self) -> bytes:
        """The answer's body."""
        choices = [
            ChatChoice(
                index,
                _message_of(self._answers[index], self._head),
                self._reasons[index],
                chat_logprobs(self._logprobs[index]) if self._has_logprobs else None,
            )
            for index in range(self._head.n)
        ]
        return whole(self._head, _WHOLE, self._totals, choices)


def _reason(reason: FinishReason, head: Head) -> str:
    is_call = reason is FinishReason.TOOL_CALLS and head.has_functions
    return "function_call" if is_call else reason


def _delta_of(event: AnswerEvent, head: Head) -> ChatDelta:
    """What a piece of the answer adds; an end of a call adds nothing."""
    match event:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case CallBegan(index, own_id, name):
            return _call_delta(CallPiece(index, FunctionPiece("", name), own_id, "function"), head)
        case CallArguments(index, fragment):
            return _call_delta(CallPiece(index, FunctionPiece(fragment)), head)
    return _NOTHING


def _call_delta(piece: CallPiece, head: Head) -> ChatDelta:
    if not head.has_functions:
        return ChatDelta(tool_calls=[piece])
    return _NOTHING if piece.index else ChatDelta(function_call=piece.function)  # the old form has one call


def _message_of(answer: WholeAnswer, head: Head) -> ChatMessage:
    calls = [Call(call.id, Function(call.name, call.arguments)) for call in answer.calls]
    return ChatMessage(
        None if calls and not answer.content else answer.content,
        reasoning_content=answer.reasoning or UNSET,
        tool_calls=UNSET if head.has_functions else calls or UNSET,
        function_call=calls[0].function if calls and head.has_functions else UNSET,
    )
