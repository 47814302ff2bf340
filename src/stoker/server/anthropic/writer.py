"""An answer as Anthropic's Messages API writes it: typed events, or one message.

`MessageBuilder` is pure: events of the answer in, JSON objects out. The writers around it read the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.chat.answer import WholeAnswer
from stoker.chat.answer_events import (
    CallArguments,
    CallBegan,
    CallBroken,
    CallCut,
    CallEnded,
    Reasoning,
)
from stoker.ipc.events import Admitted, PrefillProgress
from stoker.ipc.request import FinishReason, Priority
from stoker.ipc.usage import Usage
from stoker.server.errors import messages_error
from stoker.server.openai.answers import timings_fields
from stoker.server.sse import PROGRESS_EVENT, Ending, progress_fields, typed_frames
from stoker.server.streaming import AnswerReading

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.chat.answer import AnswerForm
    from stoker.chat.answer_events import AnswerEvent
    from stoker.client.requests.stream import StreamEvent
    from stoker.errors import ErrorInfo

    Json = dict[str, Any]

_TIERS = {Priority.INTERACTIVE: "standard", Priority.BACKGROUND: "batch"}
# The nearest words that API has; a paused turn can be sent again to go on.
_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CANCELLED: "pause_turn",
    FinishReason.PREEMPTED: "pause_turn",
}


PING = typed_frames([{"type": "ping"}])
"""Sent while there is nothing to send."""


@dataclass(frozen=True)
class MessageHead:
    """Identity of one message.

    Attributes:
        id: `msg_...`.
        model: id of the model that answers.
        request_id: of the HTTP request; errors repeat it.
        priority: the class that it runs in.
        names_progress: progress of the prompt comes as events of that name.
    """

    id: str
    model: str
    request_id: str = ""
    priority: Priority = Priority.INTERACTIVE
    names_progress: bool = False


class MessageBuilder:
    """Builds the events of one message; its blocks follow one another."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._index = -1
        self._open = ""  # type of the block being written

    def begin(self, usage: Usage) -> list[Json]:
        """The first event; `usage` says what the prompt cost."""
        unknown: Json = {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": _message(self._head, [], unknown, usage)}]

    def progress(self, event: PrefillProgress) -> Json:
        """How much of the prompt is computed.

        In a ping, as events of other types are errors to some clients; under a name where that was asked for.
        """
        kind = PROGRESS_EVENT if self._head.names_progress else "ping"
        return {"type": kind, "prompt_progress": progress_fields(event)}

    def add(self, events: Iterable[AnswerEvent]) -> list[Json]:
        """What these add."""
        written: list[Json] = []
        for event in events:
            match event:
                case str(text):
                    written += self._ensure({"type": "text", "text": ""})
                    written.append(self._delta({"type": "text_delta", "text": text}))
                case Reasoning(text):
                    written += self._ensure({"type": "thinking", "thinking": "", "signature": ""})
                    written.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case CallBegan(_, own_id, name):
                    block = {"type": "tool_use", "id": _call_id(own_id), "name": name, "input": {}}
                    written += self._start(block)
                case CallArguments(_, fragment):
                    written.append(self._delta({"type": "input_json_delta", "partial_json": fragment}))
                case CallEnded() | CallBroken() | CallCut():
                    written += self._stop()
        return written

    def end(self, reading: AnswerReading) -> list[Json]:
        """The last events."""
        counts = {"usage": _counts(reading.usage), **timings_fields(reading)}
        last = {"type": "message_delta", "delta": _ended(reading), **counts}
        return [*self._stop(), last, {"type": "message_stop"}]

    def _ensure(self, block: Json) -> list[Json]:
        return [] if self._open == block["type"] else self._start(block)

    def _start(self, block: Json) -> list[Json]:
        stopped = self._stop()
        self._index += 1
        self._open = block["type"]
        return [*stopped, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _stop(self) -> list[Json]:
        kind, self._open = self._open, ""
        if not kind:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _message(head: MessageHead, content: list[Json], end: Json, usage: Usage) -> Json:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **end,
        "usage": _counts(usage) | {"service_tier": _TIERS[head.priority]},
    }


def _ended(reading: AnswerReading) -> Json:
    """`stop_reason` and `stop_sequence`."""
    if reading.reason is FinishReason.STOP and reading.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reading.stop_text}
    kind = "end_turn" if reading.reason is None else _REASONS.get(reading.reason, "end_turn")
    return {"stop_reason": kind, "stop_sequence": None}


def _counts(usage: Usage) -> Json:
    """Counts in that API's sense: its input tokens are those that no cache had."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _call_id(own_id: str) -> str:
    """`toolu_...`, as this API names calls; the same for one call of an answer."""
    return f"toolu_{own_id.removeprefix('call_')}"


def _blocks(answer: WholeAnswer) -> list[Json]:
    blocks: list[Json] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        given = msgspec.Raw(b"{}" if call.is_cut else call.arguments.encode())  # JSON as it was written
        blocks.append({"type": "tool_use", "id": _call_id(call.id), "name": call.name, "input": given})
    return blocks


class MessageChunks:
    """A message as server-sent events."""

    def __init__(self, head: MessageHead, form: AnswerForm) -> None:
        self.ending = Ending(b"", self.fail, PING)
        self._head = head
        self._builder = MessageBuilder(head)
        self._reading = AnswerReading(form, head.id)
        self._has_begun = False

    def write(self, _prompt: int, event: StreamEvent) -> bytes:
        """Frames of one event; empty if it shows nothing.

        The message begins when the request has a slot: from then on it is known what its prompt cost.
        """
        if isinstance(event, Admitted):
            return typed_frames(
                self._begin(Usage(prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens))
            )
        objects = self._begin() + self._builder.add(self._reading.read(event))
        if isinstance(event, PrefillProgress):
            objects.append(self._builder.progress(event))
        return typed_frames(objects)

    def end(self) -> bytes:
        """Frames after the last event."""
        return typed_frames([*self._begin(), *self._builder.end(self._reading)])

    def fail(self, info: ErrorInfo) -> bytes:
        """The frame of an error after the stream began."""
        return typed_frames([messages_error(info, self._head.request_id)])

    def _begin(self, usage: Usage | None = None) -> list[Json]:
        """The first event once; a kept answer's stream does not tell what its prompt cost before its end."""
        objects = [] if self._has_begun else self._builder.begin(usage or Usage())
        self._has_begun = True
        return objects


class WholeMessage:
    """A message as one object."""

    def __init__(self, head: MessageHead, form: AnswerForm) -> None:
        self._head = head
        self._reading = AnswerReading(form, head.id)
        self._answer = WholeAnswer()

    def add(self, _prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        self._answer.add(self._reading.read(event))

    def whole(self) -> bytes:
        """The answer's body."""
        ended, usage = _ended(self._reading), self._reading.usage
        message = _message(self._head, _blocks(self._answer), ended, usage)
        return msgspec.json.encode(message | timings_fields(self._reading))
