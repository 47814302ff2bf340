"""An answer as OpenAI's Responses API writes it: typed events, or one response object.

`ResponseBuilder` is pure: events of the answer in, JSON objects out. The writers around it read the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
from stoker.ipc.events import PrefillProgress
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Usage
from stoker.server.openai.answers import timings_fields
from stoker.server.openai.responses.items import item_id, sealed
from stoker.server.sse import DONE, PROGRESS_EVENT, Ending, progress_fields, typed_frames
from stoker.server.streaming import AnswerReading

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stoker.chat.answer import AnswerForm
    from stoker.chat.answer_events import AnswerEvent
    from stoker.client.requests.stream import StreamEvent
    from stoker.errors import ErrorInfo

    Json = dict[str, Any]

_INCOMPLETE = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.PREEMPTED: "preempted",
}


BROKEN_CALL = "incomplete_function_call"
"""Why a response is incomplete whose model ended its text within a call, or wrote none that can be read."""
REASONING_EVENT = "reasoning_text"
"""As OpenAI and its clients name the events of reasoning."""
_PROGRESS_EVENT = f"stoker:{PROGRESS_EVENT}"
"""Open Responses wants events that it does not know to begin with a name of whoever sends them."""


@dataclass(frozen=True)
class ResponseHead:
    """Identity of one response.

    Attributes:
        id: `resp_...`.
        model: id of the model that answers.
        created: seconds since the epoch.
        echo: what the object repeats of the request.
        namespaces: by the name that the model knows a function by: its namespace, and its name there.
        max_calls: further calls are left out; None: as many as the model writes.
        seals_reasoning: reasoning items hold their text once more, for clients that pass nothing else back.
        reasoning_event: events `response.NAME.delta` and `.done` tell of reasoning.
    """

    id: str
    model: str
    created: int
    echo: dict[str, Any]
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    max_calls: int | None = None
    seals_reasoning: bool = False
    reasoning_event: str = REASONING_EVENT


class ResponseBuilder:
    """Builds one response; the output items follow one another, each whole before the next begins.

    Args:
        head: of the response.
        clock: seconds since the epoch.
    """

    def __init__(self, head: ResponseHead, clock: Callable[[], float]) -> None:
        self._head = head
        self._clock = clock
        self._completed_s: int | None = None
        self._output: list[Json] = []
        self._sequence = 0
        self._open: Json | None = None  # the item being written, the last of the output
        self._status = "in_progress"
        self._has_broken_call = False
        self._reason: str | None = None
        self._error: Json | None = None
        self._usage: Json | None = None
        self._timings: Json = {}

    def begin(self) -> list[Json]:
        """The first events."""
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def progress(self, event: PrefillProgress) -> Json:
        """How much of the prompt is computed; no event of OpenAI's, sent where it was asked for."""
        return self._numbered(_PROGRESS_EVENT, prompt_progress=progress_fields(event))

    def add(self, events: Iterable[AnswerEvent]) -> list[Json]:
        """What these add."""
        written: list[Json] = []
        for event in events:
            if self._is_left_out(event):
                continue
            match event:
                case str(text):
                    written += self._text("message", "output_text", text)
                case Reasoning(text):
                    written += self._text("reasoning", "reasoning_text", text)
                case CallBegan():
                    written += self._open_call(event)
                case CallArguments(_, fragment):
                    written.append(self._arguments(fragment))
                case CallEnded():
                    written += self._close("completed")
                case CallBroken() | CallCut():
                    self._has_broken_call = True
                    written += self._close("incomplete")
        return written

    def _is_left_out(self, event: AnswerEvent) -> bool:
        """Whether it is of a call beyond those that the response may have."""
        if isinstance(event, str | Reasoning) or self._head.max_calls is None:
            return False
        return event.index >= self._head.max_calls

    def end(self, reading: AnswerReading) -> list[Json]:
        """The last events."""
        self._reason = None if reading.reason is None else _INCOMPLETE.get(reading.reason)
        if self._reason is None and self._has_broken_call:
            self._reason = BROKEN_CALL
        self._status = "incomplete" if self._reason else "completed"
        self._completed_s = None if self._reason else int(self._clock())
        self._usage = usage_fields(reading.usage, reading.num_reasoning_tokens)
        self._timings = timings_fields(reading)
        closing = self._close(self._status)
        return [*closing, self._whole(f"response.{self._status}")]

    def fail(self, info: ErrorInfo) -> list[Json]:
        """The last events of a response that failed after it began."""
        self._status = "failed"
        self._error = {"code": "server_error", "message": info.message}
        return [*self._close("incomplete"), self._whole("response.failed")]

    def response(self) -> Json:
        """The response object as it stands; `timings`, a field of our own, is there at its end."""
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": self._completed_s,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": self._reason} if self._reason else None,
            "model": self._head.model,
            "output": list(self._output),
            **self._head.echo,
            "usage": self._usage,
            **self._timings,
        }

    # ------------------------------------------------------------ items

    def _text(self, kind: str, part: str, text: str) -> list[Json]:
        written: list[Json] = []
        if self._open is None or self._open["type"] != kind:
            item: Json = {
                "id": self._next_id(kind),
                "type": kind,
                "status": "in_progress",
                "content": [],
            }
            if kind == "message":
                item["role"] = "assistant"
            else:
                item["summary"] = []
            written = self._open_item(item)
            item["content"] = [_part(part, "")]
            written.append(self._event("response.content_part.added", content_index=0, part=_part(part, "")))
        assert self._open is not None
        self._open["content"][0]["text"] += text
        extra: Json = {"logprobs": []} if part == "output_text" else {}
        return [*written, self._event(f"{self._told(part)}.delta", content_index=0, delta=text, **extra)]

    def _told(self, part: str) -> str:
        """What the types of the events of such a part begin with."""
        return f"response.{self._head.reasoning_event if part == REASONING_EVENT else part}"

    def _open_call(self, event: CallBegan) -> list[Json]:
        namespace, name = self._head.namespaces.get(event.name, ("", event.name))
        item = {
            "id": self._next_id("function_call"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": event.id,
            "name": name,
            "arguments": "",
        }
        return self._open_item(item | ({"namespace": namespace} if namespace else {}))

    def _arguments(self, fragment: str) -> Json:
        assert self._open is not None, "arguments of a call that has not begun"
        self._open["arguments"] += fragment
        return self._event("response.function_call_arguments.delta", delta=fragment)

    def _next_id(self, kind: str) -> str:
        return item_id(self._head.id, kind, len(self._output))

    def _open_item(self, item: Json) -> list[Json]:
        closing = self._close("completed")
        self._output.append(item)
        self._open = item
        added = self._numbered("response.output_item.added", output_index=self._last, item=dict(item))
        return [*closing, added]

    def _close(self, status: str) -> list[Json]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        about = {"item_id": item["id"], "output_index": self._last}
        if item["type"] == "function_call":
            done = {**about, "name": item["name"], "arguments": item["arguments"]}
            written = [self._numbered("response.function_call_arguments.done", **done)]
        else:
            part = item["content"][0]
            if item["type"] == "reasoning" and self._head.seals_reasoning:
                item["encrypted_content"] = sealed(part["text"])
            extra: Json = {"logprobs": []} if part["type"] == "output_text" else {}
            about |= {"content_index": 0}
            written = [
                self._numbered(f"{self._told(part['type'])}.done", **about, text=part["text"], **extra),
                self._numbered("response.content_part.done", **about, part=dict(part)),
            ]
        return [
            *written,
            self._numbered("response.output_item.done", output_index=self._last, item=dict(item)),
        ]

    @property
    def _last(self) -> int:
        return len(self._output) - 1

    def _event(self, kind: str, **fields: Any) -> Json:
        assert self._open is not None
        return self._numbered(kind, item_id=self._open["id"], output_index=self._last, **fields)

    def _whole(self, kind: str) -> Json:
        return self._numbered(kind, response=self.response())

    def _numbered(self, kind: str, **fields: Any) -> Json:
        numbered = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return numbered


def _part(kind: str, text: str) -> Json:
    return {"type": kind, "text": text} | (
        {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    )


def usage_fields(usage: Usage, num_reasoning_tokens: int) -> Json:
    """The token counts of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


Keep = Callable[["Json"], None]
"""Takes a response object that has come to its end."""


class ResponseEvents:
    """A response that is being written: the objects of its events, and what it is at its end.

    Args:
        head: of the response.
        form: how the text is to be read.
        keep: gets the response at its end; None: nobody does.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        head: ResponseHead,
        form: AnswerForm,
        keep: Keep | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keep = keep
        self._builder = ResponseBuilder(head, clock)
        self._reading = AnswerReading(form, head.id)
        self._has_begun = False

    def read(self, event: StreamEvent) -> list[AnswerEvent]:
        """What one event adds to the answer."""
        return self._reading.read(event)

    def of(self, event: StreamEvent) -> list[Json]:
        """The objects of what one event adds to the answer."""
        objects = self._begin() + self._builder.add(self.read(event))
        if isinstance(event, PrefillProgress):
            objects.append(self._builder.progress(event))
        return objects

    def end(self) -> list[Json]:
        """Those after the last event."""
        objects = [*self._begin(), *self._builder.end(self._reading)]
        self._kept()
        return objects

    def whole(self, answer: WholeAnswer) -> Json:
        """The response of an answer that was read to its end, without events."""
        self._builder.add(answer.events())
        self._builder.end(self._reading)
        return self._kept()

    def fail(self, info: ErrorInfo) -> list[Json]:
        """Those of an error after the response began."""
        return [*self._begin(), *self._builder.fail(info)]

    def _kept(self) -> Json:
        response = self._builder.response()
        if self._keep is not None:
            self._keep(response)
        return response

    def _begin(self) -> list[Json]:
        objects = [] if self._has_begun else self._builder.begin()
        self._has_begun = True
        return objects


class ResponseChunks:
    """A response as server-sent events.

    Args:
        events: of the response.
    """

    def __init__(self, events: ResponseEvents) -> None:
        self.ending = Ending(DONE, lambda info: typed_frames(events.fail(info)))
        self._events = events

    def write(self, _prompt: int, event: StreamEvent) -> bytes:
        """Frames of one event; empty if it shows nothing."""
        return typed_frames(self._events.of(event))

    def end(self) -> bytes:
        """Frames after the last event."""
        return typed_frames(self._events.end())


class WholeResponse:
    """A response as one object.

    Args:
        response: that is written.
    """

    def __init__(self, response: ResponseEvents) -> None:
        self._response = response
        self._answer = WholeAnswer()

    def add(self, _prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        self._answer.add(self._response.read(event))

    def whole(self) -> bytes:
        """The answer's body."""
        return msgspec.json.encode(self._response.whole(self._answer))
